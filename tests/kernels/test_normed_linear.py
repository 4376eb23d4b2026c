"""Linear layers with delayed norms against float64."""

from functools import partial

import pytest
import torch
from bladellm_kernels.delayed_norm import DelayedNorm, delayed_norm
from bladellm_kernels.linear_schedules import ScheduleTable
from bladellm_kernels.normed_linear import (
    linear_add,
    linear_between_norms,
    normed_linear,
    normed_linear_silu_mul,
    norms_schedule,
    use_norms_table,
)

from tests.kernels.conditions import DEVICES, DTYPES, assert_close
from tests.kernels.interpreted import run_interpreted

EPS = 1e-5
SIZES = [(0, 6, 16), (1, 34, 48), (3, 130, 7), (5, 64, 160), (17, 258, 96), (130, 40, 64)]


def rms(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The norm in float64."""
    x = x.double()
    return x / torch.sqrt(x.square().mean(1, keepdim=True) + EPS) * weight.double()


def split_norm(x: torch.Tensor, weight: torch.Tensor, parts: int) -> DelayedNorm:
    """The norm of x, its squares in so many parts."""
    pieces = torch.tensor_split(x.float().square(), parts, dim=1)
    return DelayedNorm(x * weight, torch.stack([piece.sum(1) for piece in pieces], 1), EPS)


def tensors(sizes, dtype, device):
    """x, weight, bias, residual and the two norms' weights."""
    rows, outputs, inputs = sizes
    shapes = (rows, inputs), (outputs, inputs), (outputs,), (rows, outputs), (inputs,), (outputs,)
    x, weight, bias, residual, before, after = (torch.randn(shape).to(device, dtype) for shape in shapes)
    return 3 * x, weight * inputs**-0.5, bias, residual, before, after


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_norm_comes_before_the_product(dtype, device):
    for sizes in SIZES:
        x, weight, bias, _, norm_weight, _ = tensors(sizes, dtype, device)
        expected = rms(x, norm_weight) @ weight.double().t()
        for norm in (delayed_norm(x, norm_weight, EPS), split_norm(x, norm_weight, 5)):
            assert_close(norm.normed(), rms(x, norm_weight).float(), dtype)
            assert_close(normed_linear(norm, weight), expected.float(), dtype)
            wide = torch.full(expected.shape, torch.nan, device=device)
            assert normed_linear(norm, weight, bias, wide) is wide
            assert_close(wide, (expected + bias.double()).float(), dtype)
            out = torch.full_like(wide, torch.nan, dtype=dtype)
            assert normed_linear(norm, weight, bias, out) is out
            assert_close(out, wide, dtype)
            gate, up = expected.chunk(2, dim=1)
            gated = (gate / (1 + torch.exp(-gate)) * up).float()
            assert_close(normed_linear_silu_mul(norm, weight), gated, dtype)
            out = torch.full(gated.shape, torch.nan, dtype=dtype, device=device)
            assert normed_linear_silu_mul(norm, weight, out) is out
            assert_close(out, gated, dtype)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_norm_behind_is_that_of_the_stream(dtype, device):
    for sizes in SIZES:
        x, weight, bias, residual, _, norm_weight = tensors(sizes, dtype, device)
        expected = residual.double() + x.double() @ weight.double().t()
        stream, norm = linear_add(x, weight, residual, norm_weight, EPS)
        assert_close(stream, expected.float(), dtype)
        assert_norm_of(norm, stream, norm_weight)
        stream, norm = linear_add(x, weight, residual, norm_weight, EPS, bias, out=residual)
        assert stream is residual
        assert_close(stream, (expected + bias.double()).float(), dtype)
        assert_norm_of(norm, stream, norm_weight)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_layer_between_norms_is_one_alone(dtype, device):
    for sizes in SIZES:
        x, weight, bias, *_ = tensors(sizes, dtype, device)
        expected = x.double() @ weight.double().t()
        assert_close(linear_between_norms(x, weight), expected.float(), dtype)
        assert_close(linear_between_norms(x, weight, bias), (expected + bias.double()).float(), dtype)


def assert_norm_of(norm: DelayedNorm, stream: torch.Tensor, norm_weight: torch.Tensor) -> None:
    """Of the stream as it was rounded: the only error is that of float32 sums."""
    assert norm.eps == EPS
    assert torch.equal(norm.weighted, stream * norm_weight)
    factors = torch.rsqrt(stream.double().square().mean(1) + EPS)
    torch.testing.assert_close(norm.factors().double(), factors, rtol=1e-6, atol=0)


def interpreted() -> None:
    from bladellm_kernels.delayed_norm_triton import launch_delayed_norm, launch_normed

    for rows, columns in ((1, 16), (5, 100), (3, 513)):
        x, weight = torch.randn(rows, columns + 3)[:, :columns], torch.randn(columns)
        weighted, squares = torch.full((rows, columns), torch.nan), torch.full((rows, 1), torch.nan)
        launch_delayed_norm(x, weight, weighted, squares)
        torch.testing.assert_close(weighted, x * weight)
        torch.testing.assert_close(squares[:, 0], x.square().sum(1))
        norm, out = split_norm(x, weight, 3), torch.full((rows, columns), torch.nan)
        launch_normed(norm.weighted, norm.squares, EPS, out)
        torch.testing.assert_close(out, norm.normed())


def test_the_norm_of_rows_in_one_kernel_interpreted():
    pytest.importorskip("triton")
    run_interpreted("tests.kernels.test_normed_linear", "interpreted")


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("x", {"x": torch.zeros(2, 15)}),
        ("weight", {"weight": torch.zeros(8, 16, dtype=torch.float64)}),
        ("residual", {"residual": torch.zeros(3, 8)}),
        ("norm_weight", {"norm_weight": torch.zeros(7)}),
        ("norm_weight", {"norm_weight": torch.zeros(8, dtype=torch.float16)}),
        ("out", {"out": torch.zeros(2, 9)}),
        ("bias", {"bias": torch.zeros(7)}),
    ],
)
def test_wrong_arguments_are_named(name, change):
    arguments = {
        "x": torch.zeros(2, 16), "weight": torch.zeros(8, 16), "residual": torch.zeros(2, 8),
        "norm_weight": torch.zeros(8), "eps": EPS,
    }  # fmt: skip
    with pytest.raises(ValueError, match=name):
        linear_add(**(arguments | change))
    if name in ("weight", "bias", "out"):
        norm = delayed_norm(torch.zeros(2, 16), torch.zeros(16), EPS)
        with pytest.raises(ValueError, match=name):
            normed_linear(norm, **({"weight": torch.zeros(8, 16)} | change))
    if name in ("x", "weight", "bias"):
        with pytest.raises(ValueError, match=name):
            linear_between_norms(**({"x": torch.zeros(2, 16), "weight": torch.zeros(8, 16)} | change))


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 8, 13, 30])
def test_a_captured_stack_gives_the_same_bits_at_every_replay(rows, request):
    """Layers whose residual stream is written in place, each starting beside the one in front."""
    hidden, inner, dtype, device = 2048, 5632, torch.bfloat16, "cuda"
    shapes = {"qkv": (hidden, hidden), "o": (hidden, hidden), "gate_up": (2 * inner, hidden), "down": (hidden, inner)}
    layers = [
        {name: torch.randn(n, k, dtype=dtype, device=device) * k**-0.5 for name, (n, k) in shapes.items()}
        for _ in range(6)
    ]
    norms = [1 + torch.randn(hidden, dtype=dtype, device=device) / 8 for _ in range(13)]
    use_norms_table(ScheduleTable(norm_rows=(1, 32)))
    request.addfinalizer(partial(use_norms_table, None))
    assert all(norms_schedule(rows, layer["o"]) is not None for layer in layers)
    x = torch.randn(rows, hidden, dtype=dtype, device=device)
    stream = torch.empty_like(x)

    def step() -> torch.Tensor:
        stream.copy_(x)
        norm = delayed_norm(stream, norms[0], EPS)
        for index, layer in enumerate(layers):
            queries = normed_linear(norm, layer["qkv"])
            _, norm = linear_add(queries, layer["o"], stream, norms[2 * index + 1], EPS, out=stream)
            gated = normed_linear_silu_mul(norm, layer["gate_up"])
            _, norm = linear_add(gated, layer["down"], stream, norms[2 * index + 2], EPS, out=stream)
        return norm.normed()

    def wide_step() -> torch.Tensor:
        wide = x.double()
        for index, layer in enumerate(layers):
            w = {name: weight.double().t() for name, weight in layer.items()}
            wide = wide + rms(wide, norms[2 * index]) @ w["qkv"] @ w["o"]
            gate, up = (rms(wide, norms[2 * index + 1]) @ w["gate_up"]).chunk(2, dim=1)
            wide = wide + torch.nn.functional.silu(gate) * up @ w["down"]
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
