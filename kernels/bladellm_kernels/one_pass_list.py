"""Which programs of `one_pass_prefill` attend to which chunks of a step, as a list for the device, and the cost."""

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from bladellm_kernels.prefill_costs import MULTIPROCESSORS, Heads
from bladellm_kernels.prefill_tiles import Span

ENTRY_FIELDS = 6
"""First token, queries, position of the first, row of position 0; the program's place in the chunk, its programs."""
TILE_ROWS, BLOCK_KEYS = 128, 128
"""Queries × heads of a program's tile, and the keys that it takes at once."""
CALL, BLOCK, TILE = 8.0, 1.55, 0.5
"""µs of a launch and of a block, and blocks that a tile takes besides, measured on an H200 (bfloat16, 32 query and 8 KV
heads): chunks of 64 (10), 512 (15), 1000 (24), 2048 (62), 8191 (767), 64 behind 8192 (96), 300 behind 777 (22), 608
behind 1500 (47), 2048 behind 2048 (157) and behind 32768 (1,573)."""


def heads_of_a_tile(group: int) -> int:
    """Query heads of a KV head that a tile packs: all, where they are a power of two and as few as half its rows."""
    return min(group & -group, TILE_ROWS // 2)


def list_programs(spans: Sequence[Span], heads: Heads, programs: int) -> NDArray[np.int64]:
    """An entry for each of `programs` programs or fewer, [n, ENTRY_FIELDS]; as many as chunks where those are more."""
    parts = [np.empty((0, ENTRY_FIELDS), np.int64)]
    for span, count in share_programs(spans, heads, programs):
        part = np.empty((count, ENTRY_FIELDS), np.int64)
        part[:] = span.first, span.query_len, span.start, span.base_row, 0, count
        part[:, 4] = np.arange(count)
        parts.append(part)
    return np.concatenate(parts)


def share_programs(spans: Sequence[Span], heads: Heads, programs: int) -> list[tuple[Span, int]]:
    """How many programs each chunk has, by the blocks in it, longest chunks first: all end at about the same time."""
    tiles = {span: _tiles(span, heads) for span in spans}
    blocks = {span: _blocks(span, heads) for span in spans}
    order = sorted(spans, key=lambda span: -blocks[span])
    left, rest = max(programs, len(spans)), sum(blocks.values())
    shares: list[tuple[Span, int]] = []
    for behind, span in zip(range(len(order) - 1, -1, -1), order, strict=True):
        share = round(left * blocks[span] / rest) if rest else 1
        count = max(1, min(share, tiles[span], left - behind))
        shares.append((span, count))
        left, rest = left - count, rest - blocks[span]
    return shares


def one_pass_cost(heads: Heads, spans: Sequence[Span], programs: int = MULTIPROCESSORS) -> float:
    """µs of a launch for some chunks; nothing for none."""
    if not spans:
        return 0.0
    longest = max(_longest(span, heads, count) for span, count in share_programs(spans, heads, programs))
    waves = -(-len(spans) // programs)
    return CALL + BLOCK * longest * waves


def _tiles(span: Span, heads: Heads) -> int:
    pack = heads_of_a_tile(heads.query // heads.kv)
    return -(-span.query_len * pack // TILE_ROWS) * (heads.query // pack)


def _blocks(span: Span, heads: Heads) -> float:
    """Of all tiles of a chunk, about."""
    return _tiles(span, heads) * ((span.start + span.query_len / 2) / BLOCK_KEYS + 0.5 + TILE)


def _longest(span: Span, heads: Heads, programs: int) -> float:
    """Blocks of the program of a chunk that has most."""
    return float(_loads(span.query_len, span.start, heads.query, heads.kv, programs).max())


@lru_cache(maxsize=64)
def _loads(query_len: int, start: int, query_heads: int, kv_heads: int, programs: int) -> NDArray[np.float64]:
    """Blocks of each program, [programs]: tiles in order, the last tokens first, dealt out forth and back."""
    pack = heads_of_a_tile(query_heads // kv_heads)
    tokens, wide = TILE_ROWS // pack, query_heads // pack
    rows = -(-query_len // tokens)
    turns = -(-rows * wide // programs)
    tile = np.arange(turns * programs)
    end = start + np.minimum((rows - tile // wide) * tokens, query_len)
    blocks = np.where(tile < rows * wide, -(-end // BLOCK_KEYS) + TILE, 0.0).reshape(turns, programs)
    blocks[1::2] = blocks[1::2, ::-1]
    return np.asarray(blocks.sum(0))
