"""`RelocatingArena`: KV memory for any device; a slot's granules lie next to each other in one tensor a layer.

What virtual memory does with mappings this does with copies on the device: a slot that outgrows its place moves.
"""

from typing import ClassVar

import torch

from bladellm_runtime.kv.arena import KvArena
from bladellm_runtime.kv.extents import ExtentMap, Move
from bladellm_runtime.kv.spec import KvSpec

SCRATCH_BYTES = 16 << 20


class RelocatingArena(KvArena):
    """One tensor a layer, `[num_granules * granule_tokens, 2, kv_heads, head_dim]`, cut into extents.

    Copies are ordered with the work of the current stream and never wait for it; after `map`, `base_row` of any slot
    may have changed. `relocated_granules` counts what had to be copied. Fresh memory is zero.
    """

    relocates: ClassVar[bool] = True

    def __init__(self, spec: KvSpec, kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(spec, kv_heads, head_dim, dtype, device)
        rows = spec.num_granules * spec.granule_tokens
        num_layers = sum(len(group.layers) for group in spec.groups)
        shape = (rows, 2, kv_heads, head_dim)
        self._layers = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(num_layers)]
        scratch_rows = min(rows, max(1, SCRATCH_BYTES // (2 * kv_heads * head_dim * dtype.itemsize)))
        self._scratch = torch.empty((scratch_rows, 2, kv_heads, head_dim), dtype=dtype, device=device)
        self._extents = ExtentMap(spec.num_granules)
        self._closed = False
        self.relocated_granules = 0

    def map(self, slot: int, granules: int) -> None:
        self._check(slot, granules)
        for move in self._extents.grow(slot, granules):
            self._move(move)
            self.relocated_granules += move.count

    def unmap(self, slot: int, granules: int) -> None:
        self._check(slot, granules)
        self._extents.shrink(slot, granules)

    def alias(self, source: int, target: int, granules: int) -> None:
        self._check(source, granules)
        self._check(target, granules)
        if self.mapped(source) < granules or self.mapped(target):
            raise ValueError(f"slot {source} cannot lend {granules} granules to slot {target}")
        if granules:
            self.map(target, granules)
            self._move(Move(self._extents.start(source), self._extents.start(target), granules))

    def base_row(self, slot: int) -> int:
        return self._extents.start(slot) * self.spec.granule_tokens

    def layer_kv(self, layer: int) -> torch.Tensor:
        return self._layers[layer]

    def mapped(self, slot: int) -> int:
        return self._extents.length(slot)

    def close(self) -> None:
        self._closed = True
        self._layers.clear()
        self._scratch = torch.empty(0)

    def _check(self, slot: int, granules: int) -> None:
        if self._closed:
            raise ValueError("the KV arena is closed")
        if not 0 <= slot < self.spec.num_slots or not 0 <= granules * self.spec.granule_tokens <= self.spec.max_tokens:
            raise ValueError(f"slot {slot} with {granules} granules is outside the KV arena")

    def _move(self, move: Move) -> None:
        tokens = self.spec.granule_tokens
        for rows in self._layers:
            copy_rows(rows, move.source * tokens, move.target * tokens, move.count * tokens, self._scratch)


def copy_rows(rows: torch.Tensor, source: int, target: int, count: int, scratch: torch.Tensor) -> None:
    """Copy `count` rows of a tensor within it, the two stretches possibly overlapping.

    Goes in blocks from the end that is overwritten first: blocks as long as the distance, which cannot overlap
    themselves, or through `scratch`, same shape a row, where it holds more than that.
    """
    distance = abs(target - source)
    if distance == 0:
        return
    direct = distance >= min(count, len(scratch))
    block = min(count, distance if direct else len(scratch))
    firsts = range(0, count, block)
    for first in firsts if target < source else reversed(firsts):
        size = min(block, count - first)
        part = rows[source + first : source + first + size]
        if not direct:
            part = scratch[:size].copy_(part)
        rows[target + first : target + first + size].copy_(part)
