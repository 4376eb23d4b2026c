"""Linear layers of packed weights: the kernel's arithmetic in Python, compiled without a GPU, and on one."""

import random
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from bladellm_kernels import packed_linear as operator
from bladellm_kernels.cuda_compiler import CudaCompilerError
from bladellm_kernels.cuda_kernel import KeptLaunches
from bladellm_kernels.hopper_parts import SHARED_BYTES, matrices_fit
from bladellm_kernels.packed_linear import PackedSchedule, launch_packed_linear, packed_linear, schedule_for, source
from bladellm_kernels.packed_weight import GATE_ROWS, NUMBER_BYTES, PATCHES, TILE_BYTES, PackedWeight, pack_weight

from tests.kernels import test_cluster_linear as cluster_test
from tests.kernels.test_cluster_linear import ON_HOPPER
from tests.support.cases import examples

PROCESSOR_BYTES, CTA_BYTES = 228 << 10, 1024
"""Shared memory of a multiprocessor, and what the system takes of it for each CTA."""
MODEL = {"qkv": (6144, 4096), "o": (4096, 4096), "gate-up": (28672, 4096), "down": (4096, 14336)}
"""Weights of Llama-3.1-8B."""
TEXT = (Path(operator.__file__).parent / "packed_linear.cu").read_text()
NUMBER = {name: int(value, 0) for name, value in re.findall(r"\b([A-Z_]+) = (0x[0-9A-F]+|\d+)u?\b", TEXT)}
"""Constants of the kernel's text."""
PAIRS = NUMBER["PAIRS"]


def random_schedule(rows: int, inputs: int) -> PackedSchedule:
    """Any that can be launched for so many rows and inputs."""
    tokens = random.choice([count for count in (*operator.TOKENS, 24, 40, 56) if count >= rows])
    groups, cluster = random.randint(1, operator.MAX_GROUPS), random.randint(1, min(operator.MAX_CLUSTER, inputs // 64))
    stages = random.randint(2, 8), random.randint(2, 8)
    return PackedSchedule(tokens, groups, cluster, *stages, random.randrange(3), random.random() < 0.5)


def random_weight(rows: int, inputs: int, gated: bool, device: str = "cpu") -> tuple[torch.Tensor, PackedWeight]:
    """bfloat16 [rows, inputs], some numbers far from the others of their rows, and the same packed."""
    while True:
        weight = torch.randn(rows, inputs, device=device) * inputs**-0.5
        weight[random.randrange(rows)] = 0
        row, column = (torch.randint(size // 64, (8,), device=device) * 64 for size in (rows, inputs))
        far = 2.0 ** torch.randint(-40, -16, (8,), device=device)
        far[:2] = 2.0 ** torch.randint(3, 7, (2,), device=device)
        weight[row + torch.randint(64, (8,), device=device), column + torch.randint(64, (8,), device=device)] *= far
        # All of one warp's part of a tile.
        first, crowded = random.randrange(rows // 16) * 16, random.randint(1, PATCHES)
        weight[first + torch.randint(16, (crowded,)), torch.randperm(64)[:crowded]] *= 2.0**-30
        whole = weight.bfloat16()
        packed = pack_weight(whole, gated)
        if packed is not None:
            return whole, packed


def exact(x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor | None, gated: bool) -> torch.Tensor:
    """float64."""
    y = x.double() @ weight.double().T
    if gated:
        gate, up = y.chunk(2, 1)
        return gate / (1 + torch.exp(-gate)) * up
    return y if residual is None else y + residual.double()


def chosen(a: np.ndarray, b: np.ndarray, which: int) -> np.ndarray:
    """The instruction `prmt`: bytes of a, and behind them of b, by the lower three bits of four."""
    both = b.astype(np.uint64) << np.uint64(32) | a.astype(np.uint64)
    found = np.zeros(both.shape, np.uint32)
    for place in range(4):
        take = which >> 4 * place & 15
        assert take < 8, "copies of a sign"
        found |= ((both >> np.uint64(8 * take)) & np.uint64(0xFF)).astype(np.uint32) << np.uint32(8 * place)
    return found


def widen_eight(low: np.ndarray, more_low: np.ndarray, high: np.ndarray) -> list[np.ndarray]:
    signs, codes, exponents = (np.uint32(NUMBER[name]) for name in ("SIGNS", "CODES", "EXPONENTS"))
    four = np.uint32(4)
    first = (high & codes) | exponents
    turned = (high << four & signs) | (high >> four & ~signs)
    second = (turned & codes) | exponents
    selectors = [int(which, 16) for which in re.findall(r"pairs\[at.*\] = chosen\(\w+, \w+, (0x\d+)\);", TEXT)]
    given = (low, first), (low, first), (more_low, second), (more_low, second)
    return [chosen(*words, which) for words, which in zip(given, selectors, strict=True)]


def patch(pairs: np.ndarray, word: np.ndarray, wanted: np.ndarray) -> None:
    """pairs: [..., 4, 32, PAIRS] of each warp's lanes; word, and whether it is looked at: [..., 4]."""
    word = word[..., None, None]
    which = np.where(word & np.uint32(512), NUMBER["UPPER"], NUMBER["LOWER"])
    lane, each = np.arange(32)[:, None], np.arange(PAIRS)
    here = wanted[..., None, None] & (lane == word % 32) & (each == (word >> np.uint32(5) & np.uint32(15)))
    for selector in (NUMBER["UPPER"], NUMBER["LOWER"]):
        pairs[:] = np.where(here & (which == selector), chosen(pairs, word, selector), pairs)


def load_weight(tiles: np.ndarray) -> np.ndarray:
    """Pairs [..., 128, PAIRS], uint32, of tiles [..., TILE_BYTES]."""
    shape = tiles.shape[:-1]
    words = tiles[..., :NUMBER_BYTES].copy().view("<u4").reshape(*shape, 3, 128, 4)
    low, more_low, high = (np.moveaxis(words[..., part, :, :], -1, 0) for part in range(3))
    widened = [
        *(*widen_eight(low[0], low[1], high[0]), *widen_eight(low[2], low[3], high[1])),
        *(*widen_eight(more_low[0], more_low[1], high[2]), *widen_eight(more_low[2], more_low[3], high[3])),
    ]
    pairs = np.stack(widened, -1).reshape(*shape, 4, 32, PAIRS)
    patches = tiles[..., NUMBER_BYTES:].copy().view("<u4").reshape(*shape, 4, PATCHES)
    used = patches != np.uint32(NUMBER["NO_PATCH"])
    for half in (0, 4):
        # `patch_four`, of the others only where the first four are all in use.
        entered = used[..., 0] if half == 0 else used[..., 0] & used[..., 3]
        first = entered & used[..., half]
        second = first & used[..., half + 1]
        wanted = first, second, second & used[..., half + 2], second & used[..., half + 3]
        for place, each in enumerate(wanted):
            patch(pairs, patches[..., half + place], each)
    return pairs.reshape(*shape, 128, PAIRS)


def multiplied(pairs: np.ndarray) -> np.ndarray:
    """float64 [..., 64, 64]: the rows and inputs that four `wgmma` take from the registers of 128 threads."""
    bits = np.stack((pairs & np.uint32(0xFFFF), pairs >> np.uint32(16)), -1) << np.uint32(16)
    numbers = bits.astype(np.uint32).view(np.float32).astype(np.float64)
    thread = np.arange(128)
    found = np.full((*pairs.shape[:-2], 64, 64), np.nan)
    for part in range(4):
        for register in range(4):
            row = thread // 32 * 16 + thread % 32 // 4 + 8 * (register % 2)
            for upper in range(2):
                column = 16 * part + thread % 4 * 2 + 8 * (register // 2) + upper
                found[..., row, column] = numbers[..., 4 * part + register, upper]
    return found


class Tile(cluster_test.Tile):
    """The same of `cluster_sums.cu` with a gate, and of `packed_linear.cu`."""

    def __init__(self, schedule: PackedSchedule, rows: int, gated: bool) -> None:
        self.schedule, self.rows, self.tokens, self.gated = schedule, rows, schedule.tokens, gated
        self.row = int(source(schedule, gated, False)[1]["PARTIAL_ROW"])
        self.outputs = 64 * schedule.groups // (1 + gated)
        self.thread = np.arange(128 * schedule.groups)
        self.quads = self.outputs // 4
        self.pass_tokens = len(self.thread) // self.quads
        slice_tokens = -(-schedule.tokens // schedule.cluster)
        self.passes = -(-slice_tokens // self.pass_tokens)

    def factor_rows(self, register: int) -> np.ndarray:
        """`scale`."""
        lane, warp, group = self.thread % 32, self.thread // 32 % 4, self.thread // 128
        return (group * 4 + warp) * 16 + lane // 4 + (0, 8)[register // 2 % 2]

    def weight_row(self, quad: np.ndarray) -> np.ndarray:
        """`Slice::row`."""
        return quad // 2 * 16 + quad % 2 * 4 if self.gated else quad * 4

    def partial(self, weight: np.ndarray, factors: np.ndarray, x: np.ndarray) -> np.ndarray:
        """What a CTA leaves of its rows of the weight; nothing is known of those of no tile."""
        padding = 64 * self.schedule.groups - len(weight)
        sums = np.pad(weight @ x.T, ((0, padding), (0, 0)), constant_values=np.nan)
        factors = np.pad(factors, (0, padding), constant_values=np.nan)
        partial = np.full(self.schedule.tokens * self.row, np.nan)
        for register in range(self.schedule.tokens // 2):
            scaled = sums[self.fragment(register)] * factors[self.factor_rows(register)]
            partial[self.sum_places(register)] = scaled
        return partial

    def totals(self, partial: np.ndarray, token: np.ndarray, row: np.ndarray) -> np.ndarray:
        """`add_up`, before the residual. partial: of all CTAs."""
        places = np.minimum(token, self.schedule.tokens - 1) * self.row + row
        four = places[:, None] + np.arange(4)
        total = sum(partial[rank][four] for rank in range(len(partial)))
        if not self.gated:
            return total
        up = sum(partial[rank][four + GATE_ROWS] for rank in range(len(partial)))
        return total / (1 + np.exp(-total)) * up


def emulated(
    schedule: PackedSchedule, x: np.ndarray, packed: PackedWeight, residual: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """The outputs, and how many times each was written."""
    tile, rows = Tile(schedule, len(x), packed.gated), 64 * schedule.groups
    numbers = multiplied(load_weight(packed.tiles.numpy()))
    weight = np.swapaxes(numbers, 1, 2).reshape(packed.rows, packed.inputs)
    factors = packed.factors.double().numpy()
    wide_x = np.zeros((schedule.tokens, packed.inputs))
    wide_x[: len(x)] = x
    out, written = np.full(residual.shape, np.nan), np.zeros(residual.shape, int)
    for block in range(-(-packed.rows // rows)):
        own = slice(block * rows, (block + 1) * rows)
        taken = [np.array(tile.steps(rank, packed.inputs)) for rank in range(schedule.cluster)]
        columns = [slice(64 * steps[0], 64 * steps[-1] + 64) for steps in taken]
        partial = np.stack([tile.partial(weight[own, each], factors[own], wide_x[:, each]) for each in columns])
        for rank in range(schedule.cluster):
            for token, quad, stored in tile.slices(rank):
                totals, output = tile.totals(partial, token, tile.weight_row(quad)), block * tile.outputs + quad * 4
                kept = stored & (output < packed.outputs)
                where = token[kept][:, None], output[kept][:, None] + np.arange(4)
                out[where] = totals[kept] + residual[where]
                np.add.at(written, where, 1)
    return out, written


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("turn", range(10))
def test_every_output_is_written_once_with_all_its_inputs(turn, gated):
    """Padded tiles, a last CTA with fewer tiles than groups, slices without any tokens, patches."""
    rows = random.choice((1, 2, 7, 8, 13, 33, 48, 64))
    weight, packed = random_weight(64 * random.randint(1, 5), 64 * random.randint(1, 6), gated)
    schedule = random_schedule(rows, packed.inputs)
    x = torch.randn(rows, packed.inputs, dtype=torch.float64)
    residual = torch.zeros(rows, packed.outputs) if gated else torch.randn(rows, packed.outputs, dtype=torch.float64)
    out, written = emulated(schedule, x.numpy(), packed, residual.numpy())
    assert (written == 1).all(), schedule
    np.testing.assert_allclose(out, exact(x, weight, residual, gated), rtol=1e-9, atol=1e-9, err_msg=str(schedule))


def test_the_kernel_and_the_format_agree():
    assert (NUMBER["NUMBER_BYTES"], NUMBER["PART_BYTES"] * 3) == (NUMBER_BYTES, NUMBER_BYTES)
    assert NUMBER["PATCH_BYTES"] == 4 * PATCHES == 32
    assert NUMBER_BYTES + 4 * NUMBER["PATCH_BYTES"] == TILE_BYTES
    assert (TILE_BYTES % 16, NUMBER["NO_PATCH"]) == (0, 0xFFFFFFFF), "copies are of whole 16 bytes"
    sums = Path(operator.__file__).with_name("cluster_sums.cu").read_text()
    assert f"UP_ROWS = {GATE_ROWS};" in sums


@pytest.mark.parametrize("rows", range(1, operator.MAX_ROWS + 1))
def test_schedules_fit_twice(rows):
    sizes = [(64 * random.randint(1, 600), 64 * random.randint(1, 300)) for _ in range(examples(100))]
    for weight_rows, inputs in (*MODEL.values(), (64, 64), (128256, 4096), *sizes):
        schedule = schedule_for(rows, weight_rows, inputs)
        operator._check(rows, inputs, schedule)
        assert schedule.tokens >= rows
        assert schedule.cluster <= min(operator.MAX_CLUSTER, inputs // 64), "each CTA has a step"
        assert operator.shared_bytes(schedule) <= SHARED_BYTES
        assert 2 * (operator.shared_bytes(schedule) + CTA_BYTES) <= PROCESSOR_BYTES
        assert operator.shared_bytes(schedule) % 16 == operator._barriers_at(schedule) % 16 == 0


def test_ctas_that_share_a_multiprocessor_have_registers_beside_each_other():
    """Of Llama-3.1-8B gate and up, and the head, have more CTAs than there are multiprocessors."""
    shapes = {**MODEL, "head": (128256, 4096)}
    behind = {name for name, shape in shapes.items() if not schedule_for(64, *shape).ahead}
    assert behind == {"gate-up", "head"}
    assert all(schedule_for(rows, *shape).ahead for rows in range(1, 33) for shape in shapes.values())


@pytest.mark.parametrize("rows", [0, operator.MAX_ROWS + 1])
def test_there_is_no_schedule_of_other_rows(rows):
    assert schedule_for(rows, 4096, 4096) is None


@pytest.mark.parametrize("changed", [
    {"tokens": 8}, {"tokens": 20}, {"tokens": 264}, {"groups": 0}, {"groups": 3}, {"cluster": 0}, {"cluster": 3},
    {"launch_at": 3}, {"launch_at": -1}, {"stages": 1}, {"weight_stages": 1}, {"stages": 99}, {"weight_stages": 99},
], ids=str)  # fmt: skip
def test_schedules_that_do_not_fit_are_refused(changed):
    x, (_, packed) = torch.zeros(9, 128).bfloat16(), random_weight(128, 128, False)
    schedule = replace(PackedSchedule(16, 2, 2, 4, 6), **changed)
    with pytest.raises(ValueError, match="must be"):
        launch_packed_linear(x, packed, x.clone(), None, schedule)


def test_matrices_of_other_sizes_are_refused():
    (_, packed), (_, gated) = random_weight(128, 64, False), random_weight(128, 64, True)
    x, out = torch.zeros(3, 64).bfloat16(), torch.zeros(3, 128).bfloat16()
    for wrong in (x[:, :32], x[0], x[None]):
        with pytest.raises(ValueError, match="x must be"):
            packed_linear(wrong, packed)
    with pytest.raises(ValueError, match="out must be"):
        packed_linear(x, packed, out[:2])
    with pytest.raises(ValueError, match="out must be"):
        packed_linear(x, gated, out)
    with pytest.raises(ValueError, match="residual must be"):
        packed_linear(x, packed, out, out[:, :64])
    with pytest.raises(ValueError, match="no residual"):
        packed_linear(x, gated, residual=out[:, :64])


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("rows", [0, 1, 64, 65])
def test_on_a_cpu_it_is_the_reference(rows, gated):
    weight, packed = random_weight(64 * random.randint(1, 4), 64 * random.randint(1, 4), gated)
    x = torch.randn(rows, packed.inputs).bfloat16()
    assert not matrices_fit(x, x, x)
    residual = None if gated else torch.randn(rows, packed.outputs).bfloat16()
    expected = operator.packed_linear_reference(x, packed, residual)
    torch.testing.assert_close(expected.double(), exact(x, weight, residual, gated), atol=1e-3, rtol=1e-3)
    assert torch.equal(packed_linear(x, packed, residual=residual), expected.bfloat16())
    out = torch.full((rows, packed.outputs), torch.nan).bfloat16()
    assert packed_linear(x, packed, out, residual) is out
    assert torch.equal(out, expected.bfloat16())
    if residual is not None:
        assert torch.equal(packed_linear(x, packed, residual, residual), out)


@pytest.mark.parametrize("error", [OSError("there is no NVRTC"), CudaCompilerError("packed_linear.cu(3): error: ?")])
def test_without_a_compiler_nothing_is_launched_and_one_warning_says_so(error, monkeypatch):
    def fail(*given, **more):
        raise error

    monkeypatch.setattr(operator, "compile_cuda", fail)
    monkeypatch.setattr(operator, "_launches", KeptLaunches())
    operator._kernel.cache_clear()
    x, (_, packed) = torch.zeros(8, 64).bfloat16(), random_weight(64, 64, False)
    given = [torch.full_like(x, 7) for _ in range(2)]
    with pytest.warns(UserWarning, match="left to other kernels") as told:
        found = [launch_packed_linear(x, packed, out, None, PackedSchedule(8, 1, 1, 2, 2)) for out in given]
    assert found == [False, False]
    assert all((out == 7).all() for out in given)
    assert len(told) == 1
    assert str(error) in str(told[0].message)
    operator._kernel.cache_clear()


def test_launches_are_kept_for_one_weight_only(monkeypatch):
    """Another one may lie where the tiles of one lay that is gone."""
    prepared = []
    monkeypatch.setattr(operator, "_launches", KeptLaunches())
    monkeypatch.setattr(operator, "_prepare", lambda *given: prepared.append(given[1]))
    x, (_, packed) = torch.zeros(1, 64).bfloat16(), random_weight(128, 64, False)
    out = torch.zeros(1, 128).bfloat16()
    weights = packed, replace(packed, factors=packed.factors.clone()), replace(packed, gated=True)
    for weight in (*weights, *weights):
        launch_packed_linear(x, weight, out[:, : weight.outputs], None, PackedSchedule(8, 1, 1, 2, 2))
    assert len(prepared) == len(weights)


def inside(rows: int, columns: int, scale: float = torch.nan) -> torch.Tensor:
    """Random numbers of a larger matrix of NaN."""
    whole = torch.full((rows + 3, columns + 8), torch.nan, device="cuda", dtype=torch.bfloat16)
    return whole[:rows, :columns].copy_(torch.randn(rows, columns, device="cuda") * scale)


def assert_right(
    out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor | None, gated: bool
) -> None:
    """But for one rounding to bfloat16, and those of sums in float32; nothing is written around it."""
    expected = exact(x, weight, residual, gated)
    summed = x.double().abs() @ weight.double().abs().T
    if gated:
        gate, up = (x.double() @ weight.double().T).abs().chunk(2, 1)
        summed = 1.1 * summed.chunk(2, 1)[0] * up + summed.chunk(2, 1)[1] * gate
    assert ((out.double() - expected).abs() <= 2.0**-8 * expected.abs() + 2e-5 * (summed + expected.abs())).all()
    assert out._base[len(out) :].isnan().all()
    assert out._base[:, out.shape[1] :].isnan().all()


@ON_HOPPER
@pytest.mark.gpu
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("rows", [1, 7, 8, 9, 16, 24, 32, 40, 48, 63, 64])
def test_on_a_gpu(rows, gated):
    """Any schedules; rows of x behind those that count are NaN."""
    some = 64 * random.randint(1, 40), 64 * random.randint(1, 70)
    for weight_rows, inputs in (some, (64 * 131, 64), random.choice(list(MODEL.values()))):
        weight, packed = random_weight(weight_rows, inputs, gated, "cuda")
        x, out = inside(rows, inputs, 1), inside(rows, packed.outputs)
        residual = None if gated or random.random() < 0.5 else inside(rows, packed.outputs, 1)
        for launch_at in range(3):
            schedule = replace(random_schedule(rows, inputs), launch_at=launch_at)
            results = []
            for _ in range(2):
                assert launch_packed_linear(x, packed, out.fill_(torch.nan), residual, schedule)
                results.append(out.clone())
            assert_right(out, x, weight, residual, gated)
            assert torch.equal(*results), schedule
        assert packed_linear(x, packed, out.fill_(torch.nan), residual) is out
        assert_right(out, x, weight, residual, gated)


@ON_HOPPER
@pytest.mark.gpu
@pytest.mark.parametrize("launch_at", [0, 1, 2, None])
@pytest.mark.parametrize("rows", [1, 16, 40, 64])
def test_a_chain_reads_what_the_kernel_in_front_wrote(rows, launch_at):
    """Layers start early, one behind another: bits are those of layers that wait for each other. None: as chosen."""
    (_, up), (_, down) = random_weight(2048, 512, True, "cuda"), random_weight(512, 1024, False, "cuda")
    schedules = [schedule_for(rows, weight.rows, weight.inputs) for weight in (up, down)]
    if launch_at is not None:
        schedules = [replace(random_schedule(rows, weight.inputs), launch_at=launch_at) for weight in (up, down)]
    given, x, middle = torch.randn(rows, 512, device="cuda").bfloat16(), inside(rows, 512), inside(rows, 1024)

    def chain(wait: Callable[[], object]) -> None:
        torch.mul(given, 0.5, out=x)
        for _ in range(6):
            assert launch_packed_linear(x, up, middle, None, schedules[0])
            wait()
            assert launch_packed_linear(middle, down, x, x, schedules[1])
            wait()

    chain(torch.cuda.synchronize)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        chain(list)
    for _ in range(20):
        given.normal_()
        chain(torch.cuda.synchronize)
        expected = x.clone()
        assert expected.isfinite().all()
        x.fill_(torch.nan)
        middle.fill_(torch.nan)
        graph.replay()
        assert torch.equal(x, expected)
