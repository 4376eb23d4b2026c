"""Decode attention where sequences share their beginnings: what a group shares is read once for several of its rows.

Sequences whose first granules are the same memory (hits of a prompt cache) form groups (`prefix_groups.py`), and groups
*tiles* of as many sequences as a tile of query rows holds. One kernel attends from the rows of each tile to what they
share, another from each sequence to the rest, and the partial states are merged. Sizes are fixed by the batch, so a
captured CUDA graph stays valid for other groups. Source: the cascade of FlashInfer (https://arxiv.org/abs/2501.01005).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from bladellm_kernels.decode_work import DecodeWork, DecodeWorkspace, row_tile
from bladellm_kernels.kv_format import NO_QUANT, KvFormat
from bladellm_kernels.kv_layer import KvLayer
from bladellm_kernels.prefix_groups import PrefixGroup

_ROWS = 16
"""Query rows of a tile: with 32, states do not fit in registers."""
_ALIGNED = 128
"""Tokens: shared beginnings end where a block of any schedule does."""


class SharedPrefixes:
    """Which of `batch` sequences share beginnings, on the device; none at first.

    members: sequences of a tile. lens: int64 [tiles], tokens that a tile's sequences share. leaders: int64 [tiles], the
    one whose memory is read. rows: int64 [tiles, members], its sequences, -1 for none. tokens: int64 [B], how many a
    sequence shares. places: int64 [B], tile · members + member.
    """

    def __init__(self, device: torch.device, batch: int, members: int) -> None:
        self.members = members
        self.tiles = max(batch // 2, 1)
        self._sizes = [self.tiles, self.tiles, self.tiles * members, batch, batch]
        self._fields = torch.empty(sum(self._sizes), dtype=torch.int64, device=device)
        self.lens, self.leaders, rows, self.tokens, self.places = self._fields.split(self._sizes)
        self.rows = rows.view(self.tiles, members)
        self.set([], 1)

    def set(self, groups: Sequence[PrefixGroup], granule_tokens: int) -> None:
        """Take over the groups of a step, by one copy."""
        lens, leaders, rows, tokens, places = ([0] * size for size in self._sizes)
        rows = [-1] * len(rows)
        tile = 0
        for group in groups:
            shared = group.granules * granule_tokens // _ALIGNED * _ALIGNED
            for first in range(0, len(group.rows) if shared else 0, self.members):
                part = group.rows[first : first + self.members]
                lens[tile], leaders[tile] = shared, group.rows[0]
                for member, row in enumerate(part):
                    place = tile * self.members + member
                    rows[place], tokens[row], places[row] = row, shared, place
                tile += 1
        self._fields.copy_(torch.tensor([*lens, *leaders, *rows, *tokens, *places]), non_blocking=True)


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
    ) -> None:
        self.members = tile_members(heads, kv_heads, head_dim, dtype)
        sizes = (heads, kv_heads, head_dim)
        self.own = DecodeWorkspace(device, max_batch, *sizes, 1, format, dtype)
        self.shared = DecodeWorkspace(device, max(max_batch // 2, 1), *sizes, self.members, format, dtype)

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
    work: CascadeWork,
    out: torch.Tensor,
) -> torch.Tensor:
    """`ragged_decode_attention` on CUDA with one query a sequence and no window, `work` planned for the step.

    Reads what sequences share from the memory of one of them.
    """
    from bladellm_kernels.merge_attention_triton import merge_segments
    from bladellm_kernels.ragged_decode_triton import launch_segments

    launch_segments(q, kv, work.base_rows, work.slots, work.lens, scale, work.shared, out)
    launch_segments(q, kv, base_rows, slots, kv_lens, scale, work.own, out)
    merge_segments(work.own, out, work.shared, work.places)
    return out
