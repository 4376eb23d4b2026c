"""The Hopper kernel of `unit_linear`: run in Python, compiled without a GPU, and on one."""

import dataclasses
import itertools
import random

import pytest
import torch
from bladellm_kernels.delayed_norm import DelayedNorm
from bladellm_kernels.hopper_device import is_other_gpu
from bladellm_kernels.linear_reference import reference_linear
from bladellm_kernels.unit_schedules import Gemv, Ring, Streamed, norm_schedule, ring_programs, unit_schedule
from bladellm_kernels.weight_units import TOKEN_TILES, pack_units

from tests.kernels.hopper import compiled_launches
from tests.kernels.sass import spills_in_the_loop
from tests.kernels.test_unit_linear import MIDDLE, layer
from tests.support.cases import some_pairs

pytest.importorskip("triton")

CASES = [
    (4, 130, 512, 4, False, 5, Ring(64, 8, 2, 2)),
    (4, 70, 1024, 16, True, 8, Ring(64, 8, 1, 3, steps=1, deep=3)),
    (4, 333, 1152, 9, True, 19, Ring(128, 16, 2, 2, splits=2)),
    (4, 64, 160, 5, True, 1, Ring(64, 8, 4, 2, steps=1)),
    (4, 300, 896, 14, True, 7, Ring(128, 8, 3, 3)),
    (4, 200, 1155, 1, True, 9, Ring(64, 16, 2, 2, deep=2)),
    (4, 200, 1024, 4, True, 9, Ring(128, 16, 2, 2, fold=True)),
    (4, 130, 1024, 8, False, 20, Ring(64, 8, 1, 4, steps=1, deep=2, splits=1, fold=True, ahead=1)),
    (4, 333, 1024, 8, False, 6, Ring(64, 8, 2, 3, steps=1, splits=1, ahead=2)),
    (4, 90, 643, 1, False, 3, Ring(64, 8, 4, 2, fold=True)),
    (8, 148, 320, 5, False, 2, Ring(64, 8, 1, 4, deep=4, splits=3)),
    (8, 148, 320, 10, False, 2, Ring(128, 8, 2, 2, steps=4, fold=True)),
]


class InPython:
    """Stands for the kernel: its programs are run in Python, in random order; x is NaN until one waits for it."""

    def __init__(self, kernel, late_copies: bool) -> None:
        self.kernel, self.late_copies = kernel, late_copies

    def __getitem__(self, grid):
        from tests.kernels.gluon_support import run_program

        def launch(x, *arguments, num_warps, EARLY, **constants) -> None:
            numbers = x.data.clone()
            programs = list(itertools.product(*map(range, grid)))
            random.shuffle(programs)
            for program in programs:
                x.data.fill_(torch.nan)
                run_program(
                    self.kernel, program, self.late_copies, x, *arguments, programs=grid[0], EARLY=True,
                    on_wait=lambda: x.data.copy_(numbers), **constants,
                )  # fmt: skip

        return launch


def check(weight, x, codes, scales, points, bias, schedule) -> torch.Tensor:
    """Against float64, into a poisoned part of a larger output."""
    from bladellm_kernels.unit_linear import unit_linear

    whole = torch.full((len(x) + 1, weight.rows + 5), torch.nan, dtype=x.dtype, device=x.device)
    y = unit_linear(x, weight, bias, out=whole[: len(x), : weight.rows], schedule=schedule)
    assert not weight.arrived.any(), "counters are left as they were found"
    assert whole[:, weight.rows :].isnan().all()
    assert whole[len(x) :].isnan().all()
    expected = reference_linear(x, codes, scales, points, MIDDLE[weight.bits], bias)
    unit = torch.finfo(x.dtype).eps
    spread = expected.abs().max() * (unit if schedule.fold else unit / 16)
    assert ((y.double() - expected).abs() <= unit / 2 * expected.abs() + spread).all(), schedule
    return y


@pytest.mark.turns
@pytest.mark.parametrize("late_copies", [False, True])
@pytest.mark.parametrize(("bits", "rows", "columns", "groups", "zeros", "tokens", "schedule"), CASES)
def test_every_code_meets_its_input(bits, rows, columns, groups, zeros, tokens, schedule, late_copies, monkeypatch):
    from bladellm_kernels import ring_launch as module

    from tests.kernels.gluon_copy_engine import Described

    monkeypatch.setattr(module, "ring_units_kernel", InPython(module.ring_units_kernel, late_copies))
    monkeypatch.setattr(module, "multiprocessors", lambda device: random.randint(1, 9))
    monkeypatch.setattr(module, "described", lambda matrix, *block: Described(matrix))
    monkeypatch.setattr(
        module, "_described_units", lambda weight, tile: Described(module.units_by_part(weight, tile.parts))
    )
    codes, scales, points = layer(rows, columns, groups, bits, zeros)
    weight = pack_units(codes, scales, points, bits)
    x = torch.randn(tokens, columns + 3).bfloat16()[:, :columns]
    check(weight, x, codes, scales, points, torch.randn(rows).bfloat16() if zeros else None, schedule)


COMPILED = [
    Ring(64, 8, 4, 4), Ring(128, 16, 2, 4), Ring(64, 32, 1, 9, 1, deep=3), Ring(64, 64, 1, 6, 1, deep=3),
    Ring(64, 64, 2, 3, 1, fold=True),
]  # fmt: skip


FACTORS = [(32, False), (64, True), (1, False)]


@pytest.mark.parametrize(("schedule", "factors"), some_pairs(COMPILED, FACTORS, 2), ids=str)
def test_codes_go_through_shared_matrices_into_registers(schedule, factors, tmp_path):
    """Nothing is spilled, the weight is on its way before the inputs are ready, and codes are read by ldmatrix.

    factors: groups of a row, and whether they have zero points.
    """
    groups, zeros = factors
    from bladellm_kernels import unit_call
    from bladellm_kernels.unit_linear import unit_linear

    weight = pack_units(*layer(256, 4096, groups, 4, zeros), 4)
    x = torch.zeros(schedule.tokens, 4096).bfloat16()
    shape = unit_call.unit_shape
    with compiled_launches() as compiled, pytest.MonkeyPatch.context() as patch:
        patch.setattr(unit_call, "unit_shape", lambda *given: dataclasses.replace(shape(*given), plain=False))
        unit_linear(x, weight, out=x.new_zeros(len(x), 256), schedule=schedule)
    kernel = compiled["ring_units_kernel"]
    text = kernel.asm["ptx"]
    # Of each group, and of the producer warp, what it does before it waits; units are of 4 dimensions, inputs of 2.
    before = [each.rpartition("setmaxnreg")[2] for each in text.split("griddepcontrol.wait")[:-1]]
    assert len(before) == schedule.wide * schedule.deep + 1
    fetching = [each for each in before if "cp.async.bulk.tensor" in each]
    assert [each.count("cp.async.bulk.tensor.4d") for each in fetching] == [schedule.stages * schedule.wide]
    assert "cp.async.bulk.tensor.2d" not in fetching[0]
    matrices = schedule.wide * schedule.deep * schedule.outputs * schedule.steps // 32
    assert text.count("ldmatrix.sync.aligned.m8n8.x4") == matrices
    assert text.count("wgmma.mma_async") == 4 * matrices
    assert not spills_in_the_loop(kernel, tmp_path)
    assert kernel.metadata.shared <= 227 * 1024


@pytest.mark.parametrize(("rows", "columns", "programs"), [(4096, 4096, 128), (6144, 4096, 96), (28672, 4096, 112)])
def test_programs_share_no_more_blocks_than_fill_the_gpu(rows, columns, programs):
    """Of 132 multiprocessors, for the layers of Llama-3.1-8B; where blocks are more than those, tiles are divided."""
    schedule = unit_schedule(32, rows, columns)
    assert isinstance(schedule, Ring)
    blocks, length = -(-rows // (schedule.wide * schedule.outputs)), columns // (128 * schedule.steps)
    assert ring_programs(schedule, blocks, length, 132) == programs
    assert ring_programs(schedule, 133, length, 132) == 132
    assert ring_programs(schedule, 3, 1, 132) == 3


@pytest.mark.parametrize("tokens", [1, 4, 5, 8, 9, 16, 17, 32, 33, 64, 96, 128, 192, 256])
def test_every_ring_of_the_table_fits_a_multiprocessor(tokens):
    """Its shared memory, for layers of all kinds; and that the weight has counters for all tiles of tokens."""
    shapes = itertools.product((1, 4096, 8192, 10240, 16384, 57344), (512, 4096, 14336), (False, True))
    chosen = {unit_schedule(tokens, *shape) for shape in shapes}
    for ring in (each for each in chosen if isinstance(each, Ring)):
        assert -(-tokens // ring.tokens) <= TOKEN_TILES
        assert ring.ahead <= ring.stages
        assert ring.stages % ring.deep == 0
        inputs = 128 * ring.steps
        stage = ring.wide * ring.outputs * inputs // 2 + 2 * ring.tokens * inputs
        meetings = 4 * (ring.deep - 1) * ring.wide * ring.outputs * ring.tokens
        assert ring.stages * stage + meetings < 226 * 1024, ring
    assert any(isinstance(each, Ring) for each in chosen)


@pytest.mark.parametrize("capability", [(9, 0), (10, 0), (12, 0)])
def test_rings_are_for_hoppers_alone(capability, monkeypatch):
    """Weights are in units on later GPUs too, which have no products of groups of warps."""
    device = torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    rings = not is_other_gpu(device)
    assert rings is (capability == (9, 0))
    shapes = list(itertools.product((1, 4096, 8192, 10240, 57344), (512, 4096, 14336), (False, True)))
    for tokens in (1, 4, 8, 9, 16, 32, 64, 128, 256, 1000):
        chosen = [unit_schedule(tokens, *shape, rings=rings) for shape in shapes]
        chosen += [norm_schedule(tokens, *shape, rings=rings) for shape in shapes]
        assert rings or not any(isinstance(each, Ring) for each in chosen)
        assert all(tokens <= each.tokens for each in chosen if isinstance(each, Gemv | Streamed))


@pytest.mark.parametrize(("groups", "rows"), [(1, 768), (32, 1)])
def test_groups_of_warps_are_given_numbers_that_are_one(groups, rows):
    """One group or one output, with a norm in front: Triton takes such arguments for constants."""
    from bladellm_kernels import unit_call
    from bladellm_kernels.normed_unit_linear import normed_unit_linear

    weight = pack_units(*layer(rows, 4096, groups, 4, True), 4)
    norm = DelayedNorm(torch.zeros(16, 4096).bfloat16(), torch.zeros(16, 1), 1e-5)
    shape = unit_call.unit_shape
    with compiled_launches() as compiled, pytest.MonkeyPatch.context() as patch:
        patch.setattr(unit_call, "unit_shape", lambda *given: dataclasses.replace(shape(*given), plain=False))
        normed_unit_linear(norm, weight, schedule=Ring(64, 16, 1, 3, 1, deep=3))
    assert "ring_units_kernel" in compiled


def test_a_stage_is_read_by_the_same_groups_each_time():
    from bladellm_kernels.unit_linear import unit_linear

    weight = pack_units(*layer(64, 256, 2, 4, False), 4)
    with pytest.raises(ValueError, match="multiple of deep"):
        unit_linear(torch.zeros(3, 256).bfloat16(), weight, schedule=Ring(64, 8, 1, 4, deep=3))


@pytest.mark.parametrize("columns", [8, 77, 643, 1152, 1155])
@pytest.mark.parametrize("tokens", [1, 5])
def test_every_shape_can_be_described_to_the_copy_engine(tokens, columns):
    """Strides and addresses of whole 16 bytes, of x from a part of wider rows and of units in one or two parts."""
    from bladellm_kernels.linear_hopper import described
    from bladellm_kernels.ring_factors_hopper import UnitTile
    from bladellm_kernels.ring_launch import _described_units, _readable

    for first in (0, 3, 8):
        x = torch.randn(tokens, columns + 11).bfloat16()[:, first : first + columns]
        found = described(_readable(x), 8, 64)
        assert torch.equal(found.base, x)
        assert found.shape == [tokens, columns]
    weight = pack_units(*layer(130, columns, 1, 4, False), 4)
    for parts in (1, 2):
        found = _described_units(weight, UnitTile(8, 64, 128, 2, 4, 1, parts, 1, 0, 2))
        assert found.shape == [parts, len(weight.codes) // parts, weight.steps * 64, 32]


GPU_SCHEDULES = [
    Ring(64, 8, 4, 4, splits=1), Ring(64, 16, 1, 9, 1, deep=3, splits=2), Ring(128, 16, 2, 4),
    Ring(64, 32, 4, 4, splits=1), Ring(64, 32, 2, 4, deep=2), Ring(64, 64, 1, 6, 1, deep=3, splits=2),
    Ring(64, 128, 2, 2, fold=True),
]  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("rows", "columns", "groups"), [(1024, 4096, 32), (130, 192, 3), (64, 160, 5), (333, 1155, 1), (6144, 4096, 128)]
)
def test_on_a_gpu(rows, columns, groups, dtype):
    """The same bits every time, whoever comes last."""
    for bits, zeros in ((4, False), (4, True), (8, False)):
        codes, scales, points = layer(rows, columns, groups, bits, zeros, "cuda")
        weight = pack_units(codes, scales, points, bits)
        bias = torch.randn(rows, device="cuda").to(dtype) if zeros else None
        for schedule in GPU_SCHEDULES:
            for tokens in {1, schedule.tokens - 3, schedule.tokens, min(256, schedule.tokens * 2 - 5)}:
                x = torch.randn(tokens, columns + 3, device="cuda").to(dtype)[:, :columns]
                first = check(weight, x, codes, scales, points, bias, schedule)
                assert torch.equal(check(weight, x, codes, scales, points, bias, schedule), first)
