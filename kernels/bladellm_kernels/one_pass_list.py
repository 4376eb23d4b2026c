"""Which programs of `one_pass_prefill` attend to which chunks of a step, as a list for the device, and the cost."""

from collections.abc import Sequence
from functools import lru_cache
from math import sqrt
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from bladellm_kernels.prefill_costs import FITTED_DIM, MULTIPROCESSORS, Heads, timed_dim
from bladellm_kernels.prefill_tiles import Span

ENTRY_FIELDS = 6
"""First token, queries, position of the first, row of position 0; the program's place in the chunk, its programs."""
TILE_ROWS, BLOCK_KEYS = 128, 128
"""Queries × heads of a program's tile, and the keys that it takes at once."""
CALL, BLOCK, TILE = 8.0, 1.55, 0.5
"""µs of a launch and of a block, and blocks that a tile takes besides, measured on an H200 (bfloat16, 32 query and 8 KV
heads): chunks of 64 (10), 512 (15), 1000 (24), 2048 (62), 8191 (767), 64 behind 8192 (96), 300 behind 777 (22), 608
behind 1500 (47), 2048 behind 2048 (157) and behind 32768 (1,573)."""
FEW_CHUNKS = 3
"""Of more it is not looked at each program: that takes the host longer than the choice can gain."""
LEAST_BESIDE = 64
"""Programs, one a multiprocessor, that attend to chunks beside decode attention: it reads at full speed with the other
68, and with some 20 fewer."""
DECODE_BYTES = 3e6
"""Of K and V that decode attention reads in a µs, about: 2.5 MB on an H100, 3.6 on an H200."""


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


def programs_beside(spans: Sequence[Span], heads: Heads, programs: int, decode_tokens: int) -> int:
    """How many of `programs`, one a multiprocessor, should attend to the chunks where decode attention of so many KV
    tokens starts beside them.

    With P of N the chunks take t · N/P, and P/N of decode attention's own programs find room only behind them: the sum
    t · N/P + D · P/N is least at P = N · sqrt(t / D). On an H100 it is within 4 µs of what is measured, or less than D
    (`kernels/benchmarks/results/beside_attention_h100.md`).
    """
    chunks, decode = one_pass_cost(heads, spans, programs), decode_tokens * heads.kv * heads.dim * 4 / DECODE_BYTES
    share = sqrt(chunks / decode) if chunks < decode else 1.0
    return min(programs, max(LEAST_BESIDE, round(programs * share)))


def share_programs(spans: Sequence[Span], heads: Heads, programs: int) -> list[tuple[Span, int]]:
    """How many programs each chunk has, by the blocks in it, longest chunks first: all end at about the same time."""
    order = sorted(
        ((_work(span.query_len, span.start, heads), span) for span in spans), key=lambda pair: -pair[0].blocks
    )
    left, rest = max(programs, len(spans)), sum(work.blocks for work, _ in order)
    shares: list[tuple[Span, int]] = []
    for behind, (work, span) in zip(range(len(order) - 1, -1, -1), order, strict=True):
        count = max(1, min(round(left * work.blocks / rest), work.tiles, left - behind))
        shares.append((span, count))
        left, rest = left - count, rest - work.blocks
    return shares


def one_pass_cost(heads: Heads, spans: Sequence[Span], programs: int = MULTIPROCESSORS) -> float:
    """µs of a launch for some chunks, of many of them about; nothing for none."""
    if not spans:
        return 0.0
    if len(spans) <= FEW_CHUNKS:
        return CALL + block_cost(heads.dim) * max(
            _longest(span, heads, count) for span, count in share_programs(spans, heads, programs)
        )
    works = [_work(span.query_len, span.start, heads) for span in spans]
    return CALL + block_cost(heads.dim) * max(
        sum(work.blocks for work in works) / programs, max(work.longest for work in works)
    )


def block_cost(dim: int) -> float:
    """Of a block of heads of `dim` dimensions."""
    return BLOCK * timed_dim(dim) / FITTED_DIM


class _Work(NamedTuple):
    """Of a chunk: its tiles, the blocks of them all, about, and those of its last tile, which sees most."""

    tiles: int
    blocks: float
    longest: float


@lru_cache(maxsize=4096)
def _work(query_len: int, start: int, heads: Heads) -> _Work:
    pack = heads_of_a_tile(heads.query // heads.kv)
    tiles = -(-query_len * pack // TILE_ROWS) * (heads.query // pack)
    longest = -(-(start + query_len) // BLOCK_KEYS) + TILE
    return _Work(tiles, tiles * ((start + query_len / 2) / BLOCK_KEYS + 0.5 + TILE), longest)


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
