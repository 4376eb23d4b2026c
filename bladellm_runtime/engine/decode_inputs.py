"""What a captured decode step reads: arrays that stay where they are, filled by one copy when rows change, and padded.

A captured step ends by advancing them to the next step of the same rows, which then needs no copy.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from bladellm_kernels.cascade_decode_attention import SharedPrefixes, fields_length, pack_groups
from bladellm_kernels.lora_tokens import TokenAdapters
from bladellm_kernels.prefix_groups import PrefixGroup
from numpy.typing import NDArray
from torch import Tensor

from bladellm_runtime.engine.host_ring import HostBuffer, HostRing
from bladellm_runtime.kv.arena import KvArena
from bladellm_runtime.layers.batch import ForwardBatch
from bladellm_runtime.scheduler.plan import StepPlan


class DecodeArrays(NamedTuple):
    """int64 [size] each, static device memory; a row is a sequence's newest token.

    positions: of the token. kv_lens: with the token itself; 0 in padding, which reads nothing. kv_rows, granule_rows:
    as in `ForwardBatch`, -1 in padding, which stores nothing. slots: where the row's token comes from and its successor
    goes; in padding, a slot nobody has. base_rows, table_slots: what decode attention calls base rows and slots.
    sampling_slots: slots, -1 in padding. advances: what the first three grow by from a step to the next, 0 in padding.
    adapters: the slots of LoRA adapters, -1 for none and in padding; undefined where no row has one. From `slots` on
    they are the same for all steps of the same rows.
    """

    positions: Tensor
    kv_lens: Tensor
    kv_rows: Tensor
    granule_rows: Tensor
    slots: Tensor
    base_rows: Tensor
    table_slots: Tensor
    sampling_slots: Tensor
    advances: Tensor
    adapters: Tensor


@dataclass(slots=True, eq=False)
class Filled:
    """What a host buffer is filled with. rows: int64 [fields, size], in the order of `DecodeArrays`. slots: of the rows
    that are no padding. offsets: int64 [3, rows], what the rows' positions are added to for the fields before
    `granule_rows`."""

    rows: NDArray[np.int64]
    slots: NDArray[np.int64]
    offsets: NDArray[np.int64]


class DecodeInputs:
    """The arrays of steps of up to `max_size` decode rows, and what these share. One stream writes and reads them."""

    def __init__(self, max_size: int, arena: KvArena, members: int = 0, in_flight: int = 2) -> None:
        """members: sequences that share one read, 0 where none do. in_flight: as in `HostRing`."""
        fields = len(DecodeArrays._fields)
        self.padding_slot = arena.spec.num_slots
        """Belongs to no sequence: per-slot arrays that padding reads or writes have one place more than slots."""
        self._arena = arena
        layer = arena.layer(0)
        self._tabled, self._paged = layer.table is not None, layer.paged
        # In the order of the fields of `DecodeArrays`.
        self._padding = np.array([[0], [0], [-1], [-1], [self.padding_slot], [0], [0], [-1], [0], [-1]], dtype=np.int64)
        self._members = members
        length = fields * max_size + (fields_length(max_size, members) if members else 0)
        self._static = torch.zeros(length, dtype=torch.int64, device=arena.device)
        self._host = HostRing(length, arena.device, in_flight)
        self._filled: dict[HostBuffer, Filled] = {}
        self._packed = np.empty(0, dtype=np.int64)
        self._packed_for: tuple[tuple[PrefixGroup, ...], int] = ((), 0)
        self._sent: tuple[StepPlan | None, int] = (None, 0)
        """The plan sent last and its size; None where it was padding."""
        self._advanced = False
        """Whether the arrays are those of its rows' next step."""
        self._beside = torch.cuda.Stream(arena.device) if arena.device.type == "cuda" else None
        self.adapted = False
        """Whether rows of it have adapters."""

    @property
    def slots(self) -> NDArray[np.int64]:
        """Of the plan sent last."""
        plan, _ = self._sent
        assert plan is not None, "padding has no slots"
        return plan.slots

    def arrays(self, size: int) -> DecodeArrays:
        """The arrays of steps that are padded to `size` rows: always the same memory."""
        return DecodeArrays(*self._static[: len(DecodeArrays._fields) * size].view(-1, size))

    def prefixes(self, size: int) -> SharedPrefixes:
        """What the rows of such steps share, in static memory behind their arrays; undefined until it is sent."""
        first = len(DecodeArrays._fields) * size
        fields = self._static[first : first + fields_length(size, self._members)]
        return SharedPrefixes(self._static.device, size, self._members, fields)

    def batch(self, size: int, last_token: Tensor, adapted: bool = False) -> ForwardBatch:
        """The forward batch over these arrays. last_token: int64 [slots + 1], read on the device. adapted: rows may
        have adapters."""
        arrays = self.arrays(size)
        return ForwardBatch(
            input_ids=last_token,
            id_slots=arrays.slots,
            positions=arrays.positions,
            kv_rows=arrays.kv_rows,
            granule_rows=arrays.granule_rows if self._tabled else None,
            num_decode=size,
            decode_base_rows=arrays.base_rows,
            decode_slots=arrays.table_slots,
            decode_kv_lens=arrays.kv_lens,
            max_decode_kv_len=self._arena.spec.max_tokens,
            prefills=[],
            logit_tokens=None,
            kv=self._arena,
            adapters=TokenAdapters(arrays.adapters, beside=self._beside) if adapted else None,
        )

    def advance(self, size: int) -> None:
        """Captured behind all that reads the arrays: make them those of the next step of the same rows."""
        self._static[: 3 * size].view(3, size).add_(self.arrays(size).advances)

    def advanced(self) -> None:
        """What `advance` did for the plan sent last has been queued."""
        # Where the table says it, a row's next place may be in another granule; what does not share, moves slots. Rows
        # without adapters do not follow those that had some.
        self._advanced = self._arena.shares and not self._tabled and not self.adapted

    def send(self, plan: StepPlan | None, size: int, adapters: NDArray[np.int64] | None = None) -> None:
        """Have the arrays be those of a plan of decode rows, padded to `size`; without a plan all of it is padding.
        What rows share is among them where they do and have no adapters. adapters: of the rows.

        The memory operations of the plan must have been submitted. Never waits for the device.
        """
        there = plan is not None and adapters is None and self._advanced_to(plan, size)
        self._sent, self._advanced, self.adapted = (plan, size), False, adapters is not None
        if not there:
            self._upload(plan, size, adapters)

    def _advanced_to(self, plan: StepPlan, size: int) -> bool:
        """Whether the arrays are those of a plan, by what was sent last and has been done since."""
        last, its_size = self._sent
        return (
            self._advanced
            and last is not None
            and last.slots is plan.slots
            and last.prefixes is plan.prefixes
            and its_size == size
            and int(plan.starts[0]) == int(last.starts[0]) + 1
        )

    def _upload(self, plan: StepPlan | None, size: int, adapters: NDArray[np.int64] | None) -> None:
        buffer = self._host.next()
        length = len(self._padding) * size
        if plan is None:
            self._filled.pop(buffer, None)
            buffer.array[:length].reshape(-1, size)[:] = self._padding
        else:
            filled = self._fill(buffer, plan, size)
            if adapters is not None:
                filled.rows[-1, : len(adapters)] = adapters
            elif plan.prefixes:
                packed = self._pack(plan.prefixes, size)
                buffer.array[length : length + len(packed)] = packed
                length += len(packed)
        buffer.send(self._static, length)

    def _pack(self, groups: tuple[PrefixGroup, ...], size: int) -> NDArray[np.int64]:
        """The fields of `prefixes`: steps have the same groups, as one object, while the same rows decode."""
        before, its_size = self._packed_for
        if before is not groups or its_size != size:
            self._packed = pack_groups(groups, self._arena.spec.granule_tokens, size, self._members)
            self._packed_for = groups, size
        return self._packed

    def _fill(self, buffer: HostBuffer, plan: StepPlan, size: int) -> Filled:
        """Of rows that the buffer has already only what is new in every step."""
        starts = plan.starts
        filled = self._filled.get(buffer)
        # Arenas that do not share granules move slots.
        if filled is None or filled.slots is not plan.slots or filled.rows.shape[1] != size or not self._arena.shares:
            filled = self._filled[buffer] = self._fill_anew(buffer, plan.slots, size)
        rows = len(starts)
        np.add(starts, filled.offsets, out=filled.rows[:3, :rows])
        if self._tabled:
            granule_rows = self._arena.granule_rows(plan.slots, starts)
            filled.rows[2 if self._paged else 3 : 4, :rows] = granule_rows
        return filled

    def _fill_anew(self, buffer: HostBuffer, slots: NDArray[np.int64], size: int) -> Filled:
        """All that does not depend on positions."""
        host = buffer.array[: len(self._padding) * size].reshape(-1, size)
        host[:] = self._padding
        base_rows = self._arena.base_rows(slots)
        host[4:9, : len(slots)] = (slots, base_rows, slots, slots, np.ones_like(slots))
        return Filled(host, slots, np.stack((np.zeros_like(slots), np.ones_like(slots), base_rows)))
