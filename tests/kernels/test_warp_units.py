"""4-bit layers of few tokens by warps with rings of their own: run by the host, compiled, divided, and refused."""

import ctypes
import random
import re
import subprocess
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from bladellm_kernels import warp_units
from bladellm_kernels.cuda_compiler import compile_cuda
from bladellm_kernels.delayed_norm import DelayedNorm
from bladellm_kernels.linear_launch import NextNorm
from bladellm_kernels.linear_reference import reference_linear
from bladellm_kernels.unit_call import UnitCall
from bladellm_kernels.unit_schedules import NORM_SCHEDULES, WarpRings, norm_schedule
from bladellm_kernels.warp_units import (
    MOST_TILES,
    PARTS,
    SHARED_BYTES,
    Problem,
    Room,
    WarpPlan,
    arguments,
    divided_tiles,
    fits,
    source,
    square_parts,
    warp_plan,
)
from bladellm_kernels.weight_units import pack_units

from tests.kernels.test_unit_linear import layer
from tests.kernels.warp_support import HERE, compile_on_host
from tests.support.cases import drawn_of, some_pairs

EPS = 1e-5
KINDS = ["plain", "normed", "gated", "added"]
TYPES = [torch.bfloat16, torch.float16]
WARPS = 8


@dataclass
class Case:
    """A random call, its outputs poisoned, and what they should be in float64."""

    call: UnitCall
    expected: torch.Tensor
    groups: int
    processors: int


def random_case(kind: str, dtype: torch.dtype, schedule: WarpRings) -> Case:
    steps, tokens = random.randint(1, 19), random.randint(1, 8)
    columns, groups = 128 * steps, random.choice([1, steps, 2 * steps, 4 * steps])
    outputs, zeros, processors = 16 * random.randint(1, 9), random.random() < 0.5, random.randint(1, 6)
    codes, scales, points = layer(outputs * (1 + (kind == "gated")), columns, groups, 4, zeros, "cpu")
    # Products of a gate are in the range of float16.
    scales = (scales / 8).to(random.choice(TYPES))
    weight = pack_units(codes, scales, points, 4)
    x = torch.randn(tokens, columns).to(dtype)
    bias = torch.randn(len(codes)).to(dtype) if random.random() < 0.5 else None
    out = torch.full((tokens, outputs), torch.nan).to(dtype)
    call = UnitCall(x, weight, out, bias, parts=1 + (kind == "gated"))
    expected = reference_linear(x, codes, scales, points, 8.0, None)
    if kind in ("normed", "gated"):
        norm = DelayedNorm(x, torch.rand(tokens, random.choice([1, 3, 70])) * columns, EPS)
        call, expected = replace(call, front=norm), expected * norm.factors().double()[:, None]
    expected = expected if bias is None else expected + bias.double()
    if kind == "gated":
        gate, up = expected.chunk(2, dim=1)
        expected = gate / (1 + torch.exp(-gate)) * up
    if kind == "added":
        stream = (8 * torch.randn(tokens, outputs)).to(dtype)
        expected = expected + stream.double()
        parts = square_parts(tokens, weight, schedule, processors)
        squares = torch.full((tokens, parts), torch.nan)
        behind = NextNorm(torch.randn(outputs).to(dtype), torch.full_like(out, torch.nan), squares)
        call = replace(call, out=stream, residual=stream, behind=behind)
    return Case(call, expected, groups, processors)


def assert_rounded(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Rounded once, from float32 sums."""
    unit = torch.finfo(found.dtype).eps
    spread = expected.abs().max() * unit / 16
    assert ((found.double() - expected).abs() <= unit / 2 * expected.abs() + spread).all()


def check(case: Case) -> None:
    call, behind = case.call, case.call.behind
    assert_rounded(call.out, case.expected)
    if behind is not None:
        assert torch.equal(behind.weighted, call.out * behind.weight)
        torch.testing.assert_close(behind.squares.double().sum(1), call.out.double().square().sum(1), rtol=1e-5, atol=0)


@pytest.mark.parametrize(("kind", "dtype"), some_pairs(KINDS, TYPES, 1), ids=str)
def test_the_source_on_the_host(kind, dtype, tmp_path):
    """Lanes meet as the instructions say, warps go on at paces of their own, and copies come late."""
    stages = random.randint(2, 5)
    schedule = WarpRings(stages, WARPS, random.randint(0, stages - 1))
    case = random_case(kind, dtype, schedule)
    plan = warp_plan(case.call, schedule, case.processors)
    _, defines = source(plan)
    kernel = [Path(warp_units.__file__).with_name(name) for name in PARTS[1:]]
    library = compile_on_host(kernel, HERE / "warp_units_host.cpp", defines, 32 * WARPS, tmp_path)
    problem = Problem(*arguments(case.call))
    met = library.run(ctypes.byref(problem), plan.grid, ctypes.c_uint(random.getrandbits(32)))
    assert met == plan.grid, "warps meet once"
    check(case)


def test_all_tiles_are_taken_once_and_by_all_multiprocessors():
    for _ in range(300):
        tiles, gated, processors = random.randint(1, 3000), random.random() < 0.5, random.randint(1, 160)
        room = Room(WarpRings(3), random.choice([1, 2, 4, 8]), random.choice([2, 3, 4, 8, 12]))
        divided = divided_tiles(tiles, gated, room, processors)
        # As `Share` of the kernel counts.
        ends = [each * tiles // divided.grid for each in range(divided.grid + 1)]
        counts = [end - start for start, end in pairwise(ends)]
        assert min(counts) >= 1
        assert max(counts) <= divided.turns * (1 if gated else divided.width)
        assert divided.grid >= min(tiles, processors)
        assert divided.width * room.pieces <= 32
        tiles_each = divided.turns * divided.width
        assert tiles_each <= MOST_TILES
        assert 16 * (room.ring_bytes(divided.width) + room.sum_bytes(tiles_each)) <= SHARED_BYTES


def test_what_the_kernel_is_for():
    weight = pack_units(*layer(64, 256, 2, 4, True, "cpu"), 4)
    assert fits(weight)
    assert not fits(pack_units(*layer(64, 256, 2, 8, False, "cpu"), 8))
    assert not fits(pack_units(*layer(64, 320, 1, 4, False, "cpu"), 4)), "half a step"
    assert not fits(pack_units(*layer(72, 256, 2, 4, False, "cpu"), 4)), "half a tile"
    codes, scales, points = layer(64, 256, 2, 4, False, "cpu")
    assert not fits(pack_units(codes, scales.float() * 1.0001, points, 4))
    assert not warp_units.takes(weight), "on a CPU"
    for tokens, dtype in ((9, torch.bfloat16), (8, torch.float32)):
        x = torch.zeros(tokens, 256, dtype=dtype)
        with pytest.raises(ValueError, match="tokens"):
            warp_plan(UnitCall(x, weight, x.new_empty(tokens, 64)), WarpRings(3), 132)
    with pytest.raises(ValueError, match="tiles"):
        warp_plan(UnitCall(x[:1].bfloat16(), weight, x.new_empty(1, 24), parts=2), WarpRings(3), 132)
    for wrong in ((1, 16), (3, 4), (3, 12)):
        with pytest.raises(ValueError, match="warps"):
            WarpRings(*wrong)


def test_triton_stands_in_without_a_compiler(monkeypatch):
    def fail(*given: object, **named: object) -> bytes:
        raise OSError("there is no NVRTC")

    monkeypatch.setattr(warp_units, "compile_cuda", fail)
    monkeypatch.setattr(warp_units, "is_hopper", lambda device: True)
    warp_units._runs_on.cache_clear()
    weight = pack_units(*layer(64, 256, 2, 4, True, "cpu"), 4)
    with pytest.warns(UserWarning, match="no NVRTC"):
        assert not warp_units.takes(weight)
    assert not warp_units.takes(weight), "it is said once"
    warp_units._runs_on.cache_clear()


LLAMA_8B = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)}


def plan_of(name: str, tokens: int, zeros: bool, schedule: WarpRings) -> WarpPlan:
    """Of a layer of Llama-3.1-8B in groups of 128 on an H200."""
    outputs, columns = LLAMA_8B[name]
    gated, added = name == "gate_up", name in ("o", "down")
    room = Room(schedule, tokens, 3 if zeros else 2)
    divided = divided_tiles(outputs // (1 + gated) // 16, gated, room, 132)
    assert divided.grid == 132
    return WarpPlan(
        schedule, divided.grid, columns // 128, divided.turns, divided.width, tokens, False, True, zeros, 1, gated,
        front=not added, behind=added, residual=added, bias=False,
    )  # fmt: skip


@pytest.mark.parametrize("tokens", drawn_of([1, 2, 4, 8], 2))
@pytest.mark.parametrize("name", LLAMA_8B)
def test_programs_fit_a_multiprocessor(name, tokens, tmp_path):
    """Without registers in memory."""
    triton = pytest.importorskip("triton")
    schedule = NORM_SCHEDULES[8]["wide"]
    plan = plan_of(name, tokens, random.random() < 0.5, schedule)
    assert plan.shared_bytes <= SHARED_BYTES
    text, defines = source(plan)
    try:
        (tmp_path / "kernel.cubin").write_bytes(compile_cuda(text, defines, name="warp_units.cu"))
    except OSError as error:
        pytest.skip(str(error))
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    line = [str(tool), "--dump-resource-usage", str(tmp_path / "kernel.cubin")]
    report = subprocess.run(line, capture_output=True, text=True, check=True).stdout
    found = {name: int(value) for name, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", report)}
    assert found["STACK"] == found["LOCAL"] == 0
    assert found["REG"] * 32 * schedule.warps <= 65536


def test_layers_of_few_tokens_take_it_where_it_can_be_had():
    for tokens in (1, 8):
        for name in ("o", "gate_up", "down"):
            shape = (*LLAMA_8B[name], name == "gate_up")
            assert isinstance(norm_schedule(tokens, *shape), WarpRings)
            assert norm_schedule(tokens, *shape, warps=False) is None


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_random_layers_on_a_gpu(kind, dtype):
    """Also of rows of x that are not at whole 16 bytes."""
    for _ in range(8):
        case, schedule = fitting_case(kind, dtype)
        call = on_gpu(case.call, schedule)
        for _ in range(2):
            warp_units.launch(call, schedule)
            given = replace(case.call, out=call.out.cpu(), behind=call.behind and moved(call.behind, "cpu"))
            check(replace(case, call=given))
            if call.residual is not None:
                call.residual.copy_(case.call.residual)


def fitting_case(kind: str, dtype: torch.dtype) -> tuple[Case, WarpRings]:
    """With a schedule whose rings leave room for the case's sums."""
    while True:
        schedule = WarpRings(random.randint(2, 5), random.choice([8, 16]), random.randint(0, 1))
        with suppress(ValueError):
            case = random_case(kind, dtype, schedule)
            warp_units.warp_plan(case.call, schedule, case.processors)
            return case, schedule


@pytest.mark.parametrize("kind", KINDS)
def test_rings_without_room_for_sums_are_refused(kind):
    case, schedule = fitting_case(kind, random.choice(TYPES))
    with pytest.raises(ValueError, match="no room for sums"):
        warp_units.warp_plan(case.call, replace(schedule, stages=64), case.processors)


def moved(behind: NextNorm, device: str) -> NextNorm:
    return NextNorm(behind.weight.to(device), behind.weighted.to(device), behind.squares.to(device))


def on_gpu(call: UnitCall, schedule: WarpRings) -> UnitCall:
    """The same on the GPU, with as many sums of squares as that has multiprocessors."""
    weight = call.weight
    names = [name for name in ("codes", "scales", "zeros", "arrived") if getattr(weight, name) is not None]
    weight = replace(weight, **{name: getattr(weight, name).cuda() for name in names})
    out = call.out.cuda()
    front, behind = call.front, call.behind
    if behind is not None:
        processors = torch.cuda.get_device_properties(0).multi_processor_count
        parts = square_parts(call.tokens, weight, schedule, processors)
        behind = replace(moved(behind, "cuda"), squares=torch.full((call.tokens, parts), torch.nan, device="cuda"))
    x = torch.empty(call.tokens, call.x.shape[1] + 1, dtype=call.x.dtype, device="cuda")[:, 1:].copy_(call.x)
    return replace(
        call,
        x=x,
        weight=weight,
        out=out,
        bias=call.bias if call.bias is None else call.bias.cuda(),
        residual=None if call.residual is None else out,
        front=front and DelayedNorm(front.weighted.cuda(), front.squares.cuda(), front.eps),
        behind=behind,
    )
