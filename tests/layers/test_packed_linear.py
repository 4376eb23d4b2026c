"""`PackedLinear` beside `Linear` of the same weight; on a CPU by the reference of its operator."""

import random

import pytest
import torch
from bladellm_kernels.delayed_norm import delayed_norm
from bladellm_kernels.packed_linear import MAX_ROWS
from bladellm_kernels.packed_weight import pack_weight

from bladellm_runtime.layers import packed_linear
from bladellm_runtime.layers.linear import Linear
from bladellm_runtime.layers.packed_linear import PackedLinear

ROWS = (1, 7, MAX_ROWS, MAX_ROWS + 1)


@pytest.fixture(autouse=True)
def reads(monkeypatch) -> list[int]:
    """The rows of all steps that the packed weights of a CPU serve, as a Hopper's would."""
    served = []

    def reads_packed(x, weight) -> bool:
        few = 0 < len(x) <= MAX_ROWS
        if few:
            served.append(len(x))
        return few

    monkeypatch.setattr(packed_linear, "reads_packed", reads_packed)
    return served


def layers_of(outputs: int, inputs: int, gated: bool = False, bias: bool = False) -> tuple[Linear, PackedLinear]:
    weight = (torch.randn(outputs, inputs) / inputs**0.5).bfloat16()
    given = torch.randn(outputs).bfloat16() if bias else None
    packed = pack_weight(weight, gated)
    assert packed is not None
    return Linear(weight, given), PackedLinear(weight, packed, given)


def assert_close(found: torch.Tensor, expected: torch.Tensor) -> None:
    """But for roundings: of many rows the gate's inputs are rounded, too."""
    assert found.dtype == expected.dtype
    torch.testing.assert_close(found.float(), expected.float(), rtol=2**-6, atol=2**-7)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("bias", [False, True])
def test_few_rows_read_the_packed_weight_and_others_the_plain_one(rows, bias, reads):
    plain, packed = layers_of(192, 128, bias=bias)
    x = torch.randn(rows, 128).bfloat16()
    assert_close(packed(x), plain(x))
    assert reads == ([rows] if rows <= MAX_ROWS else [])
    out = torch.full((rows, 192), torch.nan).bfloat16()
    assert packed(x, out) is out
    assert_close(out, plain(x))


@pytest.mark.parametrize("rows", ROWS)
def test_a_gate_and_a_residual(rows, reads):
    plain, packed = layers_of(256, 64, gated=True)
    x = torch.randn(rows, 64).bfloat16()
    gate, up = (x.float() @ plain.weight.float().T).chunk(2, dim=1)
    assert_close(packed.silu_mul(x), (torch.nn.functional.silu(gate) * up).bfloat16())
    few = int(rows <= MAX_ROWS)
    assert len(reads) == few
    # Rows of the gate and of up lie in turn: the layer alone is computed by the plain weight.
    assert torch.equal(packed(x), plain(x))
    assert len(reads) == few
    _, added = layers_of(64, 128)
    residual, y = torch.randn(rows, 64).bfloat16(), torch.randn(rows, 128).bfloat16()
    expected = residual.float() + y.float() @ added.weight.float().T
    assert added.add_to(residual, y) == (rows <= MAX_ROWS)
    if rows <= MAX_ROWS:
        assert_close(residual, expected.bfloat16())


def test_norms_are_kernels_of_their_own_for_few_rows(reads):
    plain, packed = layers_of(64, 128)
    rows = random.randint(1, MAX_ROWS)
    norm = delayed_norm(torch.randn(rows, 128).bfloat16(), torch.randn(128).bfloat16(), 1e-5)
    assert_close(packed.normed(norm), plain(norm.normed()))
    assert set(reads) == {rows}
    assert not any(packed.fuses(count, gated) for count in range(1, MAX_ROWS + 1) for gated in (False, True))


def test_bytes_are_those_of_both_weights():
    plain, packed = layers_of(256, 128, bias=True)
    assert packed.bytes == plain.bytes + packed.packed.bytes
    assert packed.outputs == plain.outputs == 256
