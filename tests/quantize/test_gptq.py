"""Gptq against a slow float64 reference written from the papers, and what must hold for any input."""

from dataclasses import replace

import pytest
import torch

from bladellm_runtime.quantization.scheme import Scheme
from bladellm_tools.quantize.algorithms import gptq as gptq_module
from bladellm_tools.quantize.algorithms.algorithm import Rounded
from bladellm_tools.quantize.algorithms.gptq import NO_FACTOR, Gptq
from bladellm_tools.quantize.algorithms.gptq_solver import SEARCH_RATIOS, search_ranges
from bladellm_tools.quantize.algorithms.grid import Grid
from bladellm_tools.quantize.algorithms.hessian import factorise
from bladellm_tools.quantize.algorithms.statistics import InputStatistics
from tests.support.cases import some_pairs

SCHEMES = [
    Scheme(4, group_size=16),
    Scheme(4, group_size=16, symmetric=False),
    Scheme(4),
    Scheme(8, symmetric=False),
    Scheme(4, group_size=48),
    Scheme(8, "fp8"),
]
ORDERS = [(True, True), (True, False), (False, True)]
"""By activations or not, with static groups or not."""


def inputs(tokens: int, columns: int) -> torch.Tensor:
    """Correlated inputs whose channels differ in size."""
    mixed = torch.randn(tokens, columns) + torch.randn(tokens, columns // 4 + 1) @ torch.randn(
        columns // 4 + 1, columns
    )
    return mixed * torch.rand(columns).add(0.1)


def statistics_of(x: torch.Tensor, device: str = "cpu") -> InputStatistics:
    x = x.to(device)
    return InputStatistics(x.T @ x / len(x), x.abs().amax(0), x.abs().mean(0), len(x))


def quantize(gptq: Gptq, weight: torch.Tensor, statistics: InputStatistics) -> Rounded:
    return gptq(["module"], [weight.to(statistics.gram.device)], statistics)[0]


def span(values: torch.Tensor, grid: Grid) -> tuple[torch.Tensor, torch.Tensor]:
    """Scale and zero point [N] of a group's weights, float64 [N, size]."""
    scheme = grid.scheme
    low, high = values.amin(1).clamp(max=0), values.amax(1).clamp(min=0)
    top, least = torch.maximum(-low, high), torch.finfo(grid.scale_dtype).tiny
    if scheme.kind == "fp8":
        return (top / 448).clamp(min=least).to(grid.scale_dtype).double(), torch.zeros_like(top)
    if scheme.symmetric:
        scale = (2 * top / (2**scheme.bits - 1)).clamp(min=least).to(grid.scale_dtype).double()
        return scale, torch.full_like(top, 2.0 ** (scheme.bits - 1))
    scale = ((high - low) / (2**scheme.bits - 1)).clamp(min=least).to(grid.scale_dtype).double()
    return scale, (-low / scale).round().clamp(0, 2**scheme.bits - 1)


def nearest(value: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor, scheme: Scheme) -> torch.Tensor:
    if scheme.kind == "fp8":
        return (value / scale).clamp(-448, 448).to(torch.float8_e4m3fn).double() * scale
    return scale * (((value / scale).round() + zero).clamp(0, 2**scheme.bits - 1) - zero)


def slow_gptq(gptq: Gptq, weight: torch.Tensor, gram: torch.Tensor) -> torch.Tensor:
    """Optimal Brain Quantization in a fixed order (arXiv:2208.11580, equations 2 and 3; arXiv:2210.17323, step 1).

    In float64, one column at a time; the inverse Hessian is explicit, and a rounded column is eliminated from it.
    Returns the rounded weight, float64 [N, K].
    """
    scheme, hessian = gptq.grid.scheme, gram.double().clone()
    rest, columns = weight.double().clone(), len(gram)
    dead = hessian.diagonal() == 0
    rest[:, dead] = 0
    mean = hessian.diagonal()[~dead].mean()
    hessian.diagonal()[dead] = mean
    inverse = torch.linalg.inv(hessian + gptq.damp * mean * torch.eye(columns, dtype=torch.float64))
    order = gram.diagonal().sort(descending=True, stable=True).indices if gptq.desc_act else torch.arange(columns)
    size = scheme.group_size or columns
    whole = rest.clone()
    rounded = torch.zeros_like(rest)
    for step, i in enumerate(order.tolist()):
        if gptq.desc_act and gptq.static_groups:
            start = i // size * size
            scale, zero = span(whole[:, start : start + size], gptq.grid)
        elif step % size == 0:
            scale, zero = span(rest[:, order[step : step + size]], gptq.grid)
        rounded[:, i] = nearest(rest[:, i], scale, zero, scheme)
        error = (rest[:, i] - rounded[:, i]) / inverse[i, i]
        rest = rest - error[:, None] * inverse[i]
        inverse = inverse - torch.outer(inverse[:, i], inverse[i]) / inverse[i, i]
    return rounded


@pytest.mark.parametrize(("scheme", "order"), some_pairs(SCHEMES, ORDERS), ids=str)
@pytest.mark.parametrize("block", [128, 20])
def test_it_rounds_as_the_paper_says(device, scheme, order, block):
    """All weights of a row, but for rows where a number lies between two codes to within float32."""
    weight, x = torch.randn(60, 144) * torch.rand(60, 1), inputs(300, 144)
    gptq = Gptq(Grid(scheme, torch.bfloat16), 0.02, *order, search_range=False, block=block)
    statistics = statistics_of(x, device)
    expected = slow_gptq(gptq, weight, statistics.gram.cpu())
    rounded = quantize(gptq, weight, statistics)
    assert rounded.damp == 0.02
    actual = rounded.weight.dequantize().cpu().double()
    same = torch.isclose(actual, expected, rtol=1e-5, atol=1e-7).all(1)
    assert same.double().mean() >= 0.9
    assert rounded.weight.scales.dtype == torch.bfloat16


@pytest.mark.parametrize(("scheme", "order"), some_pairs(SCHEMES, ORDERS), ids=str)
@pytest.mark.parametrize("search_range", [False, True])
def test_outputs_are_nearer_than_with_plain_rounding(device, scheme, order, search_range):
    weight, statistics = torch.randn(50, 192), statistics_of(inputs(1000, 192), device)
    gptq = Gptq(Grid(scheme, torch.float16), 0.01, *order, search_range)
    weight = weight.to(device)
    plain = statistics.output_error(weight, gptq.grid.quantize(weight).dequantize())
    error = statistics.output_error(weight, quantize(gptq, weight, statistics).weight.dequantize())
    assert error < 0.7 * plain


def test_only_scrambled_groups_have_an_order():
    weight, statistics = torch.randn(8, 192), statistics_of(inputs(500, 192))
    for scheme in (Scheme(4, group_size=64), Scheme(4)):
        for desc_act, static_groups in ORDERS:
            solved = quantize(Gptq(Grid(scheme, torch.bfloat16), 0.01, desc_act, static_groups), weight, statistics)
            scrambled = desc_act and not static_groups and scheme.group_size is not None
            assert (solved.weight.order is not None) == scrambled
            if scrambled:
                assert (statistics.gram.diagonal()[solved.weight.order].diff() <= 0).all()


def test_static_groups_have_the_scales_of_plain_rounding():
    weight, statistics = torch.randn(8, 96), statistics_of(inputs(500, 96))
    grid = Grid(Scheme(4, group_size=32, symmetric=False), torch.bfloat16)
    solved, plain = quantize(Gptq(grid, search_range=False), weight, statistics).weight, grid.quantize(weight)
    assert torch.equal(solved.scales, plain.scales)
    assert torch.equal(solved.zeros, plain.zeros)


@pytest.mark.parametrize("columns", [1, 7, 48, 700])
def test_the_factor_is_the_cholesky_of_the_inverse(columns):
    """The short way (one Cholesky, one triangular inverse) against the long one in float64, columns reordered."""
    gram = statistics_of(inputs(3 * columns, columns)).gram
    before = gram.clone()
    order = torch.randperm(columns)
    factor = factorise(gram, 0.01, order)
    assert torch.equal(gram, before)
    mean = gram.diagonal().double().mean()
    hessian = gram.double()[order][:, order] / mean + 0.01 * torch.eye(columns)
    expected = torch.linalg.cholesky(torch.linalg.inv(hessian), upper=True)
    torch.testing.assert_close(factor.upper.double(), expected, atol=1e-4 * expected.max().item(), rtol=1e-4)
    assert not factor.upper.tril(-1).any()


@pytest.mark.parametrize("tokens", [1, 5, 100])
@pytest.mark.parametrize("magnitude", [1e-12, 1.0, 1e6])
def test_fewer_tokens_than_inputs(device, tokens, magnitude):
    """The Gram matrix is singular, and its size is no matter: damping makes it a Hessian."""
    weight, statistics = torch.randn(20, 200).to(device), statistics_of(inputs(tokens, 200) * magnitude, device)
    gptq = Gptq(Grid(Scheme(4, group_size=40), torch.bfloat16))
    rounded = quantize(gptq, weight, statistics)
    assert rounded.note is None
    plain = statistics.output_error(weight, gptq.grid.quantize(weight).dequantize())
    assert statistics.output_error(weight, rounded.weight.dequantize()) < plain
    assert rounded.damp == 0.01


def test_damping_grows_until_there_is_a_factor():
    """A matrix with an eigenvalue of −0.1 times the mean: 0.01 and 0.04 do not make it definite, 0.16 does."""
    basis = torch.linalg.qr(torch.randn(64, 64))[0]
    values = torch.rand(64) + 0.5
    values[0] = 0
    values = values / values.mean()
    values[0] = -0.1
    gram = basis @ torch.diag(values) @ basis.T
    gram = (gram + gram.T) / 2
    rounded = quantize(Gptq(Grid(Scheme(4), torch.float32)), torch.randn(5, 64), InputStatistics(gram, gram, gram, 9))
    assert rounded.damp == pytest.approx(0.16)
    assert rounded.note is None
    without = quantize(
        Gptq(Grid(Scheme(4), torch.float32), 0.0), torch.randn(5, 64), InputStatistics(gram, gram, gram, 9)
    )
    assert 0.1 < without.damp < 0.5


@pytest.mark.parametrize("bad", ["nan", "inf", "nan off the diagonal", "zero", "hopeless"])
def test_a_gram_matrix_that_is_none_means_plain_rounding_with_a_note(bad):
    weight, statistics = torch.randn(6, 32), statistics_of(inputs(100, 32))
    gram = statistics.gram
    if bad == "zero":
        gram.zero_()
    elif bad == "hopeless":
        gram.neg_().diagonal()[:1] = 1
    elif bad == "nan off the diagonal":
        gram[3, 20] = gram[20, 3] = torch.nan
    else:
        gram[:, 3] = gram[3] = float(bad)
    gptq = Gptq(Grid(Scheme(4, group_size=16), torch.bfloat16))
    rounded = quantize(gptq, weight, statistics)
    assert rounded.note == NO_FACTOR
    assert rounded.damp is None
    assert torch.equal(rounded.weight.dequantize(), gptq.grid.quantize(weight).dequantize())


@pytest.mark.parametrize(("desc_act", "static_groups"), ORDERS)
def test_dead_inputs_become_zero_and_disturb_nobody(desc_act, static_groups):
    weight, x = torch.randn(30, 96), inputs(500, 96)
    dead = torch.zeros(96, dtype=torch.bool)
    dead[[0, 17, 18, 95]] = True
    x[:, dead] = 0
    grid = Grid(Scheme(4, group_size=32, symmetric=False), torch.bfloat16)
    gptq = Gptq(grid, 0.01, desc_act, static_groups, search_range=False)
    actual = quantize(gptq, weight, statistics_of(x)).weight.dequantize()
    assert not actual[:, dead].any()
    expected = slow_gptq(gptq, weight, statistics_of(x).gram)
    assert torch.isclose(actual.double(), expected, rtol=1e-5).all(1).double().mean() >= 0.85


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
@pytest.mark.parametrize("search_range", [False, True])
def test_a_weight_of_zeros_stays_zero(scheme, search_range):
    rounded = quantize(
        Gptq(Grid(scheme, torch.bfloat16), search_range=search_range), torch.zeros(4, 48), statistics_of(inputs(90, 48))
    )
    assert not rounded.weight.dequantize().any()


@pytest.mark.parametrize(("desc_act", "static_groups"), ORDERS)
@pytest.mark.parametrize("symmetric", [True, False])
def test_members_are_rounded_as_each_alone(desc_act, static_groups, symmetric):
    weights, statistics = [torch.randn(rows, 192) for rows in (40, 1, 24)], statistics_of(inputs(500, 192))
    before = [weight.clone() for weight in weights]
    grid = Grid(Scheme(4, group_size=64, symmetric=symmetric), torch.bfloat16)
    gptq = Gptq(grid, 0.01, desc_act, static_groups)
    together = gptq(["q", "k", "v"], weights, statistics)
    same = []
    for weight, rounded in zip(weights, together, strict=True):
        alone = quantize(gptq, weight, statistics).weight
        assert rounded.weight.codes.shape == weight.shape
        assert rounded.weight.scales.shape == (len(weight), 3)
        same += (rounded.weight.dequantize() == alone.dequantize()).all(1).tolist()
    assert sum(same) >= len(same) - 5, "rows may differ in ties"
    assert all(torch.equal(one, other) for one, other in zip(weights, before, strict=True)), "weights are left alone"


@pytest.mark.parametrize("scheme", SCHEMES[:5], ids=str)
def test_the_search_finds_the_ratio_of_least_weighted_error(scheme):
    weight, importance = torch.randn(5, 48) ** 3, torch.rand(48) ** 4
    grid = Grid(scheme, torch.bfloat16)
    scales, zeros = search_ranges(weight, grid, importance)
    codes = grid.codes(weight, scales, zeros)
    best = replace(grid.quantize(weight), codes=codes, scales=scales, zeros=zeros).dequantize()
    size = scheme.group_size or 48
    for ratio in SEARCH_RATIOS:
        other = grid.quantize(weight, ratio).dequantize()
        for start in range(0, 48, size):
            part = slice(start, start + size)
            weighted = [((each - weight) ** 2 * importance)[:, part].sum(1) for each in (best, other)]
            assert (weighted[0] <= weighted[1] * (1 + 1e-5)).all()
    if scheme.bits == 4:
        assert not torch.equal(scales, grid.ranges(weight)[0]), "some range is better shrunk"


def test_statistics_are_needed():
    with pytest.raises(ValueError, match=r"self_attn\.o_proj"):
        Gptq(Grid(Scheme(4), torch.bfloat16))(["self_attn.o_proj"], [torch.randn(2, 8)], None)


def test_products_are_full_float32_inside_and_as_before_outside(monkeypatch):
    seen = []

    def watched(name: str) -> None:
        work = getattr(gptq_module, name)

        def watch(*arguments):
            seen.append(torch.get_float32_matmul_precision())
            return work(*arguments)

        monkeypatch.setattr(gptq_module, name, watch)

    watched("factorise")
    watched("solve")
    previous = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        quantize(Gptq(Grid(Scheme(4), torch.bfloat16)), torch.randn(2, 8), statistics_of(inputs(50, 8)))
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision(previous)
    assert seen == ["highest", "highest"]
