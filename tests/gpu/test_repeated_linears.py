"""Linear operators at the sizes of a model, where all multiprocessors are at work: right, and the same bits each time.

A race inside a kernel shows there, and hardly in small layers.
"""

from collections.abc import Callable

import pytest
import torch
from bladellm_kernels.linear import linear, linear_reference, linear_silu_mul, linear_silu_mul_reference
from torch import Tensor

from tests.kernels.quantized_linear_support import make_layer

pytestmark = pytest.mark.gpu

TOKENS = [1, 8, 16, 40, 64, 100, 130, 192, 256, 300]
SIZES = [(6144, 4096), (28672, 4096), (4096, 14336)]
LIMIT = 8e-3
"""Of the error's norm by that of the outputs: bfloat16 rounds them by 1.7e-3, and scales folded into codes by as much."""


def check(call: Callable[[], Tensor], expected: Tensor) -> None:
    results = [call() for _ in range(12)]
    assert (results[0].double() - expected).norm() < LIMIT * expected.norm()
    assert all(torch.equal(each, results[0]) for each in results)


@pytest.mark.parametrize(("rows", "columns"), SIZES)
@pytest.mark.parametrize(("name", "group"), [("w4a16", 32), ("w4a16", 128), ("w8a16", 128), ("w8a8", 0), ("fp8", 0)])
def test_quantized_weights(name, group, rows, columns):
    layer = make_layer(name, rows, columns, columns // group if group else 1, name == "w4a16", "cuda")
    for tokens in TOKENS:
        x = torch.randn(tokens, columns, device="cuda").bfloat16()
        check(lambda x=x: layer.run(name, x), layer.reference(name, x))


@pytest.mark.parametrize(("rows", "columns"), SIZES)
def test_plain_weights(rows, columns):
    weight = torch.randn(rows, columns, device="cuda").bfloat16()
    for tokens in TOKENS:
        x = torch.randn(tokens, columns, device="cuda").bfloat16()
        check(lambda x=x: linear(x, weight), linear_reference(x, weight))
        check(lambda x=x: linear_silu_mul(x, weight), linear_silu_mul_reference(x, weight))
