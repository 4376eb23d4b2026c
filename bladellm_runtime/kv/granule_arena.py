"""`GranuleArena`: what all arenas share. Keeps the table of granules, the scales, the layers, and moves contents."""

from abc import abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import numpy as np
import torch
from bladellm_kernels.kv_layer import KvLayer

from bladellm_runtime.kv.arena import Ints, KvArena, KvShape
from bladellm_runtime.kv.granule_moves import GranuleMover
from bladellm_runtime.kv.granule_table import GranuleTable
from bladellm_runtime.kv.operations import Copy, Hide, MemoryPlan, Rows, Show, SwapIn, SwapOut
from bladellm_runtime.kv.scale_planes import make_scales
from bladellm_runtime.kv.spec import KvSpec


class GranuleArena(KvArena):
    """Arenas say how memory comes to be shown (`_show`, `_hide`) and hand over their tensors once (`_present`)."""

    paged: ClassVar[bool] = False

    def __init__(self, spec: KvSpec, shape: KvShape, device: torch.device) -> None:
        super().__init__(spec, shape, device)
        _check(spec, shape)
        self._scales = make_scales(spec, shape, device)
        self._table = GranuleTable(spec, device if self.paged or self._scales is not None else None)
        self._layers: list[KvLayer] = []
        self._mover: GranuleMover | None = None
        self._failure: MemoryError | None = None

    def submit(self, plan: MemoryPlan, rows: Rows | None = None) -> None:
        self._open()
        for view in (*plan.views, *plan.ahead):
            self._view(view)
        self._table.upload()

    def wait(self) -> None:
        self._open()
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def move(self, moves: Sequence[Copy | SwapOut | SwapIn]) -> None:
        self._open().move(moves)

    def join_moves(self, stream: torch.cuda.Stream) -> bool:
        return self._open().join(stream)

    def base_row(self, slot: int) -> int:
        return slot * self.spec.max_tokens

    def base_rows(self, slots: Ints) -> Ints:
        return slots * self.spec.max_tokens

    def granule_rows(self, slots: Ints, positions: Ints) -> Ints:
        index, place = np.divmod(positions, self.spec.granule_tokens)
        return self._table.rows[slots, index] * np.int64(self.spec.granule_tokens) + place

    def granules(self, slot: int) -> Sequence[int]:
        return self._table.granules(slot)

    def layer(self, index: int) -> KvLayer:
        return self._layers[index]

    def close(self) -> None:
        if self._mover is not None:
            self._mover.close()
        self._mover = None
        self._layers.clear()

    @abstractmethod
    def _show(self, view: Show) -> None:
        """Carry out a checked `Show`, before it is entered in the table. Raises `MemoryError` or `OSError`, the slot
        then showing its first `position` granules at least."""

    @abstractmethod
    def _hide(self, slot: int, keep: int) -> None:
        """Make a slot show its first `keep` granules at most, whatever state a failed `_show` left the rest in; before
        it is entered in the table. `keep` is less than what a slot can show."""

    def _present(self, payloads: Sequence[torch.Tensor], parts: Sequence[torch.Tensor]) -> None:
        """payloads: each layer's, as in `KvLayer`. parts: all of the payload as [granules, granule_tokens, ...]."""
        scales = self._scales
        for index, payload in enumerate(payloads):
            planes = None if scales is None else scales.layer(index)
            tokens = self.spec.granule_tokens
            self._layers.append(
                KvLayer(payload, self.shape.format, tokens, self._table.device_rows, planes, self.paged)
            )
        by_granule = None if scales is None else scales.by_granule()
        self._mover = GranuleMover(parts, by_granule, self.spec.host_granules)

    def _open(self) -> GranuleMover:
        if self._mover is None:
            raise ValueError("the KV arena is closed")
        return self._mover

    def _view(self, view: Show | Hide) -> None:
        self._table.check(view)
        if isinstance(view, Hide):
            if view.keep < self._table.length(view.slot):
                self._hide(view.slot, view.keep)
                self._table.hide(view.slot, view.keep)
            return
        try:
            self._show(view)
        except (MemoryError, OSError) as error:
            self._fail(view.slot, view.position, error)
        else:
            self._table.show(view.slot, view.position, view.granules)

    def _fail(self, slot: int, position: int, error: Exception) -> None:
        """Leave a slot with what it shows before `position`, and have `wait` raise."""
        self._hide(slot, position)
        self._table.hide(slot, position)
        self._failure = MemoryError(f"KV memory of slot {slot} cannot be mapped: {error}")
        self._failure.__cause__ = error


def _check(spec: KvSpec, shape: KvShape) -> None:
    for group in spec.groups:
        if group.token_bytes != len(group.layers) * shape.payload_bytes:
            raise ValueError(
                f"layers {group.layers} take {shape.payload_bytes} bytes a token each, not {group.token_bytes}"
            )
    if spec.max_tokens % spec.granule_tokens:
        raise ValueError(f"{spec.max_tokens} tokens of a slot are not whole granules of {spec.granule_tokens}")
