"""How `ragged_prefill_triton` cuts chunks into work: tiles of queries, and parts of keys where tiles are few."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import torch

ITEM_FIELDS = 9
MERGE_FIELDS = 5

# A chunk whose tiles are fewer than this, counted over KV heads, has its keys divided: about the multiprocessors of a
# large GPU. A part has PART_KEYS keys at least, or its merging would cost more than it gains.
PROGRAMS = 128
PART_KEYS = 1024


class Span(NamedTuple):
    """A chunk's place, hashable; the fields are those of `PrefillChunk`."""

    first: int
    query_len: int
    start: int
    base_row: int
    slot: int


@dataclass(frozen=True, slots=True)
class TileShape:
    """Rows (queries × heads of a group) and keys of a tile, and how the kernel is compiled."""

    rows: int
    keys: int
    warps: int
    stages: int


def tile_shape(head_dim: int, dtype: torch.dtype, quantized: bool, rows: int) -> TileShape:
    """The default tile for chunks of up to `rows` rows.

    Half precision: 128 rows, multiplied by wgmma in two groups of four warps (64 rows each), or 64 where there are no
    more. Keys and stages are the most that the registers hold without spilling and that fit the shared memory (227 KiB)
    of a Hopper multiprocessor. Quantized tiles pass through registers. float32 goes without tensor cores, and its
    operands lie in registers as a whole.
    """
    if dtype == torch.float32:
        return TileShape(16, 16, 4, 2) if head_dim > 128 else TileShape(32, 16, 8, 2)
    if head_dim > 128:
        return TileShape(128, 32, 8, 2)
    if rows <= 64:
        return TileShape(64, 64, 4, 2)
    if quantized:
        return TileShape(128, 64, 8, 2)
    return TileShape(128, 64 if head_dim > 64 else 128, 8, 3)


@dataclass(frozen=True, slots=True)
class PrefillTiles:
    """Work on the device. items: int64 [I, ITEM_FIELDS]; merges: int64 [M, MERGE_FIELDS]; parts: items to merge."""

    items: torch.Tensor
    merges: torch.Tensor
    parts: int


def list_tiles(
    spans: Sequence[Span], group: int, kv_heads: int, window: int | None, rows: int
) -> tuple[list[list[int]], list[list[int]]]:
    """The items of a launch, most keys first, and the merges of those that see a part of their keys.

    An item: first row, first token, query_len, start, base_row, slot, first key, end of keys, part (-1: the only one).
    A merge: first row, first token, query_len, first part, parts. How a chunk is cut depends on that chunk alone, so
    its result does not change with its neighbours.
    """
    items: list[list[int]] = []
    merges: list[list[int]] = []
    part = 0
    for span in spans:
        tiles = -(-span.query_len * group // rows)
        for tile in range(tiles):
            first_row = tile * rows
            lowest = span.start + first_row // group
            highest = min(span.start + span.query_len - 1, span.start + (first_row + rows - 1) // group)
            key_first = 0 if window is None else max(0, lowest - window + 1)
            bounds = _divide(key_first, highest + 1, tiles * kv_heads)
            head = [first_row, span.first, span.query_len]
            divided = len(bounds) > 2
            if divided:
                merges.append([*head, part, len(bounds) - 1])
            for begin, end in pairwise(bounds):
                items.append([*head, span.start, span.base_row, span.slot, begin, end, part if divided else -1])
                part += divided
    items.sort(key=lambda item: item[6] - item[7])
    return items, merges


def _divide(first: int, end: int, programs: int) -> list[int]:
    """Bounds of even parts of [first, end), one part unless `programs` are few and the keys many."""
    parts = key_parts(end - first, programs)
    return [first + (end - first) * index // parts for index in range(parts + 1)]


def key_parts(keys: int, programs: int) -> int:
    """How many parts `keys` are divided into where a chunk has `programs` tiles, counted over KV heads."""
    return max(1, min(PROGRAMS // programs, keys // PART_KEYS))


@lru_cache(maxsize=16)
def tiles_on_device(
    spans: tuple[Span, ...],
    group: int,
    kv_heads: int,
    window: int | None,
    rows: int,
    device: torch.device,
    stream: int,
) -> PrefillTiles:
    """`list_tiles` on a device. Kept, since all layers of a step ask for the same; `stream` is where it is used."""
    items, merges = list_tiles(spans, group, kv_heads, window, rows)
    # Merges begin at a multiple of 16 bytes, or Triton would compile their kernel once more.
    spare = [[0]] if len(items) % 2 else []
    flat = [field for line in (*items, *spare, *merges) for field in line]
    pinned = torch.tensor(flat, dtype=torch.int64, pin_memory=device.type == "cuda")
    uploaded = pinned.to(device, non_blocking=True)
    last = len(items) * ITEM_FIELDS
    return PrefillTiles(
        uploaded[:last].view(len(items), ITEM_FIELDS),
        uploaded[last + len(spare) :].view(len(merges), MERGE_FIELDS),
        sum(item[8] >= 0 for item in items),
    )
