"""Stored keys and values copied out as numbers."""

import pytest
import torch
from bladellm_kernels.kv_dequantize import kv_dequantize, kv_dequantize_reference
from bladellm_kernels.kv_format import KV_FORMATS

from tests.kernels.conditions import DEVICES
from tests.kernels.prefill_support import prefill_case


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", KV_FORMATS)
@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize(("first", "end"), [(0, 39), (13, 14), (16, 32), (5, 5)])
def test_numbers_are_those_of_kv_read(device, name, paged, first, end):
    _, kv, [_, span] = prefill_case(name, torch.bfloat16, (3, 3, 24), [(2, 5), (20, 19)], device, paged, mapped=paged)
    expected = torch.empty(end - first, 2, 3, 24, device=device)
    kv_dequantize_reference(kv, span.base_row, span.slot, first, end, expected)
    out = torch.full((end - first + 2, 2, 6, 24), 7.0, device=device)
    kv_dequantize(kv, span.base_row, span.slot, first, end, out[1:-1, :, ::2])
    torch.testing.assert_close(out[1:-1, :, ::2], expected)
    assert out[1:-1, :, ::2].isfinite().all()
    out[1:-1, :, ::2] = 7
    assert (out == 7).all()


def test_a_wrong_buffer_is_refused():
    _, kv, [span] = prefill_case("int8", torch.float32, (3, 3, 24), [(0, 20)])
    for out in (torch.empty(19, 2, 3, 24), torch.empty(20, 2, 3, 48)[..., ::2]):
        with pytest.raises(ValueError, match="out must be"):
            kv_dequantize(kv, span.base_row, span.slot, 0, 20, out)
