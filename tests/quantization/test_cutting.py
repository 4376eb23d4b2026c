"""Parts of quantized weights compute what those parts of the weight they stand for compute."""

import random

import pytest
import torch

from bladellm_runtime.layers.quantized_linear import QuantizedLinear
from bladellm_runtime.quantization.cutting import take_inputs, take_outputs
from bladellm_runtime.quantization.scheme import Scheme
from bladellm_runtime.quantization.weight import QuantizedWeight
from tests.models.quantized import SCHEMES, round_weight

ROWS, COLUMNS = 24, 96


def random_weight(scheme: Scheme, scrambled: bool = False) -> QuantizedWeight:
    order = torch.randperm(COLUMNS) if scrambled else None
    input_scale = 0.05 if scheme.activations == "static" else None
    return round_weight(torch.randn(ROWS, COLUMNS), scheme, torch.float32, order, input_scale)


def pick(size: int) -> torch.Tensor:
    """A stretch of places with some padding around and within it."""
    first = random.randrange(size)
    stretch = torch.arange(first, random.randint(first + 1, size))
    at = random.randint(0, len(stretch))
    gap = torch.full((random.choice([0, 1, 8]),), -1)
    return torch.cat((stretch[:at], gap, stretch[at:], gap))


def product(weight: QuantizedWeight, x: torch.Tensor) -> torch.Tensor:
    """In float64, of what the codes stand for, whatever inputs their columns are of."""
    groups = weight.scales.shape[1]
    codes = weight.codes.double().view(weight.rows, groups, -1)
    if weight.scheme.kind == "int":
        codes = codes - (weight.scheme.middle if weight.zeros is None else weight.zeros.double().unsqueeze(2))
    wide = (codes * weight.scales.double().unsqueeze(2)).flatten(1)
    return (x if weight.order is None else x[:, weight.order]) @ wide.t()


@pytest.mark.parametrize("name", SCHEMES)
def test_outputs(name):
    weight, x = random_weight(SCHEMES[name]), torch.randn(5, COLUMNS, dtype=torch.float64)
    for _ in range(20):
        outputs = pick(ROWS)
        found = product(take_outputs(weight, outputs), x)
        torch.testing.assert_close(found[:, outputs >= 0], product(weight, x)[:, outputs[outputs >= 0]])
        assert not found[:, outputs < 0].any()


@pytest.mark.parametrize("scrambled", [False, True])
@pytest.mark.parametrize("name", SCHEMES)
def test_inputs(name, scrambled):
    if scrambled and SCHEMES[name].group_size is None:
        pytest.skip("one group has one order")
    weight = random_weight(SCHEMES[name], scrambled)
    for _ in range(20):
        inputs = pick(COLUMNS)
        x = torch.randn(5, COLUMNS, dtype=torch.float64)
        own = x[:, inputs.clamp(min=0)].masked_fill(inputs < 0, 0)
        others = torch.ones(COLUMNS, dtype=torch.bool)
        others[inputs[inputs >= 0]] = False
        part = take_inputs(weight, inputs)
        torch.testing.assert_close(product(part, own), product(weight, x.masked_fill(others, 0)))
        assert part.columns == part.scheme.groups(part.columns) * (part.scheme.group_size or part.columns)
        # What is padding does not count where its inputs are not 0 either.
        loud = own.masked_fill(inputs < 0, 1e6)
        torch.testing.assert_close(product(part, loud), product(part, own))


@pytest.mark.parametrize("name", ["w4 g16 asymmetric", "w8 g16", "w4 g16"])
def test_operators_run_the_parts(name):
    weight = random_weight(SCHEMES[name], scrambled=True)
    part = take_inputs(take_outputs(weight, torch.arange(-1, 16)), torch.arange(5, 60))
    x = torch.randn(3, 55)
    found = QuantizedLinear(part, None, torch.float32)(x)
    torch.testing.assert_close(found.double(), product(part, x.double()), rtol=1e-4, atol=1e-4)


def test_groups_stay_whole_where_the_border_is_theirs():
    weight = random_weight(Scheme(4, group_size=32))
    assert take_inputs(weight, torch.arange(32, 96)).scheme.group_size == 32
    half = take_inputs(weight, torch.arange(16, 96))
    assert (half.scheme.group_size, half.order, half.columns) == (16, None, 80)
    assert torch.equal(half.codes, weight.codes[:, 16:])


def test_zero_points_beyond_the_codes():
    """gptq's 16 of 4 bits has no code that stands for 0, so nothing can be filled up."""
    weight = random_weight(Scheme(4, group_size=16, symmetric=False), scrambled=True)
    assert weight.zeros is not None
    weight.zeros[3, 2] = 16
    inputs, x = torch.arange(7, 50), torch.randn(4, COLUMNS, dtype=torch.float64)
    expected = product(weight, torch.nn.functional.pad(x[:, inputs], (7, 46)))
    torch.testing.assert_close(product(take_inputs(weight, inputs), x[:, inputs]), expected)
