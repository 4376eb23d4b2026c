"""Decode attention that reads shared beginnings once, against the reference of decode attention."""

import random

import pytest
import torch
from bladellm_kernels import decode_work
from bladellm_kernels.cascade_decode_attention import (
    CascadeWorkspace,
    SharedPrefixes,
    cascade_decode_attention,
    tile_members,
)
from bladellm_kernels.prefix_groups import PrefixGroup
from bladellm_kernels.ragged_decode_attention import ragged_decode_attention_reference

from tests.kernels.conditions import assert_close
from tests.kernels.decode_support import decode_case
from tests.kernels.interpreted import run_interpreted


def share(case, groups, members=1):
    """Make what groups share the same; then, where `members` rows share a read, poison it in all of them but a group's
    first, and but the one that may be left alone. Returns the reference's outputs."""
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
    for group in groups if members > 1 and not case.kv.paged else []:
        for index, row in enumerate(group.rows):
            if index == 0 or (index % members == 0 and index + 1 == len(group.rows)):
                continue
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
    return cascade_decode_attention(*case.memory, case.scale, prefixes, work, out)


def by_parts(case, groups):
    """As on a CPU."""
    prefixes = SharedPrefixes(case.q.device, len(case.kv_lens), members_of(case))
    prefixes.set(groups, case.kv.granule_tokens)
    return cascade_decode_attention(*case.memory, case.scale, prefixes, None, torch.full_like(case.q, torch.nan))


def members_of(case):
    heads, head_dim = case.q.shape[1:]
    return tile_members(heads, case.kv.kv_heads, head_dim, case.q.dtype)


def check_cascade(format_name, dtype, heads, lens, groups, device="cpu", way=cascade, **options):
    case = decode_case(format_name, dtype, heads, lens, device, **options)
    expected = share(case, groups, members_of(case))
    assert_close(way(case, groups), expected, dtype)


HALF, SINGLE = torch.float16, torch.float32
PAIR, TRIO = PrefixGroup((1, 4), 3), PrefixGroup((0, 2, 3), 2)
LENS = [300, 420, 257, 266, 385, 1, 0]
WHOLE = {"granule_tokens": 128}
LONG = [
    (("no_quant", HALF, (4, 2, 16), LENS, [PAIR, TRIO]), WHOLE),
    (("int8", HALF, (16, 1, 16), LENS, [TRIO]), WHOLE),
    (("int8", HALF, (8, 1, 16), LENS, [TRIO]), WHOLE),
    (("int4_affine", HALF, (2, 1, 32), LENS[:5], [PrefixGroup((1, 4), 5)]), {"granule_tokens": 64, "paged": True}),
]
SHORT = [
    (("no_quant", SINGLE, (4, 1, 8), [1, 2], []), WHOLE),
    (("no_quant", SINGLE, (6, 2, 8), [300, 270], [PrefixGroup((1, 0), 2)]), WHOLE),
    # Beginnings too short for a block are not shared.
    (("no_quant", HALF, (2, 1, 16), [50, 60], [PrefixGroup((0, 1), 2)]), {"granule_tokens": 16}),
]


def interpret_some():
    interpret_all([*random.sample(LONG, 1), *SHORT])


def interpret_all(cases=(*LONG, *SHORT)):
    processors = random.choice([1, 2, 3])
    decode_work.multiprocessors = lambda device: processors
    for arguments, options in cases:
        check_cascade(*arguments, **options)


def test_on_a_cpu():
    for arguments, options in (*LONG, *SHORT):
        check_cascade(*arguments, way=by_parts, **options)


@pytest.mark.parametrize("cases", ["interpret_some", pytest.param("interpret_all", marks=pytest.mark.slow)])
def test_interpreted(cases):
    pytest.importorskip("triton")
    run_interpreted("tests.kernels.test_cascade_decode", cases)


@pytest.mark.gpu
@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("format_name", ["no_quant", "int8", "int4", "fp8_e4m3"])
@pytest.mark.parametrize("heads", [(32, 8, 128), (5, 5, 64), (28, 4, 128)], ids=str)
def test_on_the_gpu(heads, format_name, paged):
    lens = [2048 + random.randint(1, 900) for _ in range(20)]
    groups = [PrefixGroup(tuple(range(13)), 8), PrefixGroup((14, 17, 19), 7)]
    check_cascade(format_name, torch.bfloat16, heads, lens, groups, "cuda", granule_tokens=256, paged=paged)


@pytest.mark.gpu
def test_a_captured_graph_holds_for_other_groups():
    case = decode_case("no_quant", torch.bfloat16, (32, 8, 128), [900, 870, 3000, 1, 1300, 2000], "cuda", 128)
    expected = share(case, [PrefixGroup((0, 1, 2, 4, 5), 6)])
    workspace = CascadeWorkspace(case.q.device, 6, 32, 8, 128)
    prefixes = SharedPrefixes(case.q.device, 6, workspace.members)
    out = torch.empty_like(case.q)

    def step():
        work = workspace.plan(prefixes, case.base_rows, case.slots, case.kv_lens)
        for _ in range(2):
            cascade_decode_attention(*case.memory, case.scale, prefixes, work, out)

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
    prefixes = SharedPrefixes(torch.device("cpu"), 9, 3)
    # Rows 4 and 6 share no whole block of 128 tokens; row 5 would be alone in its tile.
    prefixes.set([PrefixGroup((0, 2, 3, 7, 8), 4), PrefixGroup((4, 6), 1), PrefixGroup((1, 5), 3)], 100)
    assert prefixes.lens.tolist() == [384, 384, 256, 0]
    assert prefixes.leaders.tolist() == [0, 0, 1, 0]
    assert prefixes.rows.tolist() == [[0, 2, 3], [7, 8, -1], [1, 5, -1], [-1] * 3]
    assert prefixes.tokens.tolist() == [384, 256, 384, 384, 0, 256, 0, 384, 384]
    assert prefixes.places.tolist() == [0, 6, 1, 2, 0, 7, 0, 3, 4]
    prefixes.set([PrefixGroup((2, 5, 6, 8), 1)], 128)
    assert prefixes.rows.tolist() == [[2, 5, 6], *[[-1] * 3] * 3]
    assert prefixes.tokens.tolist() == [0, 0, 128, 0, 0, 128, 128, 0, 0]
    prefixes.set([], 128)
    assert not prefixes.lens.any()
    assert (prefixes.rows == -1).all()


def test_every_row_finds_its_place_in_a_tile():
    for _ in range(50):
        batch, members = random.randint(1, 30), random.randint(1, 5)
        cuts = sorted(random.sample(range(batch + 1), random.randint(0, batch)))
        order = random.sample(range(batch), batch)
        parts = [order[first:last] for first, last in zip([0, *cuts], [*cuts, batch], strict=True)]
        groups = [PrefixGroup(tuple(part), random.randint(1, 5)) for part in parts if len(part) > 1]
        prefixes = SharedPrefixes(torch.device("cpu"), batch, members)
        prefixes.set(groups, 100)
        shared = {row: group for group in groups for row in group.rows if prefixes.tokens[row]}
        for row, group in shared.items():
            tile, member = divmod(int(prefixes.places[row]), members)
            assert prefixes.rows[tile, member] == row
            assert prefixes.lens[tile] == prefixes.tokens[row] == group.granules * 100 // 128 * 128
            assert prefixes.leaders[tile] == group.rows[0]
        used = prefixes.rows[prefixes.lens > 0]
        assert sorted(used[used >= 0].tolist()) == sorted(shared)
        assert ((used >= 0).sum(1) > 1).all()
        for group in groups if members > 1 else []:
            alone = sum(row not in shared for row in group.rows)
            assert alone == (len(group.rows) % members == 1 if group.granules > 1 else len(group.rows))
