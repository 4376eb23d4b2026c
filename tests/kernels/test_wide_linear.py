"""Linear layers of many rows by clusters: index maps in Python, the kernel compiled without a GPU, and on one."""

import random
import re
import subprocess
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from bladellm_kernels import wide_linear
from bladellm_kernels.cuda_compiler import CudaCompilerError
from bladellm_kernels.cuda_kernel import KeptLaunches
from bladellm_kernels.hopper_parts import SHARED_BYTES, matrices_fit
from bladellm_kernels.linear import linear_reference, linear_silu_mul_reference
from bladellm_kernels.wide_linear import (
    WideSchedule,
    launch_wide_linear,
    plan,
    shared_bytes,
    source,
    stages_of,
    tile_outputs,
)

from tests.kernels.chain_support import assert_replays_read_what_is_in_front
from tests.kernels.conditions import assert_close
from tests.kernels.wide_support import PROCESSORS, random_schedule
from tests.support.cases import some_pairs


class Results:
    """The index maps of results in `wide_linear.cu`, for all threads of a group at once, by its names."""

    def __init__(self, schedule: WideSchedule) -> None:
        self.schedule = schedule
        self.thread = np.arange(128)
        self.row_bytes = 128 // (1 + schedule.gated)
        self.matrices = 2 if schedule.gated else 4

    def fragment(self, register: int) -> tuple[np.ndarray, np.ndarray]:
        """Row of the weight and token of a sum in every thread's register, as the instruction set describes it."""
        row = self.thread // 32 * 16 + self.thread % 32 // 4
        return row + 8 * (register % 4 // 2), register // 4 * 8 + self.thread % 4 * 2 + register % 2

    def places(self, block: int) -> np.ndarray:
        """Byte that each lane names, [warps, lanes]: `swizzled`, and what follows from the block."""
        lane, warp = self.thread % 32, self.thread // 32
        piece = warp if self.schedule.gated else warp * 2 + lane // 16
        place = lane % 16 * self.row_bytes + piece * 16
        place ^= (place >> 7 & (self.row_bytes // 16 - 1)) << 4
        return (place + block * 16 * self.row_bytes).reshape(4, 32)

    def pair(self, values: np.ndarray, block: int, each: int) -> np.ndarray:
        """`pairs_of`: [threads, 2]; values: sums by rows of the weight and tokens."""
        first = (2 * block + each % 2) * 4 + each // 2 * 2
        low, high = (values[self.fragment(first + more)] for more in (0, 1))
        if self.schedule.gated:
            gates, ups = (low, high), (values[self.fragment(first + 2 + more)] for more in (0, 1))
            low, high = (gate / (1 + np.exp(-gate)) * up for gate, up in zip(gates, ups, strict=True))
        return np.stack([low, high], 1)

    def stored_turned(self, memory: np.ndarray, block: int, pairs: list[np.ndarray]) -> None:
        """`stmatrix.trans`: lane 8 · m + r names row r of matrix m, whose column is what lanes 4 · c … have."""
        for warp in range(4):
            for number, pair in enumerate(pairs):
                matrix = pair.reshape(4, 8, 4, 2)[warp].reshape(8, 8)
                for row in range(8):
                    place = self.places(block)[warp, 8 * number + row] // 2
                    assert np.isnan(memory[place : place + 8]).all()
                    memory[place : place + 8] = matrix[:, row]

    def box(self, memory: np.ndarray) -> np.ndarray:
        """[tokens, outputs] as the copy engine reads them: pieces of 16 bytes swizzled within 64 or 128 bytes."""
        count = self.row_bytes // 16
        token, piece = np.indices((self.schedule.tokens, count))
        turned = piece ^ (token * self.row_bytes // 128 % 8 % count)
        return memory.reshape(self.schedule.tokens, count, 8)[token, turned].reshape(self.schedule.tokens, -1)


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("turn", range(8))
def test_results_become_boxes_of_tokens(turn, gated):
    schedule = random_schedule(gated)
    results, rng = Results(schedule), np.random.default_rng()
    sums = rng.standard_normal((64, schedule.tokens))
    memory = np.full(schedule.tokens * results.row_bytes // 2, np.nan)
    for block in range(schedule.tokens // 16):
        results.stored_turned(memory, block, [results.pair(sums, block, each) for each in range(results.matrices)])
    expected = sums
    if gated:
        gate, up = sums.reshape(4, 2, 8, -1).swapaxes(0, 1)
        expected = (gate / (1 + np.exp(-gate)) * up).reshape(32, -1)
    np.testing.assert_allclose(results.box(memory), expected.T)


@pytest.mark.parametrize("gated", [True, False])
def test_rows_of_a_matrix_lie_in_different_banks(gated):
    """8 of 16 bytes each, at once."""
    for row in Results(WideSchedule(gated=gated)).places(1).reshape(-1, 8):
        assert len(set(row % 128)) == 8


@pytest.mark.parametrize("turn", range(12))
def test_launches_fit(turn):
    schedule = random_schedule()
    planned = plan(1000, 1000, 1000, schedule, PROCESSORS)
    _, defines = source(schedule, torch.bfloat16, False)
    assert planned.shared_bytes == defines["SHARED_BYTES"] <= SHARED_BYTES
    assert planned.x_box * schedule.cluster == schedule.tokens
    assert planned.x_box % 8 == 0
    assert planned.out_box * schedule.groups == tile_outputs(schedule)
    full = replace(schedule, stages=None)
    more = replace(schedule, stages=stages_of(full) + 1)
    assert shared_bytes(full) <= SHARED_BYTES < shared_bytes(more)
    assert stages_of(WideSchedule()) == 4


@pytest.mark.parametrize(
    "schedule",
    [
        WideSchedule(tokens=264), WideSchedule(tokens=0), WideSchedule(tokens=72), WideSchedule(groups=4),
        WideSchedule(groups=3), WideSchedule(cluster=4), WideSchedule(band=0), WideSchedule(stages=1),
        WideSchedule(stages=5),
    ],
)  # fmt: skip
def test_schedules_that_do_not_fit_are_refused(schedule):
    with pytest.raises(ValueError, match="must be"):
        plan(512, 4096, 4096, schedule, PROCESSORS)


def test_matrices_on_a_cpu_do_not_fit():
    x = torch.zeros(8, 64, dtype=torch.bfloat16)
    assert not matrices_fit(x, x, x[:, :8])


def test_a_gate_has_no_residual():
    x = torch.zeros(8, 64, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="no residual"):
        launch_wide_linear(x, x, x[:, :8], x[:, :8], WideSchedule())


@pytest.mark.parametrize("error", [OSError("there is no NVRTC"), CudaCompilerError("wide.cu(3): error: ?")])
def test_without_a_compiler_nothing_is_launched_and_one_warning_says_so(error, monkeypatch):
    def fail(*given, **more):
        raise error

    monkeypatch.setattr(wide_linear, "compile_cuda", fail)
    monkeypatch.setattr(wide_linear, "_launches", KeptLaunches())
    wide_linear._kernel.cache_clear()
    x, weight, out = (torch.zeros(size, dtype=torch.bfloat16) for size in ((8, 64), (64, 64), (8, 32)))
    with pytest.warns(UserWarning, match="left to other kernels") as told:
        found = [launch_wide_linear(x, weight[: 2 * width], out[:, :width], None, WideSchedule()) for width in (32, 16)]
    assert found == [False, False]
    assert len(told) == 1
    assert str(error) in str(told[0].message)
    wide_linear._kernel.cache_clear()


TILES, KINDS = [(128, 1), (128, 2), (144, 3), (192, 2), (256, 1), (256, 2)], list(product((1, 2), (True, False)))


@pytest.mark.parametrize(("tile", "kind"), some_pairs(TILES, KINDS, 2), ids=str)
def test_compiled_for_a_hopper(tile, kind, tmp_path):
    """Without registers in memory; the products of a step follow each other; x goes to both CTAs, the weight to one;
    no fence for the whole GPU but where clusters begin and end, or leave sums and take them."""
    (tokens, groups), (cluster, gated) = tile, kind
    from tests.kernels.sass import INSTRUCTION

    triton = pytest.importorskip("triton")
    from bladellm_kernels.cuda_compiler import compile_cuda

    tools, path = Path(triton.__file__).parent / "backends" / "nvidia" / "bin", tmp_path / "kernel.cubin"
    schedule = WideSchedule(tokens, groups, cluster, gated=gated, stream_k=random.random() < 0.5)
    for dtype, residual in ((torch.float16, not gated), (torch.bfloat16, False)):
        try:
            path.write_bytes(compile_cuda(*source(schedule, dtype, residual)))
        except OSError as error:
            pytest.skip(str(error))
        line = [str(tools / "cuobjdump"), "--dump-resource-usage", str(path)]
        report = subprocess.run(line, capture_output=True, text=True, check=True).stdout
        assert set(re.findall(r"(?:STACK|LOCAL):(\d+)", report)) == {"0"}
    line = [str(tools / "nvdisasm"), "-c", str(path)]
    text = subprocess.run(line, capture_output=True, text=True, check=True).stdout
    names = [found[1] for line in text.splitlines() if (found := INSTRUCTION.search(line))]
    products = [place for place, name in enumerate(names) if name.startswith("HGMMA")]
    assert len(products) == 4
    between = set(names[products[0] : products[-1]])
    assert not {name for name in between if name.startswith(("WARPGROUP", "BRA", "BAR", "SYNCS", "LD", "ST"))}
    copies = [name for name in names if name.startswith("UTMALDG")]
    weights, shares = ("UTMALDG.4D" if gated else "UTMALDG.2D"), "UTMALDG.2D" + ".MULTICAST" * (cluster > 1)
    assert sorted(copies) == sorted([weights, shares] * 2)
    assert names.count("MEMBAR.ALL.GPU") == (2 if cluster > 1 else 0) + (2 if schedule.stream_k else 0)
    assert names.count("UTMASTG.2D") == 1


def inside(rows: int, columns: int, dtype: torch.dtype, scale: float | None) -> torch.Tensor:
    """A matrix inside of a larger one of NaN; without a scale NaN itself."""
    whole = torch.full((rows + 3, columns + 8), torch.nan, device="cuda", dtype=dtype)
    part = whole[:rows, :columns]
    return part if scale is None else part.copy_(torch.randn(rows, columns, device="cuda") * scale)


def assert_right(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert_close(found, expected.float(), found.dtype)
    assert found._base[len(found) :].isnan().all()
    assert found._base[:, found.shape[1] :].isnan().all()


@pytest.mark.gpu(hopper=True)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("cluster", [1, 2])
@pytest.mark.parametrize(("tokens", "groups"), [(64, 1), (128, 2), (128, 3), (144, 2), (192, 2), (256, 1), (256, 2)])
def test_gates_on_a_gpu(tokens, groups, cluster, dtype):
    """Fewer tiles than clusters and many more, inputs of less than a ring, partial tiles at every side."""
    for rows, outputs, inputs in ((512, 1024, 1024), (1999, 5000, 1096), (257, 40, 72)):
        x, weight = inside(rows, inputs, dtype, 1), inside(2 * outputs, inputs, dtype, inputs**-0.5)
        out = inside(rows, outputs, dtype, None)
        most = stages_of(WideSchedule(tokens, groups))
        band, stages = random.choice((1, 4, 8)), random.choice((None, 2, most))
        schedule = WideSchedule(tokens, groups, cluster, band, stages, stream_k=random.random() < 0.7)
        assert matrices_fit(x, weight, out)
        assert launch_wide_linear(x, weight, out, None, schedule)
        assert_right(out, linear_silu_mul_reference(x, weight))
        first = out.clone()
        launch_wide_linear(x, weight, out.fill_(torch.nan), None, schedule)
        assert torch.equal(first, out)


@pytest.mark.gpu(hopper=True)
@pytest.mark.parametrize("turn", range(16))
def test_random_schedules_on_a_gpu(turn):
    rows, outputs, inputs = random.randint(1, 2000), *(8 * random.randrange(1, most, 2) for most in (200, 800))
    schedule, dtype = random_schedule(), random.choice((torch.bfloat16, torch.float16))
    x = inside(rows, inputs, dtype, 1)
    weight = inside((1 + schedule.gated) * outputs, inputs, dtype, inputs**-0.5)
    out = inside(rows, outputs, dtype, None)
    expected = linear_silu_mul_reference(x, weight) if schedule.gated else linear_reference(x, weight)
    launch_wide_linear(x, weight, out, None, schedule)
    assert_right(out, expected)


@pytest.mark.gpu(hopper=True)
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize(("tokens", "groups"), [(64, 3), (128, 2), (256, 2)])
def test_residuals_on_a_gpu(tokens, groups, in_place):
    rows, outputs, inputs = 1999, 2504, 712
    for cluster in (1, 2):
        x, weight = inside(rows, inputs, torch.bfloat16, 1), inside(outputs, inputs, torch.bfloat16, inputs**-0.5)
        residual = inside(rows, outputs, torch.bfloat16, 1)
        expected = linear_reference(x, weight, residual=residual)
        out = residual if in_place else inside(rows, outputs, torch.bfloat16, None)
        schedule = WideSchedule(tokens, groups, cluster, gated=False, stream_k=cluster == random.choice((1, 2)))
        assert launch_wide_linear(x, weight, out, residual, schedule)
        assert_right(out, expected)


@pytest.mark.gpu(hopper=True)
@pytest.mark.parametrize("stream_k", [True, False])
@pytest.mark.parametrize("cluster", [1, 2])
def test_in_a_graph_it_reads_what_the_kernel_in_front_wrote(cluster, stream_k):
    """The gate and a layer that adds to x behind it, twice; all start early, and leave sums in the same memory."""
    rows, hidden, inner = 700, 1024, 3072
    x, given = (torch.empty(rows, hidden, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    gate_up = torch.randn(2 * inner, hidden, device="cuda", dtype=x.dtype).mul_(hidden**-0.5)
    down = torch.randn(hidden, inner, device="cuda", dtype=x.dtype).mul_(inner**-0.5)
    middle = x.new_empty(rows, inner)

    def chain() -> None:
        torch.mul(given, 0.5, out=x)
        for _ in range(2):
            launch_wide_linear(x, gate_up, middle, None, WideSchedule(cluster=cluster, stream_k=stream_k))
            behind = WideSchedule(128, cluster=cluster, gated=False, stream_k=stream_k)
            launch_wide_linear(middle, down, x, x, behind)

    def expected(stream: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            between = linear_silu_mul_reference(stream, gate_up).to(x.dtype)
            stream = linear_reference(between, down, residual=stream).to(x.dtype)
        return stream

    assert_replays_read_what_is_in_front(chain, given, (x, middle), expected)


@pytest.mark.gpu(hopper=True)
def test_few_launches_are_kept(monkeypatch):
    monkeypatch.setattr(wide_linear, "_launches", KeptLaunches(3))
    for _ in range(5):
        x, weight = inside(300, 64, torch.bfloat16, 1), inside(128, 64, torch.bfloat16, 0.125)
        out = inside(300, 64, torch.bfloat16, None)
        launch_wide_linear(x, weight, out, None, WideSchedule(128, 1))
        assert_right(out, linear_silu_mul_reference(x, weight))
    assert len(wide_linear._launches) <= 3
