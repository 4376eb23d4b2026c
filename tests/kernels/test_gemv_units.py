"""The kernels of `unit_linear` for a few tokens: run in Python, compiled without a GPU, and on one."""

import dataclasses
import itertools
import math
import random
import re

import pytest
import torch
from bladellm_kernels import unit_schedules
from bladellm_kernels.linear_reference import reference_linear
from bladellm_kernels.unit_schedules import Gemv, Streamed, stream_programs
from bladellm_kernels.weight_units import pack_units

from tests.kernels.hopper import compiled_launches
from tests.kernels.test_ragged_decode_triton import resources
from tests.kernels.test_ragged_prefill_sdpa import ON_CUDA
from tests.kernels.test_unit_linear import MIDDLE, layer

pytest.importorskip("triton")

CASES = [
    (4, 40, 512, 4, False, 1, Gemv(16, 2, 2)),
    (4, 70, 1024, 16, True, 3, Gemv(16, 2, 2)),
    (4, 33, 643, 1, True, 8, Gemv(32, 4, 1)),
    (4, 64, 160, 5, True, 5, Gemv(16, 2, 1)),
    (8, 48, 320, 5, False, 2, Gemv(16, 2, 2)),
    (4, 300, 896, 7, True, 11, Gemv(128, 2, 1, 16, 2, programs_per_sm=1)),
    (4, 64, 1000, 1, True, 2, Gemv(64, 1, 2, programs_per_sm=1)),
    (4, 40, 1024, 8, True, 8, None),
    (4, 200, 512, 4, False, 1, Streamed(16, 4, 1, 2)),
    (4, 170, 1024, 16, True, 8, Streamed(16, 4, 1, 3)),
    (4, 333, 1155, 1, True, 13, Streamed(32, 4, 1, 2, 16, 2)),
    (4, 200, 1024, 8, False, 19, Streamed(16, 4, 1, 1, programs_per_sm=2)),
    (8, 148, 320, 5, False, 2, Streamed(16, 4, 2, 2)),
]


class InPython:
    """Stands for a kernel: its programs are run in Python, in random order."""

    def __init__(self, kernel) -> None:
        self.kernel = kernel

    def __getitem__(self, grid):
        from tests.kernels.gluon_support import run_program

        def launch(*arguments, num_warps, maxnreg, **constants) -> None:
            programs = list(itertools.product(*map(range, grid)))
            random.shuffle(programs)
            for program in programs:
                run_program(self.kernel, program, False, *arguments, programs=grid[0], **constants)

        return launch


@pytest.mark.parametrize(("bits", "rows", "columns", "groups", "zeros", "tokens", "schedule"), CASES)
def test_every_code_meets_its_input(bits, rows, columns, groups, zeros, tokens, schedule, monkeypatch):
    from bladellm_kernels import unit_launch as module
    from bladellm_kernels.unit_linear import unit_linear

    for name in ("gemv_units_kernel", "stream_units_kernel"):
        monkeypatch.setattr(module, name, InPython(getattr(module, name)))
    monkeypatch.setattr(module, "multiprocessors", lambda device: 7)
    monkeypatch.setattr(unit_schedules, "MOST_SUMS", 512)
    codes, scales, points = layer(rows, columns, groups, bits, zeros)
    weight = pack_units(codes, scales, points, bits)
    x = torch.randn(tokens, columns + 3)[:, :columns]
    bias = torch.randn(rows) if zeros else None
    whole = torch.full((tokens + 1, rows + 5), math.nan)
    unit_linear(x, weight, bias, out=whole[:tokens, :rows], schedule=schedule)
    assert not weight.arrived.any(), "counters are left as they were found"
    assert whole[:, rows:].isnan().all()
    assert whole[tokens:].isnan().all()
    expected = reference_linear(x, codes, scales, points, MIDDLE[bits], bias)
    assert (whole[:tokens, :rows].double() - expected).abs().max() < 1e-5 * expected.abs().max()


def test_streaming_programs_have_counters_and_room():
    for _ in range(300):
        rows, splits, token_tiles = random.randint(1, 40000), random.randint(1, 20), random.randint(1, 4)
        schedule = Streamed(random.choice([16, 32]), 8, 1, 2, programs_per_sm=2)
        tiles = -(-rows // schedule.rows)
        programs = stream_programs(schedule, tiles, splits, token_tiles, 132)
        counters = pack_units(torch.zeros(1, 32, dtype=torch.uint8), torch.ones(1, 1), None, 4).arrived.numel()
        counters *= -(-rows // 128)
        assert 1 <= programs <= tiles
        assert programs * token_tiles <= counters
        assert programs == 1 or programs * splits * token_tiles <= 264, "all run at once"


def compiled_kernel(weight, tokens, schedule, **norms):
    """The kernel of a launch as it is compiled for a Hopper."""
    from bladellm_kernels import unit_call
    from bladellm_kernels.unit_launch import launch_units

    x = torch.zeros(tokens, weight.columns).bfloat16()
    call = unit_call.UnitCall(x, weight, x.new_zeros(tokens, weight.rows // norms.get("parts", 1)), **norms)
    shape = unit_call.unit_shape
    with compiled_launches() as compiled, pytest.MonkeyPatch.context() as patch:
        patch.setattr(unit_call, "unit_shape", lambda *given: dataclasses.replace(shape(*given), plain=False))
        launch_units(call, schedule)
    return next(iter(compiled.values()))


@pytest.mark.parametrize(("bits", "groups", "zeros"), [(4, 32, False), (4, 64, True), (8, 1, False)])
def test_codes_go_from_memory_to_the_tensor_cores_in_registers(bits, groups, zeros):
    """16-byte loads, none of codes or inputs through shared memory, and nothing spilled."""
    codes, scales, points = layer(32, 4096, groups, bits, zeros)
    weight = pack_units(codes, scales, points, bits)
    compiled = compiled_kernel(weight, 2, Gemv(16, 8, 2, registers=96))
    text = compiled.asm["ptx"]
    main = text[: text.rindex("mma.sync")]
    assert "st.shared" not in main
    assert "ld.shared" not in main
    codes = re.findall(r"ld\.global\S*", text[: text.index("griddepcontrol.wait")])
    assert sum(load.endswith("v4.b32") for load in codes) == 4, "two rows of each of two steps"
    assert "local" not in text


@pytest.mark.parametrize(
    ("columns", "schedule"), [(4096, Streamed(16, 16, 2, 2)), (14336, Streamed(16, 8, 2, 2, 8, 2))]
)
@pytest.mark.parametrize(("groups_per_step", "zeros"), [(1, False), (1, True), (0, False)])
def test_x_stays_in_registers(columns, schedule, groups_per_step, zeros, tmp_path):
    """A program asks for its first tiles before it waits, for x once, and for no code in its loop but of a later tile;
    neither passes through shared memory, and nothing is spilled."""
    codes, scales, points = layer(64, columns, max(1, columns // 128 * groups_per_step), 4, zeros)
    weight = pack_units(codes, scales, points, 4)
    compiled = compiled_kernel(weight, 2, schedule)
    text = compiled.asm["ptx"]
    wide = [match.start() for match in re.finditer(r"ld\.global\S*v4\.b32", text)]
    ready, looped = text.index("griddepcontrol.wait"), text.index("st.shared")
    tile = 2 * schedule.steps
    assert sum(place < ready for place in wide) == tile * schedule.depth
    assert sum(ready < place < looped for place in wide) == 4 * schedule.steps + tile, "x, and one more tile"
    assert sum(place > looped for place in wide) == tile * (schedule.depth - 1)
    assert "ld.shared" not in text[:looped]
    assert resources(compiled, tmp_path)[1] == 0


@pytest.mark.parametrize("marked", [pytest.param(None, marks=ON_CUDA)])
@pytest.mark.parametrize(("rows", "columns", "groups"), [(1024, 4096, 32), (130, 192, 3), (64, 160, 5), (333, 1155, 1)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_on_cuda(marked, rows, columns, groups, dtype):
    from bladellm_kernels.unit_linear import unit_linear

    schedules = [Gemv(16, 8, 4, registers=88), Gemv(16, 16, 1), Gemv(32, 16, 2), Gemv(64, 4, 1, 16, 2, 2)]
    schedules += [Gemv(128, 4, 1, 32, 2, 1)]
    schedules += [
        Streamed(16, 16, 2, 2),
        Streamed(16, 8, 2, 2, 8, 2),
        Streamed(16, 16, 1, 2, 16),
        Streamed(32, 8, 1, 2),
    ]
    for bits, zeros in ((4, False), (4, True), (8, False)):
        codes, scales, points = layer(rows, columns, groups, bits, zeros, "cuda")
        weight = pack_units(codes, scales, points, bits)
        for schedule in schedules:
            most = schedule.tokens * (4 if isinstance(schedule, Streamed) else 1)
            for tokens in {1, 2, 7, schedule.tokens, most}:
                x = torch.randn(tokens, columns, device="cuda").to(dtype)
                bias = torch.randn(rows, device="cuda").to(dtype) if zeros else None
                y = torch.full((tokens, rows), torch.nan, dtype=dtype, device="cuda")
                unit_linear(x, weight, bias, out=y, schedule=schedule)
                expected = reference_linear(x, codes, scales, points, MIDDLE[bits], bias)
                worst = (y.double() - expected).abs().max() / expected.abs().max()
                assert worst < (2e-3 if dtype == torch.float16 else 1.5e-2), f"{schedule}, {tokens} tokens: {worst:.2g}"
