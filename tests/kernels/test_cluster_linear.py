"""Linear layers by a cluster: its index maps in Python, the kernel compiled without a GPU, and on one."""

import random
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from bladellm_kernels import cluster_linear
from bladellm_kernels.cluster_linear import (
    MAX_GROUPS,
    ClusterSchedule,
    has_registers,
    launch_cluster_linear,
    most_stages,
    padded_tokens,
    plan,
    source,
    tile_outputs,
)
from bladellm_kernels.cuda_compiler import CudaCompilerError
from bladellm_kernels.cuda_kernel import KeptLaunches
from bladellm_kernels.hopper_parts import matrices_fit
from bladellm_kernels.linear import linear_reference

from tests.kernels.chain_support import assert_replays_read_what_is_in_front
from tests.kernels.conditions import assert_close
from tests.support.cases import some_pairs

BANKS = 32


def random_schedule(rows: int) -> ClusterSchedule:
    """Any that can be launched for so many rows."""
    while True:
        groups = random.randint(1, MAX_GROUPS)
        tokens = random.choice((None, -(-rows // 8) * 8 + 8))
        padded = -(-rows // 8) * 8 if tokens is None else tokens
        most = most_stages(padded, groups)
        if padded <= 256 and has_registers(padded, groups) and most >= 2:
            break
    stages, cluster = random.randint(2, min(most, 9)), random.choice((1, 2, 3, 4, 8))
    return ClusterSchedule(groups, cluster, stages, random.randrange(3), tokens)


class Tile:
    """The index maps of `cluster_linear.cu` for all consumers of a CTA at once, by its names."""

    def __init__(self, schedule: ClusterSchedule, rows: int) -> None:
        self.schedule, self.rows, self.tokens = schedule, rows, padded_tokens(rows, schedule)
        self.outputs = tile_outputs(schedule)
        self.row = self.outputs + 4
        self.thread = np.arange(128 * schedule.groups)
        self.quads = self.outputs // 4
        self.pass_tokens = len(self.thread) // self.quads
        slice_tokens = -(-self.tokens // schedule.cluster)
        self.passes = -(-slice_tokens // self.pass_tokens)

    def steps(self, rank: int, inputs: int) -> range:
        """`steps_of`: the inputs of a CTA in steps."""
        each, more = divmod(-(-inputs // 64), self.schedule.cluster)
        first = rank * each + min(rank, more)
        return range(first, first + each + (rank < more))

    def fragment(self, register: int) -> tuple[np.ndarray, np.ndarray]:
        """Output and token of a sum in every thread's register, as the instruction set describes the product."""
        row = self.thread // 128 * 64 + self.thread % 128 // 32 * 16 + self.thread % 32 // 4
        return row + 8 * (register % 4 // 2), register // 4 * 8 + self.thread % 4 * 2 + register % 2

    def sum_places(self, register: int) -> np.ndarray:
        """`leave_sums`; of a gate, the sum in the register, those of up are two further on."""
        lane, warp, group = self.thread % 32, self.thread // 32 % 4, self.thread // 128
        output, token = (group * 4 + warp) * 16 + lane // 4, lane % 4 * 2
        more_tokens, more_outputs = register // 4 * 8 + register % 2, register // 2 % 2 * 8
        return token * self.row + output + more_tokens * self.row + more_outputs

    def slices(self, rank: int) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """`Slice`: of every pass tokens, quads, and whether they are stored."""
        tokens = -(-self.rows // self.schedule.cluster)
        end = min(self.rows, (rank + 1) * tokens)
        for each in range(self.passes):
            token = rank * tokens + self.thread // self.quads + each * self.pass_tokens
            yield token, self.thread % self.quads, token < end


def emulated(
    schedule: ClusterSchedule, x: np.ndarray, weight: np.ndarray, residual: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """The outputs, and how many times each was written."""
    (rows, inputs), outputs = x.shape, len(weight)
    tile, planned = Tile(schedule, rows), plan(rows, outputs, schedule)
    step = 64
    deep = -(-inputs // step) * step
    wide_x = np.zeros((tile.tokens, deep))
    wide_x[:rows, :inputs] = x
    wide_weight = np.zeros((planned.grid // schedule.cluster * tile.outputs, deep))
    wide_weight[:outputs, :inputs] = weight
    out, written = np.full((rows, outputs), np.nan), np.zeros((rows, outputs), int)
    for first in range(0, len(wide_weight), tile.outputs):
        partial = np.full((schedule.cluster, tile.tokens * tile.row), np.nan)
        for rank in range(schedule.cluster):
            steps = tile.steps(rank, inputs)
            taken = slice(steps.start * step, steps.stop * step)
            sums = wide_weight[first : first + tile.outputs, taken] @ wide_x[:, taken].T
            for register in range(tile.tokens // 2):
                partial[rank, tile.sum_places(register)] = sums[tile.fragment(register)]
        for rank in range(schedule.cluster):
            for token, quad, stored in tile.slices(rank):
                places = np.minimum(token, tile.tokens - 1) * tile.row + quad * 4
                totals = sum(partial[other][places[:, None] + np.arange(4)] for other in range(schedule.cluster))
                output = first + quad * 4
                kept = stored & (output < outputs)
                where = token[kept][:, None], output[kept][:, None] + np.arange(4)
                out[where] = totals[kept] + residual[where]
                np.add.at(written, where, 1)
    return out, written


@pytest.mark.parametrize("turn", range(24))
def test_every_output_is_written_once_with_all_its_inputs(turn):
    """Odd sizes, padded tiles, CTAs without any inputs, slices without any tokens."""
    rows = random.choice((1, 3, 7, 24, 77, 128, 129, 200, 256))
    outputs, inputs = 8 * random.randint(1, 70), 8 * random.randint(1, 120)
    schedule = random_schedule(rows)
    rng = np.random.default_rng()
    x, weight, residual = (rng.standard_normal(size) for size in ((rows, inputs), (outputs, inputs), (rows, outputs)))
    out, written = emulated(schedule, x, weight, residual)
    assert (written == 1).all(), schedule
    np.testing.assert_allclose(out, x @ weight.T + residual, atol=1e-9)


@pytest.mark.parametrize("groups", range(1, MAX_GROUPS + 1))
def test_sums_lie_apart_and_in_different_banks(groups):
    tile = Tile(ClusterSchedule(groups, 2, 2), 96)
    places = np.stack([tile.sum_places(register) for register in range(tile.tokens // 2)])
    assert len(np.unique(places)) == places.size
    assert places.max() < tile.tokens * tile.row
    assert all(len(set(warp % BANKS)) == 32 for row in places for warp in row.reshape(-1, 32))
    assert tile.pass_tokens * tile.quads == len(tile.thread)
    text, defines = source(tile.schedule, tile.tokens, torch.bfloat16, False)
    assert defines["PARTIAL_ROW"] == tile.row
    assert defines["BARRIERS_AT"] >= 4 * tile.tokens * tile.row
    assert "m64n96k16.f32.bf16.bf16" in text


@pytest.mark.parametrize(
    ("schedule", "rows"),
    [
        (ClusterSchedule(4, 1, 4), 256), (ClusterSchedule(1, 1, 1), 8), (ClusterSchedule(1, 9, 4), 8),
        (ClusterSchedule(1, 1, 99), 8), (ClusterSchedule(1, 1, 4, tokens=16), 17), (ClusterSchedule(1, 1, 2), 257),
        (ClusterSchedule(1, 1, 4, tokens=20), 17), (ClusterSchedule(1, 1, 4, launch_at=3), 8),
    ],
)  # fmt: skip
def test_schedules_that_do_not_fit_are_refused(schedule, rows):
    with pytest.raises(ValueError, match="must be"):
        plan(rows, 4096, schedule)


def test_matrices_on_a_cpu_do_not_fit():
    x = torch.zeros(8, 64, dtype=torch.bfloat16)
    assert not matrices_fit(x, x, x[:, :8])


@pytest.mark.parametrize("error", [OSError("there is no NVRTC"), CudaCompilerError("wide.cu(3): error: ?")])
def test_without_a_compiler_nothing_is_launched_and_one_warning_says_so(error, monkeypatch):
    def fail(*given, **more):
        raise error

    monkeypatch.setattr(cluster_linear, "compile_cuda", fail)
    monkeypatch.setattr(cluster_linear, "_launches", KeptLaunches())
    cluster_linear._kernel.cache_clear()
    x, weight, out = (torch.zeros(size, dtype=torch.bfloat16) for size in ((8, 64), (64, 64), (8, 64)))
    with pytest.warns(UserWarning, match="left to cuBLAS") as told:
        found = [launch_cluster_linear(x, weight, given, None, ClusterSchedule(1, 1, 4)) for given in (out, weight[:8])]
    assert found == [False, False]
    assert len(told) == 1
    assert str(error) in str(told[0].message)
    cluster_linear._kernel.cache_clear()


def compiled(schedule: ClusterSchedule, tokens: int, dtype: torch.dtype, residual: bool, path: Path) -> dict[str, int]:
    """Resources of the kernel, its cubin written to a path."""
    triton = pytest.importorskip("triton")
    from bladellm_kernels.cuda_compiler import compile_cuda

    try:
        path.write_bytes(compile_cuda(*source(schedule, tokens, dtype, residual)))
    except OSError as error:
        pytest.skip(str(error))
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    line = [str(tool), "--dump-resource-usage", str(path)]
    report = subprocess.run(line, capture_output=True, text=True, check=True).stdout
    return {name: int(value) for name, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", report)}


TILES = [(8, 4), (24, 1), (64, 3), (128, 2), (128, 4), (192, 3), (256, 1), (256, 2)]


@pytest.mark.parametrize(("tile", "cluster"), some_pairs(TILES, [1, 4], 3), ids=str)
def test_compiled_for_a_hopper(tile, cluster, tmp_path):
    """Without registers in memory; the products of a step follow each other, with one step under way."""
    from tests.kernels.sass import INSTRUCTION

    triton = pytest.importorskip("triton")
    tokens, groups = tile
    schedule = ClusterSchedule(groups, cluster, most_stages(tokens, groups))
    for dtype, residual in ((torch.bfloat16, True), (torch.float16, False)):
        path = tmp_path / "kernel.cubin"
        assert compiled(schedule, tokens, dtype, residual, path).items() >= {"STACK": 0, "LOCAL": 0}.items()
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
    text = subprocess.run([str(tool), "-c", str(path)], capture_output=True, text=True, check=True).stdout
    names = [found[1] for line in text.splitlines() if (found := INSTRUCTION.search(line))]
    products = [place for place, name in enumerate(names) if name.startswith("HGMMA")]
    assert len(products) == 4
    between = set(names[products[0] : products[-1]])
    assert not {name for name in between if name.startswith(("WARPGROUP", "BRA", "BAR", "SYNCS", "LD", "ST"))}
    assert text.count("UTMALDG") == 4


def problem(sizes: tuple[int, int, int], dtype: torch.dtype, residual: bool) -> tuple[torch.Tensor, ...]:
    """x, weight, residual and out, each inside of a larger matrix of NaN."""

    def inside(rows: int, columns: int, scale: float | None) -> torch.Tensor:
        whole = torch.full((rows + 3, columns + 8), torch.nan, device="cuda", dtype=dtype)
        part = whole[:rows, :columns]
        return part if scale is None else part.copy_(torch.randn(rows, columns, device="cuda") * scale)

    rows, outputs, inputs = sizes
    x, weight, out = inside(rows, inputs, 1), inside(outputs, inputs, inputs**-0.5), inside(rows, outputs, None)
    return x, weight, inside(rows, outputs, 1) if residual else None, out


def assert_right(x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor | None, out: torch.Tensor) -> None:
    assert_close(out, linear_reference(x, weight, residual=residual).float(), x.dtype)
    assert out._base[len(x) :].isnan().all()
    assert out._base[:, out.shape[1] :].isnan().all()


@pytest.mark.gpu(hopper=True)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("cluster", [1, 2, 4, 8])
@pytest.mark.parametrize(
    ("rows", "groups"), [(1, 1), (24, 4), (32, 2), (77, 3), (128, 2), (128, 4), (130, 1), (192, 3), (256, 2)]
)
def test_on_a_gpu(rows, groups, cluster, dtype):
    for outputs, inputs in ((4096, 1024), (1000, 1096), (72, 72)):
        for residual in (False, True):
            x, weight, added, out = problem((rows, outputs, inputs), dtype, residual)
            stages = min(most_stages(-(-rows // 8) * 8, groups), random.randint(2, 8))
            schedule = ClusterSchedule(groups, cluster, stages, random.randrange(3))
            assert matrices_fit(x, weight, out, added)
            assert launch_cluster_linear(x, weight, out, added, schedule)
            assert_right(x, weight, added, out)
            first = out.clone()
            launch_cluster_linear(x, weight, out.fill_(torch.nan), added, schedule)
            assert torch.equal(first, out)


@pytest.mark.gpu(hopper=True)
@pytest.mark.parametrize("turn", range(12))
def test_random_schedules_on_a_gpu(turn):
    rows = random.randint(1, 256)
    sizes = rows, 8 * random.randint(1, 300), 8 * random.randint(1, 300)
    x, weight, residual, out = problem(sizes, random.choice((torch.bfloat16, torch.float16)), random.random() < 0.5)
    launch_cluster_linear(x, weight, out, residual, random_schedule(rows))
    assert_right(x, weight, residual, out)


@pytest.mark.gpu(hopper=True)
@pytest.mark.parametrize("launch_at", [0, 1, 2])
@pytest.mark.parametrize("rows", [24, 128, 256])
def test_a_chain_in_a_graph_reads_what_the_kernel_in_front_wrote(rows, launch_at):
    """Layers start early, one behind another; the residual is the output of each second one."""
    x, hidden, inner = torch.empty(rows, 1024, device="cuda", dtype=torch.bfloat16), 1024, 3072
    up = torch.randn(inner, hidden, device="cuda", dtype=x.dtype).mul_(hidden**-0.5)
    down = torch.randn(hidden, inner, device="cuda", dtype=x.dtype).mul_(inner**-0.5)
    given, middle = torch.empty_like(x), x.new_empty(rows, inner)
    schedules = [ClusterSchedule(1, 2, 4, launch_at), ClusterSchedule(2, 8, 4, launch_at)]

    def chain() -> None:
        torch.mul(given, 0.5, out=x)
        for _ in range(3):
            launch_cluster_linear(x, up, middle, None, schedules[0])
            launch_cluster_linear(middle, down, x, x, schedules[1])

    def expected(stream: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            between = linear_reference(stream, up).to(x.dtype)
            stream = linear_reference(between, down, residual=stream).to(x.dtype)
        return stream

    assert_replays_read_what_is_in_front(chain, given, (x, middle), expected)


@pytest.mark.gpu(hopper=True)
def test_few_launches_are_kept(monkeypatch):
    monkeypatch.setattr(cluster_linear, "_launches", KeptLaunches(3))
    for _ in range(5):
        x, weight, residual, out = problem((16, 64, 64), torch.bfloat16, True)
        launch_cluster_linear(x, weight, out, residual, ClusterSchedule(1, 1, 2))
        assert_right(x, weight, residual, out)
    assert len(cluster_linear._launches) <= 3
