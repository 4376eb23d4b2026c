"""Which adapter each token of a batch has, and how many tokens are shared out to tiles of one adapter each."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

TILE_TOKENS = 32
"""Tokens of a tile at most."""
TILE_PARTS = 8
"""Parts at most that the inputs of tokens in tiles are divided into: what A leaves of them is there so many times."""
FIELDS = 3
"""Numbers of a tile: its adapter's slot, its first place in the order, its tokens."""

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class AdapterTiles:
    """Tokens of one adapter side by side, in tiles; both on the device of the tokens.

    order: int64 [T], tokens sorted by adapter; tiles: int64 [tiles, 3], (slot, first place in `order`, tokens), with 0
    tokens in padding.
    """

    order: torch.Tensor
    tiles: torch.Tensor


@dataclass(frozen=True, slots=True)
class TokenAdapters:
    """slots: int64 [T], each token's adapter, -1 for none. tiles: the same in tiles, None for few tokens, which are
    computed one by one. ready: slots were written before the step's first kernel, so that a kernel which starts early
    may read them at once. beside: the stream that A is multiplied on while the layer itself is computed, None for the
    layer's own."""

    slots: torch.Tensor
    tiles: AdapterTiles | None = None
    ready: bool = True
    beside: torch.cuda.Stream | None = None

    def select(self, tokens: torch.Tensor) -> "TokenAdapters":
        """Those of some tokens, int64 [R]."""
        return TokenAdapters(self.slots.index_select(0, tokens), None, ready=False)


def most_tiles(tokens: int, max_loras: int) -> int:
    """Tiles that any mix of so many adapters can need for so many tokens."""
    return min(tokens, -(-tokens // TILE_TOKENS) + max_loras)


def fill_tiles(slots: Ints, order: Ints, tiles: Ints) -> None:
    """Write the order and the tiles of tokens with these slots, int64 [T], on the CPU.

    order: [T] or longer, its rest 0; tiles: [most_tiles, 3], its rest 0. Tokens without adapter come first, in no tile.
    """
    order[len(slots) :] = 0
    tiles[:] = 0
    order[: len(slots)] = np.argsort(slots, kind="stable")
    used, counts = np.unique(slots, return_counts=True)
    first = at = 0
    for slot, count in zip(used.tolist(), counts.tolist(), strict=True):
        if slot >= 0:
            for begin in range(0, count, TILE_TOKENS):
                tiles[at] = slot, first + begin, min(TILE_TOKENS, count - begin)
                at += 1
        first += count


def token_adapters(slots: Sequence[int], max_loras: int, device: torch.device, tiled: bool) -> TokenAdapters:
    """Of tokens with these slots, -1 for none; `tiled`: in tiles too."""
    numbers = np.array(slots, dtype=np.int64)
    tiles = None
    if tiled:
        order, listed = np.empty_like(numbers), np.empty((most_tiles(len(numbers), max_loras), FIELDS), dtype=np.int64)
        fill_tiles(numbers, order, listed)
        tiles = AdapterTiles(torch.from_numpy(order).to(device), torch.from_numpy(listed).to(device))
    return TokenAdapters(torch.from_numpy(numbers).to(device), tiles)
