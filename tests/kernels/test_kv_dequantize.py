"""Stored keys and values copied out as numbers."""

import random

import numpy as np
import pytest
import torch
from bladellm_kernels.kv_dequantize import BLOCK_FIELDS, Stretch, dequantized_layers, kv_dequantize, list_blocks
from bladellm_kernels.kv_format import KV_FORMATS
from bladellm_kernels.kv_read import kv_read

from tests.kernels.conditions import DEVICES
from tests.kernels.hopper import compiled_launches, spilled
from tests.kernels.interpreted import run_interpreted
from tests.kernels.prefill_support import prefill_case


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", KV_FORMATS)
@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("bounds", [[(0, 39)], [(13, 14)], [(16, 32), (0, 39), (38, 39)], [(5, 5), (0, 33)], []])
def test_numbers_are_those_of_kv_read(device, name, paged, bounds):
    heads, spans = (3, 3, 24), [(2, 5), (20, 19), (0, 40)]
    _, kv, chunks = prefill_case(name, torch.bfloat16, heads, spans, device, paged, mapped=paged)
    stretches = [Stretch(chunks[1 + i % 2].base_row, 1 + i % 2, *each) for i, each in enumerate(bounds)]
    parts = [kv_read(kv, *each, torch.float32) for each in stretches]
    total = sum(len(part) for part in parts)
    out = torch.full((total + 2, 2, 6, 24), 7.0, device=device)
    kv_dequantize(kv, stretches, out[1:-1, :, ::2])
    if parts:
        torch.testing.assert_close(out[1:-1, :, ::2], torch.cat(parts))
    assert out[1:-1, :, ::2].isfinite().all()
    out[1:-1, :, ::2] = 7
    assert (out == 7).all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["int8", "int4_affine", "fp8_e4m3"])
@pytest.mark.parametrize("rows", [1, 60, 100, 1000])
@pytest.mark.parametrize("window", [None, 1, 25])
def test_plain_layers_hold_what_every_chunk_sees_in_bounded_buffers(device, name, rows, window):
    spans = [(2, 5), (20, 19), (0, 40), (30, 70), (0, 1)]
    _, kv, chunks = prefill_case(name, torch.float32, (6, 2, 32), spans, device)
    seen = []
    for plain, moved in dequantized_layers(kv, chunks, window, torch.float32, rows * 2 * 2 * 32 + 5):
        assert not plain.format.quantized
        assert len(plain.payload) <= rows or len(moved) == 1
        taken = 0
        for span, original in zip(moved, chunks[len(seen) :], strict=False):
            assert span._replace(base_row=original.base_row) == original
            first = 0 if window is None else max(0, span.start - window + 1)
            end = span.start + span.query_len
            expected = kv_read(kv, original.base_row, original.slot, first, end)
            torch.testing.assert_close(plain.payload[span.base_row + first : span.base_row + end], expected)
            taken += end - first
        assert len(plain.payload) == taken
        seen += moved
    assert len(seen) == len(chunks)


def few_programs_copy_all_blocks() -> None:
    """Of lists with room for more, in which stretches lie anywhere."""
    from bladellm_kernels.kv_dequantize_triton import launch_blocks

    for name in ("int8", "fp12_e4m7"):
        for programs in (None, 1, 13):
            _, kv, chunks = prefill_case(name, torch.float32, (4, 2, 32), [(0, 90), (3, 70), (0, 40)])
            stretches = [Stretch(span.base_row, span.slot, 0, span.start + span.query_len) for span in chunks]
            rows = [random.randrange(5), 110, 200]
            blocks = np.concatenate([*map(list_blocks, stretches, rows), np.zeros((9, BLOCK_FIELDS), np.int64)])
            out = torch.full((260, 2, 2, 32), 7.0)
            launch_blocks(kv, torch.from_numpy(blocks), out, programs)
            for stretch, row in zip(stretches, rows, strict=True):
                part = out[row : row + stretch.end]
                torch.testing.assert_close(part, kv_read(kv, *stretch, torch.float32), atol=0, rtol=1e-6)
                part.fill_(7)
            assert (out == 7).all()


def test_few_programs_copy_all_blocks():
    pytest.importorskip("triton")
    run_interpreted("tests.kernels.test_kv_dequantize", "few_programs_copy_all_blocks")


@pytest.mark.parametrize("name", ["int8", "fp12_e4m7", "int4"])
def test_it_compiles_without_spills(name):
    pytest.importorskip("triton")
    from bladellm_kernels.kv_dequantize_triton import launch_blocks

    _, kv, _ = prefill_case(name, torch.bfloat16, (32, 8, 128), [(0, 40)])
    with compiled_launches() as compiled:
        launch_blocks(kv, torch.zeros(300, BLOCK_FIELDS, dtype=torch.int64), torch.empty(99, 2, 8, 128).bfloat16(), 528)
    assert not spilled(compiled["kv_dequantize_kernel"].asm["ptx"])


def test_a_wrong_buffer_is_refused():
    _, kv, [span] = prefill_case("int8", torch.float32, (3, 3, 24), [(0, 20)])
    for out in (torch.empty(19, 2, 3, 24), torch.empty(20, 2, 3, 48)[..., ::2]):
        with pytest.raises(ValueError, match="out must be"):
            kv_dequantize(kv, [Stretch(span.base_row, span.slot, 0, 20)], out)
