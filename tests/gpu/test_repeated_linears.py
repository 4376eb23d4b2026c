"""Linear operators at the sizes of a model, where all multiprocessors are at work: right, and the same bits each time.

A race inside a kernel shows there, and hardly in small layers.
"""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from bladellm_kernels.fp8_linear import fp8_linear, pack_fp8
from bladellm_kernels.linear import linear, linear_reference, linear_silu_mul, linear_silu_mul_reference
from bladellm_kernels.unit_linear import unit_linear_silu_mul
from bladellm_kernels.weight_units import UnitWeight
from torch import Tensor

from tests.kernels.quantized_linear_support import OPERATORS, make_layer

pytestmark = pytest.mark.gpu

TOKENS = [1, 8, 16, 32, 40, 64, 80, 128, 129, 160, 200, 256, 300]
SIZES = [(6144, 4096), (28672, 4096), (4096, 14336)]
LIMIT = 8e-3
"""Of the norm of the error by that of the outputs: bfloat16 rounds those by 1.7e-3, and folded scales by as much."""


def check(call: Callable[[], Tensor], expected: Tensor) -> None:
    results = [call() for _ in range(12)]
    assert (results[0].double() - expected).norm() < LIMIT * expected.norm()
    assert all(torch.equal(each, results[0]) for each in results)


@pytest.mark.parametrize(("rows", "columns"), SIZES)
@pytest.mark.parametrize(("name", "group"), [("w4a16", 32), ("w4a16", 128), ("w8a16", 128), ("w8a8", 0), ("fp8", 0)])
def test_quantized_weights(name, group, rows, columns):
    layer = make_layer(name, rows, columns, columns // group if group else 1, name == "w4a16", "cuda")
    if name == "fp8":
        run = partial(fp8_linear, packed=pack_fp8(layer.codes, layer.scales, torch.bfloat16))
    else:
        pack, operator, _ = OPERATORS[name]
        run = partial(operator, packed=pack(layer.codes, layer.scales, layer.zeros, torch.bfloat16))
    for tokens in TOKENS:
        x = torch.randn(tokens, columns, device="cuda").bfloat16()
        expected = layer.reference(name, x)
        check(partial(run, x), expected)
        if isinstance(weight := getattr(run.keywords["packed"], "weight", None), UnitWeight):
            gate, up = expected.chunk(2, dim=1)
            check(partial(unit_linear_silu_mul, x, weight), gate / (1 + torch.exp(-gate)) * up)


@pytest.mark.parametrize(("rows", "columns"), SIZES)
def test_plain_weights(rows, columns):
    weight = torch.randn(rows, columns, device="cuda").bfloat16()
    for tokens in TOKENS:
        x = torch.randn(tokens, columns, device="cuda").bfloat16()
        check(partial(linear, x, weight), linear_reference(x, weight))
        check(partial(linear_silu_mul, x, weight), linear_silu_mul_reference(x, weight))
