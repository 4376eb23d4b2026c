"""Decode attention that reads shared beginnings once, against the reference of decode attention."""

import random

import pytest
import torch
from bladellm_kernels import decode_work
from bladellm_kernels.cascade_decode_attention import CascadeWorkspace, SharedPrefixes, cascade_decode_attention
from bladellm_kernels.prefix_groups import PrefixGroup
from bladellm_kernels.ragged_decode_attention import ragged_decode_attention_reference

from tests.kernels.conditions import DEVICES, assert_close
from tests.kernels.decode_support import decode_case, run_interpreted

needs_gpu = pytest.mark.skipif("cuda" not in DEVICES, reason="needs a CUDA device")


def share(case, groups, poisoned=True):
    """Make what groups share the same; then, if asked for, poison it wherever it is not the first one's memory. Returns
    the reference's outputs."""
    granule_tokens, table, payload = case.kv.granule_tokens, case.kv.table, case.kv.payload
    slots, bases = case.slots.tolist(), case.base_rows.tolist()
    for group in groups:
        leader, *others = group.rows
        tokens = group.granules * granule_tokens
        for row in others:
            if table is not None:
                table[slots[row], : group.granules] = table[slots[leader], : group.granules]
            if not case.kv.paged:
                payload[bases[row] : bases[row] + tokens] = payload[bases[leader] : bases[leader] + tokens]
    expected = ragged_decode_attention_reference(*case.memory, case.scale)
    for group in groups if poisoned and not case.kv.paged else []:
        for row in group.rows[1:]:
            # Blocks of 128 tokens are shared.
            tokens = group.granules * granule_tokens // 128 * 128
            payload[bases[row] : bases[row] + tokens] = 119 if case.kv.format.quantized else torch.nan
    return expected


def cascade(case, groups, prefixes=None, workspace=None):
    heads, head_dim = case.q.shape[1:]
    sizes = (heads, case.kv.kv_heads, head_dim, case.kv.format, case.q.dtype)
    workspace = workspace or CascadeWorkspace(case.q.device, len(case.kv_lens), *sizes)
    for each in (workspace.own, workspace.shared):
        each.partial.fill_(torch.nan)
        each.lse.fill_(torch.nan)
    prefixes = prefixes or SharedPrefixes(case.q.device, len(case.kv_lens), workspace.members)
    prefixes.set(groups, case.kv.granule_tokens)
    work = workspace.plan(prefixes, case.base_rows, case.slots, case.kv_lens)
    out = torch.full_like(case.q, torch.nan)
    return cascade_decode_attention(*case.memory, case.scale, work, out)


def check_cascade(format_name, dtype, heads, lens, groups, device="cpu", **options):
    case = decode_case(format_name, dtype, heads, lens, device, **options)
    expected = share(case, groups)
    assert_close(cascade(case, groups), expected, dtype)


def interpret_cascade():
    processors = random.choice([1, 2, 3])
    decode_work.multiprocessors = lambda device: processors
    half = torch.float16
    pair, trio = PrefixGroup((1, 4), 3), PrefixGroup((0, 2, 3), 2)
    lens = [300, 420, 257, 266, 385, 1, 0]
    check_cascade("no_quant", half, (4, 2, 16), lens, [pair, trio], granule_tokens=128)
    check_cascade("int8", half, (16, 1, 16), lens, [trio], granule_tokens=128)
    check_cascade("int4_affine", half, (2, 1, 32), lens[:5], [PrefixGroup((1, 4), 5)], granule_tokens=64, paged=True)
    check_cascade("no_quant", torch.float32, (4, 1, 8), [1, 2], [], granule_tokens=128)
    # Beginnings too short for a block are not shared.
    check_cascade("no_quant", half, (2, 1, 16), [50, 60], [PrefixGroup((0, 1), 2)], granule_tokens=16)


def test_interpreted():
    pytest.importorskip("triton")
    run_interpreted("tests.kernels.test_cascade_decode", "interpret_cascade")


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("format_name", ["no_quant", "int8", "int4", "fp8_e4m3"])
@pytest.mark.parametrize("heads", [(32, 8, 128), (5, 5, 64), (28, 4, 128)], ids=str)
def test_on_the_gpu(heads, format_name, paged):
    lens = [2048 + random.randint(1, 900) for _ in range(20)]
    groups = [PrefixGroup(tuple(range(13)), 8), PrefixGroup((14, 17, 19), 7)]
    check_cascade(format_name, torch.bfloat16, heads, lens, groups, "cuda", granule_tokens=256, paged=paged)


@pytest.mark.gpu
@needs_gpu
def test_a_captured_graph_holds_for_other_groups():
    case = decode_case("no_quant", torch.bfloat16, (32, 8, 128), [900, 870, 3000, 1, 1300, 2000], "cuda", 128)
    expected = share(case, [PrefixGroup((0, 1, 2, 4, 5), 6)], poisoned=False)
    workspace = CascadeWorkspace(case.q.device, 6, 32, 8, 128)
    prefixes = SharedPrefixes(case.q.device, 6, workspace.members)
    out = torch.empty_like(case.q)

    def step():
        work = workspace.plan(prefixes, case.base_rows, case.slots, case.kv_lens)
        cascade_decode_attention(*case.memory, case.scale, work, out)
        cascade_decode_attention(*case.memory, case.scale, work, out)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for rows, granules in (((), 0), ((0, 4), 6), ((2, 4, 5), 5), ((0, 1, 2, 4, 5), 6), ((), 0)):
        prefixes.set([PrefixGroup(rows, granules)] if rows else [], 128)
        out.fill_(torch.nan)
        graph.replay()
        assert_close(out, expected, torch.bfloat16)


def test_groups_become_tiles():
    prefixes = SharedPrefixes(torch.device("cpu"), 5, 2)
    prefixes.set([PrefixGroup((0, 2, 3), 2)], 128)
    assert prefixes.lens.tolist() == [256, 256]
    assert prefixes.leaders.tolist() == [0, 0]
    assert prefixes.rows.tolist() == [[0, 2], [3, -1]]
    assert prefixes.tokens.tolist() == [256, 0, 256, 256, 0]
    assert prefixes.places.tolist() == [0, 0, 1, 2, 0]
    prefixes.set([], 128)
    assert not prefixes.lens.any()
    assert (prefixes.rows == -1).all()
