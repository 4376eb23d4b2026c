"""The Hopper kernel of prefill attention: run in Python, compiled without a GPU, and on one against attention."""

import math
import re
import subprocess

import pytest
import torch
from bladellm_kernels import prefill_tiles
from bladellm_kernels.prefill_tiles import ITEM_FIELDS, list_tiles
from bladellm_kernels.ragged_prefill_attention import ragged_prefill_attention_reference

from tests.kernels.conditions import assert_close
from tests.kernels.prefill_support import hopper, prefill_case
from tests.kernels.test_ragged_prefill_sdpa import ON_CUDA, attention

ROWS, KEYS = 16, 16
SPANS = [(0, 1), (0, 23), (13, 7), (40, 1), (3, 37), (0, 65), (95, 33), (64, 48)]


def attend_in_python(q, kv, spans, scale, out, late_copies):
    """A launch on the CPU, merging included."""
    from bladellm_kernels import prefill_hopper as module

    from tests.kernels.gluon_support import run_program

    group = q.shape[1] // kv.kv_heads
    items, merges = list_tiles(spans, group, kv.kv_heads, None, ROWS)
    lines = max(1, sum(item[8] >= 0 for item in items) * kv.kv_heads * ROWS)
    partial, lse = torch.full((lines, kv.head_dim), math.nan), torch.full((lines,), math.nan)
    strides = kv.payload.stride()
    for program in range(len(items) * kv.kv_heads):
        run_program(
            module.hopper_prefill_kernel, program, late_copies,
            q, q.stride(0), q.stride(1), out, out.stride(0), out.stride(1), kv.payload, *strides[:3],
            torch.tensor(items), partial, lse, scale * math.log2(math.e),
            FIELDS=ITEM_FIELDS, SHAPE=module.Shape(kv.kv_heads, group, kv.head_dim, ROWS, KEYS), EARLY=False,
        )  # fmt: skip
    for first_row, first, query_len, part, parts in merges:
        for head in range(kv.kv_heads):
            places = [torch.arange(ROWS) + ((part + index) * kv.kv_heads + head) * ROWS for index in range(parts)]
            weights = torch.stack([lse[place] for place in places]).mul(math.log(2)).softmax(0)
            merged = (torch.stack([partial[place] for place in places]) * weights.unsqueeze(-1)).sum(0)
            for row in range(ROWS):
                token = (first_row + row) // group
                if token < query_len:
                    out[first + token, head * group + (first_row + row) % group] = merged[row]


@pytest.mark.parametrize("late_copies", [False, True])
@pytest.mark.parametrize(("heads", "part"), [((6, 2, 32), 1024), ((1, 1, 16), 16), ((7, 1, 8), 32), ((4, 4, 16), 1024)])
def test_every_buffer_is_filled_before_it_is_read_and_read_before_it_is_filled(heads, part, late_copies, monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setattr(prefill_tiles, "PART_KEYS", part)
    q, kv, chunks = prefill_case("no_quant", torch.float32, heads, SPANS, mapped=part == 16)
    out = torch.full(q.shape, 7.0)
    attend_in_python(q, kv, chunks, 0.21, out, late_copies)
    assert (out[:2] == 7).all()
    assert_close(out[2:], ragged_prefill_attention_reference(q, kv, chunks, 0.21)[2:], torch.float32)


@pytest.mark.parametrize(("heads", "dtype"), [((8, 4, 128), torch.bfloat16), ((1, 8, 64), torch.float16)], ids=str)
def test_it_compiles_to_products_beside_the_softmax(heads, dtype):
    """In both loops the softmax lies between the waits for the two products, which ptxas has left asynchronous; what is
    spilled is little, before the loops."""
    pytest.importorskip("triton")
    from bladellm_kernels import prefill_hopper as module
    from triton import knobs

    group, kv_heads, dim = heads
    numbers, items, parts = torch.zeros(16, dtype=dtype), torch.zeros(9, dtype=torch.int64), torch.zeros(16)
    with hopper(module.hopper_prefill_kernel):
        compiled = module.hopper_prefill_kernel.warmup(
            numbers, 4096, 128, numbers, 4096, 128, numbers, 8192, dim, 2 * dim, items, parts, parts, 0.1,
            FIELDS=9, SHAPE=module.Shape(kv_heads, group, dim), EARLY=True, num_warps=module.WARPS, launch_pdl=True,
            grid=(1,),
        )  # fmt: skip
    text = compiled.asm["ptx"]
    found = re.findall(r"wgmma\.wait_group\.sync\.aligned \d|ex2\.approx", text)
    order = re.sub("e+", "e", "".join("e" if each.startswith("ex2") else each[-1] for each in found))
    assert order.count("1e0") == 2, order
    done = subprocess.run(
        [knobs.nvidia.ptxas.path, "-v", "--gpu-name=sm_90a", "-o", "/dev/null", "/dev/stdin"],
        input=text, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert "serialized" not in done.stderr
    assert int(re.search(r"(\d+) bytes spill stores", done.stderr)[1]) <= 128
    assert compiled.metadata.shared <= 227 * 1024
    assert "griddepcontrol.wait" in text


@pytest.mark.parametrize("marked", [pytest.param(None, marks=ON_CUDA)])
@pytest.mark.parametrize("heads", [(8, 2, 128), (5, 5, 64), (7, 1, 128)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_on_cuda(marked, heads, dtype):
    """Against attention written out, on memory that is NaN beside the sequences; parts and whole tiles."""
    from bladellm_kernels.ragged_prefill_triton import launch

    spans = [(0, 1024), (0, 1531), (1024, 1024), (5000, 70), (3, 40), (0, 1), (127, 129), (9000, 33)]
    q, kv, chunks = prefill_case("no_quant", dtype, heads, spans, "cuda", mapped=heads[1] == 2)
    for _ in range(3):
        out = torch.full(q.shape, 7.0, dtype=dtype, device="cuda")
        launch(q, kv, chunks, 0.1, None, out, hopper=True)
        assert (out[:2] == 7).all()
        for span in chunks:
            rows = slice(span.first, span.first + span.query_len)
            stored = kv.payload[span.base_row : span.base_row + span.start + span.query_len].float()
            expected = attention(q[rows].float(), stored[:, 0], stored[:, 1], True, 0.1, span.start).out
            assert_close(out[rows], expected, dtype)
