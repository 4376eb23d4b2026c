"""Unit weights with norms, gates and the residual in their kernels: run in Python, compiled, and on a GPU."""

import dataclasses
import re
from functools import partial

import pytest
import torch
from bladellm_kernels.delayed_norm import DelayedNorm
from bladellm_kernels.linear_reference import reference_linear
from bladellm_kernels.unit_schedules import NORM_SCHEDULES, Gemv, Ring, Streamed, WarpRings, norm_schedule
from bladellm_kernels.weight_units import pack_units

from tests.kernels.hopper import compiled_launches, spilled
from tests.kernels.sass import spills_in_the_loop
from tests.kernels.test_normed_linear import rms
from tests.kernels.test_unit_linear import MIDDLE, layer
from tests.kernels.units_in_python import run_units_in_python
from tests.support.cases import drawn_of, some_pairs

pytest.importorskip("triton")

EPS = 1e-5
PARTS = 3
NORMED = [
    (4, 70, 512, 4, False, 1, Gemv(16, 2, 2)),
    (4, 33, 643, 1, True, 8, Gemv(32, 4, 1)),
    (4, 300, 896, 7, True, 11, Gemv(128, 2, 1, 16, 2, programs_per_sm=1)),
    (4, 200, 512, 4, False, 5, Streamed(16, 4, 1, 2)),
    (4, 170, 1024, 16, True, 8, Streamed(16, 4, 1, 3)),
    (4, 333, 1155, 1, True, 13, Streamed(32, 4, 1, 2, 16, 2)),
    (8, 148, 320, 5, False, 2, Streamed(16, 4, 2, 2)),
    (4, 130, 512, 4, False, 5, Ring(64, 8, 2, 2)),
    (4, 333, 1152, 9, True, 16, Ring(128, 16, 2, 2)),
    (4, 200, 1155, 1, True, 9, Ring(64, 16, 1, 4, deep=4)),
]
GATED = [
    (4, 256, 512, 4, False, 1, Streamed(16, 4, 1, 1)),
    (4, 128, 512, 8, True, 8, Streamed(16, 4, 1, 2)),
    (4, 384, 1100, 1, True, 7, Streamed(32, 4, 1, 1)),
    (8, 128, 320, 5, False, 16, Streamed(16, 4, 2, 1, 16)),
    (4, 256, 512, 4, True, 8, Ring(64, 8, 2, 2)),
    (4, 384, 1152, 9, True, 16, Ring(128, 16, 2, 2, steps=1)),
    (4, 640, 1155, 1, True, 9, Ring(64, 16, 1, 3, deep=3)),
    (8, 256, 320, 5, False, 5, Ring(64, 8, 4, 2, fold=True)),
]


@pytest.fixture(params=[False, True], ids=["early copies", "late copies"])
def in_python(monkeypatch, request):
    """A function that makes kernels run in Python from now on, given the tensors that other kernels write."""
    return partial(run_units_in_python, monkeypatch, request.param)


def normed(tokens, columns, device="cpu") -> DelayedNorm:
    """A norm that is not that of its own numbers, so that each matters."""
    squares = torch.rand(tokens, PARTS, device=device) * columns
    return DelayedNorm(torch.randn(tokens, columns, device=device).bfloat16(), squares, EPS)


def assert_rounded(y: torch.Tensor, expected: torch.Tensor, schedule) -> None:
    """Rounded once to bfloat16; a gate's two float32 sums, and codes that are folded, err a little more."""
    unit = torch.finfo(y.dtype).eps
    spread = expected.abs().max() * (unit if getattr(schedule, "fold", False) else unit / 16)
    assert ((y.double() - expected).abs() <= unit / 2 * expected.abs() + spread).all(), schedule


def check_normed(bits, rows, columns, groups, zeros, tokens, schedule, gated, prepare, device="cpu") -> torch.Tensor:
    from bladellm_kernels.normed_unit_linear import normed_unit_linear

    codes, scales, points = layer(rows, columns, groups, bits, zeros, device)
    weight = pack_units(codes, scales, points, bits)
    bias = torch.randn(rows, device=device).bfloat16() if zeros else None
    norm = normed(tokens, columns, device)
    factors = norm.factors().double()[:, None]
    expected = factors * reference_linear(norm.weighted, codes, scales, points, MIDDLE[bits], None)
    expected = expected if bias is None else expected + bias.double()
    if gated:
        gate, up = expected.chunk(2, dim=1)
        expected = gate / (1 + torch.exp(-gate)) * up
    prepare(norm.weighted, norm.squares)
    y = normed_unit_linear(norm, weight, bias, gated=gated, schedule=schedule)
    assert not weight.arrived.any()
    assert_rounded(y, expected, schedule)
    again = normed_unit_linear(norm, weight, bias, gated=gated, schedule=schedule)
    assert torch.equal(again, y), "the same bits whoever comes last"
    return y


@pytest.mark.turns
@pytest.mark.parametrize(("bits", "rows", "columns", "groups", "zeros", "tokens", "schedule"), NORMED, ids=str)
def test_the_norm_comes_before_the_product(bits, rows, columns, groups, zeros, tokens, schedule, in_python):
    check_normed(bits, rows, columns, groups, zeros, tokens, schedule, False, in_python)


@pytest.mark.turns
@pytest.mark.parametrize(("bits", "rows", "columns", "groups", "zeros", "tokens", "schedule"), GATED, ids=str)
def test_gates_multiply_their_outputs(bits, rows, columns, groups, zeros, tokens, schedule, in_python):
    check_normed(bits, rows, columns, groups, zeros, tokens, schedule, True, in_python)


def check_added(bits, rows, columns, groups, zeros, tokens, schedule, prepare, device="cpu") -> None:
    from bladellm_kernels.normed_unit_linear import unit_linear_add

    codes, scales, points = layer(rows, columns, groups, bits, zeros, device)
    weight = pack_units(codes, scales, points, bits)
    bias = torch.randn(rows, device=device).bfloat16() if zeros else None
    x, norm_weight = torch.randn(tokens, columns, device=device).bfloat16(), torch.randn(rows, device=device).bfloat16()
    whole = torch.full((tokens + 1, rows + 5), torch.nan, device=device).bfloat16()
    before = 8 * torch.randn(tokens, rows, device=device).bfloat16()
    stream = whole[:tokens, :rows]
    expected = before.double() + reference_linear(x, codes, scales, points, MIDDLE[bits], bias)
    prepare(x, stream)
    results = []
    for _ in range(2):
        stream.copy_(before)
        norm = unit_linear_add(x, weight, stream, norm_weight, EPS, bias, schedule=schedule)
        assert not weight.arrived.any()
        assert whole[:, rows:].isnan().all()
        assert whole[tokens:].isnan().all()
        assert_rounded(stream, expected, schedule)
        assert torch.equal(norm.weighted, stream * norm_weight)
        factors = torch.rsqrt(stream.double().square().mean(1) + EPS)
        torch.testing.assert_close(norm.factors().double(), factors, rtol=1e-6, atol=0)
        results.append((stream.clone(), norm.squares))
    assert all(map(torch.equal, *results)), "the same bits whoever comes last"


@pytest.mark.turns
@pytest.mark.parametrize(("bits", "rows", "columns", "groups", "zeros", "tokens", "schedule"), NORMED, ids=str)
def test_the_stream_is_rounded_once_and_normed(bits, rows, columns, groups, zeros, tokens, schedule, in_python):
    check_added(bits, rows, columns, groups, zeros, tokens, schedule, in_python)


LLAMA_8B = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)}


@pytest.mark.parametrize("parts", drawn_of([1, 64], 1))
@pytest.mark.parametrize(("name", "tokens"), [*some_pairs(LLAMA_8B, [13, 16], 2), ("qkv", 1), ("qkv", 8)])
def test_nothing_is_spilled_or_read_before_it_is_there(name, tokens, parts, monkeypatch, tmp_path):
    """As launched on an H200 for the layers of Llama-3.1-8B, of fewer outputs; parts: sums of the norm in front."""
    from bladellm_kernels import ring_launch, unit_call, unit_launch
    from bladellm_kernels.normed_unit_linear import normed_unit_linear, unit_linear_add

    rows, columns = LLAMA_8B[name]
    schedule = norm_schedule(tokens, rows, columns, name == "gate_up")
    monkeypatch.setattr(unit_launch, "multiprocessors", lambda device: 132)
    monkeypatch.setattr(ring_launch, "multiprocessors", lambda device: 132)
    weight = pack_units(*layer(1024, columns, columns // 128, 4, False), 4)
    shape = unit_call.unit_shape
    monkeypatch.setattr(unit_call, "unit_shape", lambda *given: dataclasses.replace(shape(*given), plain=False))
    x = torch.zeros(tokens, columns).bfloat16()
    with compiled_launches() as compiled:
        if name in ("o", "down"):
            unit_linear_add(x, weight, x.new_zeros(tokens, 1024), x.new_zeros(1024), EPS, schedule=schedule)
        else:
            norm = DelayedNorm(x, torch.zeros(tokens, parts), EPS)
            normed_unit_linear(norm, weight, gated=name == "gate_up", schedule=schedule)
    (kernel,) = compiled.values()
    text = kernel.asm["ptx"]
    before = text.split("griddepcontrol.wait")[:-1]
    assert len(before) == (schedule.wide * schedule.deep + 1 if isinstance(schedule, Ring) else 1)
    assert "griddepcontrol.launch_dependents" in "".join(before)
    # Groups of warps, each of which waits, begin with their registers.
    assert not any(re.search(r"(st|atom|red)\.global", each.rpartition("setmaxnreg")[2]) for each in before)
    assert "st.global" in text
    if isinstance(schedule, Ring):
        assert not spills_in_the_loop(kernel, tmp_path)
    else:
        assert spilled(text) == 0


def test_layers_without_whole_tiles_of_gates_have_no_schedule():
    assert norm_schedule(1, 2 * 96, 512, gated=True) is None
    assert norm_schedule(1, 2 * 96, 512, gated=False) is not None
    assert norm_schedule(17, 28672, 4096, gated=True) is None
    assert isinstance(norm_schedule(2, 128256, 4096, gated=False), Gemv)


def test_what_a_kernel_cannot_do_is_refused():
    from bladellm_kernels.normed_unit_linear import normed_unit_linear, unit_linear_add

    weight = pack_units(*layer(192, 256, 2, 4, False), 4)
    norm = normed(9, 256)
    for schedule in (Gemv(16, 2, 2), Streamed(16, 4, 1, 2), Ring(64, 8, 2, 2)):
        with pytest.raises(ValueError, match="tokens"):
            normed_unit_linear(norm, weight, schedule=schedule)
    with pytest.raises(ValueError, match="whole tiles"):
        normed_unit_linear(norm, weight, gated=True, schedule=Ring(64, 16, 1, 4, deep=4))
    with pytest.raises(ValueError, match="residual"):
        unit_linear_add(norm.weighted, weight, torch.zeros(9, 191).bfloat16(), torch.zeros(191).bfloat16(), EPS)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 7, 8, 9, 13, 16])
@pytest.mark.parametrize("name", LLAMA_8B)
def test_on_a_gpu(name, tokens):
    """As the table says for the layers of Llama-3.1-8B, and for some of odd sizes."""
    rows, columns = LLAMA_8B[name]
    schedule = norm_schedule(tokens, rows, columns, name == "gate_up")
    own = isinstance(schedule, WarpRings)
    sizes = [(4, rows, columns, columns // 128, False), (4, 768, 1024 if own or name == "gate_up" else 1155, 1, True)]
    for bits, outputs, inputs, groups, zeros in [*sizes, *([] if own else [(8, 384, 4096, 32, False)])]:
        case = (bits, outputs, inputs, groups, zeros, tokens, schedule)
        if name in ("o", "down"):
            check_added(*case, lambda *inputs: None, "cuda")
        else:
            check_normed(*case, name == "gate_up", lambda *inputs: None, "cuda")


def unit_spread(outputs, inputs, device):
    """A layer of 4 bits whose outputs are about as large as its inputs."""
    codes, scales, points = layer(outputs, inputs, inputs // 128, 4, True, device)
    return codes, scales * (2.5 * inputs**-0.5), points


def wide_linear(codes, scales, points, x) -> torch.Tensor:
    return reference_linear(x, codes, scales, points, MIDDLE[4], None)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 8, 13])
def test_a_captured_stack_gives_the_same_bits_at_every_replay(rows):
    """Layers whose residual stream is written in place, each starting beside the one in front."""
    from bladellm_kernels.delayed_norm import delayed_norm
    from bladellm_kernels.normed_unit_linear import normed_unit_linear, unit_linear_add

    hidden, inner, device = 2048, 5632, "cuda"
    shapes = {"qkv": (hidden, hidden), "o": (hidden, hidden), "gate_up": (2 * inner, hidden), "down": (hidden, inner)}
    parts = [{name: unit_spread(n, k, device) for name, (n, k) in shapes.items()} for _ in range(5)]
    layers = [{name: pack_units(*each, 4) for name, each in one.items()} for one in parts]
    norms = [1 + torch.randn(hidden, device=device).bfloat16() / 8 for _ in range(11)]
    x = torch.randn(rows, hidden, device=device).bfloat16()
    stream = torch.empty_like(x)

    def step() -> torch.Tensor:
        stream.copy_(x)
        norm = delayed_norm(stream, norms[0], EPS)
        for index, one in enumerate(layers):
            queries = normed_unit_linear(norm, one["qkv"])
            norm = unit_linear_add(queries, one["o"], stream, norms[2 * index + 1], EPS)
            gated = normed_unit_linear(norm, one["gate_up"], gated=True)
            norm = unit_linear_add(gated, one["down"], stream, norms[2 * index + 2], EPS)
        return norm.normed()

    def wide_step() -> torch.Tensor:
        wide = x.double()
        for index, one in enumerate(parts):
            qkv, o, gate_up, down = (partial(wide_linear, *each) for each in one.values())
            wide = wide + o(qkv(rms(wide, norms[2 * index])))
            gate, up = gate_up(rms(wide, norms[2 * index + 1])).chunk(2, dim=1)
            wide = wide + down(torch.nn.functional.silu(gate) * up)
        return rms(wide, norms[-1])

    side, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        expected = step().clone()
        wide = wide_step()
        assert (expected.double() - wide).norm() < 0.02 * wide.norm()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=side):
            found = step()
        for _ in range(50):
            found.fill_(torch.nan)
            for _ in range(3):
                graph.replay()
            assert torch.equal(found, expected)


def test_the_table_has_every_kind():
    assert list(NORM_SCHEDULES) == sorted(NORM_SCHEDULES)
    for tokens, kinds in NORM_SCHEDULES.items():
        assert all(schedule.tokens >= tokens for schedule in kinds.values())
