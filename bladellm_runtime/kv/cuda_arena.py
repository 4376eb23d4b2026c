"""`CudaArena`: KV memory on a CUDA device, granules mapped into a reserved address range per slot."""

import logging
import time
import weakref
from collections.abc import Sequence
from typing import ClassVar

import torch

from bladellm_runtime.kv.arena import Ints, KvShape, MemoryEvent
from bladellm_runtime.kv.cuda_driver import MemoryDriver
from bladellm_runtime.kv.cuda_memory import CudaMemory
from bladellm_runtime.kv.dlpack import bytes_at
from bladellm_runtime.kv.granule_arena import GranuleArena
from bladellm_runtime.kv.mapped_layers import granule_views, layer_views
from bladellm_runtime.kv.mapper import Mapper
from bladellm_runtime.kv.operations import Copy, MemoryPlan, Show, SwapIn, SwapOut
from bladellm_runtime.kv.spec import KvSpec

logger = logging.getLogger(__name__)


class MappingFailed(Exception):
    """A `Show` that could not be carried out, and why (`__cause__`)."""

    def __init__(self, slot: int, position: int) -> None:
        super().__init__(slot, position)
        self.slot, self.position = slot, position


class CudaArena(GranuleArena):
    """Every group reserves the addresses of all slots at full length; slot s starts `s * max_tokens` rows behind a
    guard of one granule, for ever.

    `submit` enters a plan in the table and leaves the driver's calls to a thread, in order; `wait` waits for those of
    the plan's `views`. Contents are moved where all granules are mapped side by side (`CudaMemory.homes`).
    """

    sticky: ClassVar[bool] = True

    def __init__(self, spec: KvSpec, shape: KvShape, device: torch.device, driver: MemoryDriver) -> None:
        super().__init__(spec, shape, device)
        self._memory = CudaMemory(spec, driver, self.stats, torch.cuda.empty_cache)
        self._mapper = Mapper(driver.attach)
        self._ticket = 0
        blocks = spec.num_granules // spec.block_granules
        self._whole = [block >= spec.split_blocks for block in range(blocks)]
        """How each block was shown last by the plans submitted."""
        self._release = weakref.finalize(self, _release, self._mapper, self._memory)
        rows = spec.granule_tokens + spec.num_slots * spec.max_tokens
        slots = self._tensors(self._memory.guards, rows)
        homes = self._tensors(self._memory.homes, spec.num_granules * spec.granule_tokens)
        self._present(layer_views(slots, spec, shape), granule_views(homes, spec))

    def submit(self, plan: MemoryPlan) -> None:
        self._open()
        converted = self._convert(plan)
        for view in plan.views:
            self._view(view)
        self._ticket = self._mapper.ticket()
        for ahead in plan.ahead:
            self._view(ahead)
        if any(granule // self.spec.block_granules in converted for granule in _written(plan)):
            # What moves write to must be there: memory that a view ahead replaces is waited for as well.
            self._ticket = self._mapper.ticket()
        self._table.upload()

    def wait(self) -> None:
        self._open()
        start = time.perf_counter()
        errors = self._mapper.wait(self._ticket)
        end = time.perf_counter()
        self.stats.wait_seconds += end - start
        self.stats.events.append(MemoryEvent(start, end, "wait"))
        for error in errors:
            if not isinstance(error, MappingFailed):
                raise error
            self._table.hide(error.slot, error.position)
        self._table.upload()
        if errors:
            slots = sorted({error.slot for error in errors if isinstance(error, MappingFailed)})
            cause = errors[0].__cause__
            raise MemoryError(f"KV memory of slots {slots} cannot be mapped: {cause}") from cause

    def close(self) -> None:
        super().close()
        self._release()

    def base_row(self, slot: int) -> int:
        return self.spec.granule_tokens + slot * self.spec.max_tokens

    def base_rows(self, slots: Ints) -> Ints:
        return self.spec.granule_tokens + slots * self.spec.max_tokens

    def _tensors(self, starts: Sequence[int], tokens: int) -> list[torch.Tensor]:
        """uint8, the addresses of `tokens` tokens from each group's start on."""
        groups = zip(starts, self.spec.groups, strict=True)
        return [bytes_at(start, tokens * group.token_bytes, self.device) for start, group in groups]

    def _show(self, view: Show) -> None:
        memory = self._memory
        self._mapper.submit(lambda: _show(memory, view))

    def _hide(self, slot: int, keep: int) -> None:
        memory = self._memory
        self._mapper.submit(lambda: memory.hide(slot, keep))

    def _convert(self, plan: MemoryPlan) -> set[int]:
        """The blocks that a plan takes otherwise than before, from now on entered as taken so.

        Raises `ValueError` where moves read contents that end with the plan's own views.
        """
        length = self.spec.block_granules
        shows = [view for view in (*plan.views, *plan.ahead) if isinstance(view, Show) and length > 1]
        converted: set[int] = set()
        for view in shows:
            for block in {granule // length for granule in view.granules}:
                if 0 <= block < len(self._whole) and self._whole[block] != view.whole:
                    self._whole[block] = view.whole
                    converted.add(block)
        for granule in _read(plan):
            if granule // length in converted:
                raise ValueError(f"a move reads granule {granule}, whose block the same plan takes otherwise")
        return converted


def _read(plan: MemoryPlan) -> list[int]:
    """Granules that moves read as they were before the plan: not those that earlier moves have written."""
    found: list[int] = []
    written: set[int] = set()
    for move in plan.moves:
        source = move.source if isinstance(move, Copy) else move.granule if isinstance(move, SwapOut) else None
        if source is not None and source not in written:
            found.append(source)
        if not isinstance(move, SwapOut):
            written.add(move.target if isinstance(move, Copy) else move.granule)
    return found


def _written(plan: MemoryPlan) -> list[int]:
    """Granules that moves write."""
    targets = [move.target for move in plan.moves if isinstance(move, Copy)]
    return targets + [move.granule for move in plan.moves if isinstance(move, SwapIn)]


def _show(memory: CudaMemory, view: Show) -> None:
    try:
        memory.show(view)
    except (MemoryError, OSError) as error:
        raise MappingFailed(view.slot, view.position) from error


def _release(mapper: Mapper, memory: CudaMemory) -> None:
    """Finish what is queued, and give the memory back."""
    mapper.close()
    try:
        memory.close()
    except (MemoryError, OSError) as error:
        logger.warning("KV memory was not given back: %s", error)
