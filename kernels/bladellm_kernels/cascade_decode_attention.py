"""Decode attention where sequences share their beginnings: what a group shares is read once for several of its rows.

Sequences whose first granules are the same memory (hits of a prompt cache) form groups (`prefix_groups.py`), and groups
*tiles* of as many sequences as a tile of query rows holds. One kernel attends from the rows of each tile to what they
share, another from each sequence to the rest, and the partial states are merged. Sizes are fixed by the batch, so a
captured CUDA graph stays valid for other groups. Source: the cascade of FlashInfer (https://arxiv.org/abs/2501.01005).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from bladellm_kernels.decode_call import DecodeCall
from bladellm_kernels.decode_schedule import row_tile
from bladellm_kernels.decode_work import DecodeWork, DecodeWorkspace
from bladellm_kernels.kv_format import NO_QUANT, KvFormat
from bladellm_kernels.kv_layer import KvLayer
from bladellm_kernels.kv_read import kv_read
from bladellm_kernels.merge_attention import merge_attention
from bladellm_kernels.prefix_groups import PrefixGroup, shared_tokens

_ROWS = 16
"""Query rows of a tile: with 32, states do not fit in registers."""


class SharedPrefixes:
    """Which of `batch` sequences share beginnings, on the device; none until `set`, or a copy of `packed` to `fields`.

    members: sequences of a tile. lens: int64 [tiles], tokens that a tile's sequences share. leaders: int64 [tiles], the
    one whose memory is read. rows: int64 [tiles, members], its sequences, -1 for none. tokens: int64 [B], how many a
    sequence shares. places: int64 [B], tile · members + member. All of them lie in `fields`, one behind the other.
    """

    def __init__(self, device: torch.device, batch: int, members: int, fields: torch.Tensor | None = None) -> None:
        """fields: int64 [`fields_length(batch, members)`] on the device, to be filled by the caller; new when None."""
        self.members = members
        self.tiles = _tiles(batch)
        self._sizes = [self.tiles, self.tiles, self.tiles * members, batch, batch]
        given = fields is not None
        self.fields = torch.empty(sum(self._sizes), dtype=torch.int64, device=device) if fields is None else fields
        self.lens, self.leaders, rows, self.tokens, self.places = self.fields.split(self._sizes)
        self.rows = rows.view(self.tiles, members)
        if not given:
            self.set([], 1)

    def set(self, groups: Sequence[PrefixGroup], granule_tokens: int) -> None:
        """Take over the groups of a step, by one copy."""
        packed = pack_groups(groups, granule_tokens, len(self.tokens), self.members)
        self.fields.copy_(torch.from_numpy(packed), non_blocking=True)


def fields_length(batch: int, members: int) -> int:
    """Numbers that `SharedPrefixes` has of so many sequences."""
    return _tiles(batch) * (2 + members) + 2 * batch


def pack_groups(groups: Sequence[PrefixGroup], granule_tokens: int, batch: int, members: int) -> NDArray[np.int64]:
    """The fields of `SharedPrefixes` for disjoint groups. Whoever would be alone in a tile reads for itself."""
    tiles = _tiles(batch)
    packed = np.zeros(fields_length(batch, members), dtype=np.int64)
    lens, leaders, rows, tokens, places = np.split(packed, np.cumsum([tiles, tiles, tiles * members, batch]))
    rows[:] = -1
    useful = [group for group in groups if members > 1 and shared_tokens(group.granules, granule_tokens)]
    if not useful:
        return packed
    shared = np.array([shared_tokens(group.granules, granule_tokens) for group in useful])
    sizes = np.array([len(group.rows) for group in useful])
    flat = np.array([row for group in useful for row in group.rows])
    group, starts = np.repeat(np.arange(len(useful)), sizes), np.cumsum(sizes) - sizes
    index = np.arange(len(flat)) - starts[group]
    counts = sizes // members + (sizes % members > 1)
    kept = index // members < counts[group]
    row, group, index = flat[kept], group[kept], index[kept]
    tile = (np.cumsum(counts) - counts)[group] + index // members
    place = tile * members + index % members
    lens[tile], leaders[tile] = shared[group], flat[starts[group]]
    rows[place], tokens[row], places[row] = row, shared[group], place
    return packed


def _tiles(batch: int) -> int:
    """Most tiles of a batch: none has less than two sequences."""
    return max(batch // 2, 1)


@dataclass(slots=True)
class CascadeWork:
    """The plan of a step: `own` of what each sequence reads for itself, `shared` of the tiles, and where these lie."""

    own: DecodeWork
    shared: DecodeWork
    lens: torch.Tensor
    base_rows: torch.Tensor
    slots: torch.Tensor
    places: torch.Tensor


class CascadeWorkspace:
    """Memory for partial states, as `DecodeWorkspace`, for batches of up to max_batch sequences of one query each."""

    def __init__(
        self,
        device: torch.device,
        max_batch: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        format: KvFormat = NO_QUANT,
        dtype: torch.dtype = torch.bfloat16,
        paged: bool = False,
    ) -> None:
        self.members = tile_members(heads, kv_heads, head_dim, dtype)
        sizes = (heads, kv_heads, head_dim)
        self.own = DecodeWorkspace(device, max_batch, *sizes, 1, format, dtype, paged=paged)
        self.shared = DecodeWorkspace(device, max(max_batch // 2, 1), *sizes, self.members, format, dtype, paged=paged)

    def plan(
        self, prefixes: SharedPrefixes, base_rows: torch.Tensor, slots: torch.Tensor, kv_lens: torch.Tensor
    ) -> CascadeWork:
        """No kv_len is below what its sequence shares. Queues small kernels and never waits."""
        own = self.own.plan(kv_lens, None, 1, "own", prefixes.tokens)
        shared = self.shared.plan(prefixes.lens, None, self.members, "shared", prefixes.rows)
        leaders = prefixes.leaders
        return CascadeWork(own, shared, prefixes.lens, base_rows[leaders], slots[leaders], prefixes.places)


def tile_members(heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
    """Sequences whose query rows of a KV head fill a tile."""
    group = heads // kv_heads
    return max(row_tile(_ROWS, head_dim, dtype) // group, 1)


def cascade_decode_attention(
    q: torch.Tensor,
    kv: KvLayer,
    base_rows: torch.Tensor,
    slots: torch.Tensor,
    kv_lens: torch.Tensor,
    scale: float,
    prefixes: SharedPrefixes,
    work: CascadeWork | None,
    out: torch.Tensor,
) -> torch.Tensor:
    """`ragged_decode_attention` with one query a sequence and no window. Reads what sequences share from the memory of
    one of them.

    work: planned with `prefixes` for the step on CUDA, None on a CPU. Returns `out`, like q.
    """
    if work is None:
        return _attend_parts(q, kv, base_rows, slots, kv_lens, scale, prefixes, out)
    from bladellm_kernels.merge_attention_triton import merge_segments
    from bladellm_kernels.ragged_decode_triton import launch_segments

    launch_segments(DecodeCall(q, kv, work.base_rows, work.slots, work.lens, scale, work.shared, out))
    launch_segments(DecodeCall(q, kv, base_rows, slots, kv_lens, scale, work.own, out))
    merge_segments(work.own, out, work.shared, work.places)
    return out


def _attend_parts(
    q: torch.Tensor,
    kv: KvLayer,
    base_rows: torch.Tensor,
    slots: torch.Tensor,
    kv_lens: torch.Tensor,
    scale: float,
    prefixes: SharedPrefixes,
    out: torch.Tensor,
) -> torch.Tensor:
    """The same on a CPU: each tile to what it shares, each sequence to the rest, and both merged in float32."""
    parts = [torch.zeros(q.shape, dtype=torch.float32) for _ in range(2)]
    logs = [torch.full(q.shape[:2], float("-inf")) for _ in range(2)]

    def attend(part: int, rows: list[int], reader: int, first: int, end: int) -> None:
        if end > first:
            k, v = kv_read(kv, bases[reader], places[reader], first, end, torch.float32).unbind(1)
            parts[part][rows], logs[part][rows] = _attend(q[rows].float(), k, v, scale)

    bases, places = base_rows.tolist(), slots.tolist()
    for length, leader, rows in zip(
        prefixes.lens.tolist(), prefixes.leaders.tolist(), prefixes.rows.tolist(), strict=True
    ):
        attend(0, [row for row in rows if row >= 0], leader, 0, length)
    for row, (first, end) in enumerate(zip(prefixes.tokens.tolist(), kv_lens.tolist(), strict=True)):
        attend(1, [row], row, first, end)
    return merge_attention(parts, logs, out)


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """q [N, Hq, D] to k, v [T, Hk, D] -> outputs like q, and logarithms of sums of exponentials [N, Hq]."""
    grouped = q.unflatten(1, (k.shape[1], -1))
    scores = torch.einsum("nhgd,thd->nhgt", grouped, k) * scale
    outputs = torch.einsum("nhgt,thd->nhgd", scores.softmax(-1), v)
    return outputs.flatten(1, 2), scores.logsumexp(-1).flatten(1, 2)
