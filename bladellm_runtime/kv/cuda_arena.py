"""`CudaArena`: KV memory on a CUDA device, granules mapped into a reserved address range per slot."""

import logging
import time
import weakref
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import ClassVar, NamedTuple

import torch

from bladellm_runtime.kv.arena import Ints, KvShape, MemoryEvent
from bladellm_runtime.kv.cuda_driver import MemoryDriver
from bladellm_runtime.kv.cuda_memory import CudaMemory
from bladellm_runtime.kv.cuda_views import View
from bladellm_runtime.kv.dlpack import bytes_at
from bladellm_runtime.kv.granule_arena import GranuleArena
from bladellm_runtime.kv.mapped_layers import granule_views, layer_views
from bladellm_runtime.kv.mapper import Job, Mapper
from bladellm_runtime.kv.operations import Copy, Hide, MemoryPlan, Rows, Show, SwapIn, SwapOut
from bladellm_runtime.kv.spec import KvSpec

logger = logging.getLogger(__name__)


class Pending(NamedTuple):
    """A job that changes what a slot shows from position `start` on, to what is in `block` or to nothing (-1).
    `position`: where the view begins that it is part of."""

    job: Job
    slot: int
    start: int
    position: int
    block: int


class CudaArena(GranuleArena):
    """Every group reserves the addresses of all slots at full length; slot s starts `s * max_tokens` rows behind a
    guard of one granule, for ever.

    `submit` enters a plan in the table and leaves the driver's calls to a thread, as jobs: one for each granule or
    block that a slot is to show, and one for each block to be taken otherwise than before. Those that the step's rows
    and moves enter go first, whatever plan they came with, and `wait` waits for these alone. Contents are moved where
    all granules are mapped side by side (`CudaMemory.homes`).
    """

    sticky: ClassVar[bool] = True
    background: ClassVar[bool] = True

    def __init__(self, spec: KvSpec, shape: KvShape, device: torch.device, driver: MemoryDriver) -> None:
        super().__init__(spec, shape, device)
        self._memory = CudaMemory(spec, driver, self.stats, torch.cuda.empty_cache)
        self._mapper = Mapper(driver.attach)
        blocks = spec.num_granules // spec.block_granules
        self._whole = [block >= spec.split_blocks for block in range(blocks)]
        """How each block was shown last by the plans submitted."""
        self._conversions: dict[int, Job] = {}
        """The last conversion of each block that is not done, or failed."""
        self._pending: list[Pending] = []
        """Views that are not in force, or failed without a step that enters them since."""
        self._needed: list[Pending] = []
        """Those that the step submitted last enters."""
        self._soon: list[Job] = []
        """Of the others of its plan's own."""
        self._release = weakref.finalize(self, _release, self._mapper, self._memory)
        rows = spec.granule_tokens + spec.num_slots * spec.max_tokens
        slots = self._tensors(self._memory.guards, rows)
        homes = self._tensors(self._memory.homes, spec.num_granules * spec.granule_tokens)
        self._present(layer_views(slots, spec, shape), granule_views(homes, spec))

    def submit(self, plan: MemoryPlan, rows: Rows | None = None) -> None:
        self._open()
        if not (plan or self._pending):
            return  # as in nearly all steps
        self._check_moves(plan)
        self._forget(plan)
        first = len(self._pending)
        for view in plan.views:
            self._view(view)
        before = len(self._pending)
        for ahead in plan.ahead:
            self._view(ahead)
        if self._pending:
            entered = self._pending[:before] if rows is None else self._entered(rows)
            moved = self._moved(plan) if plan.moves else []
            self._needed = entered + [view for view in moved if view not in entered]
            self._soon = [view.job for view in self._pending[first:before] if view not in self._needed]
            self._mapper.urge([view.job for view in self._needed])
        self._table.upload()

    def wait(self) -> None:
        self._open()
        start = time.perf_counter()
        self._mapper.wait([view.job for view in self._needed])
        end = time.perf_counter()
        self.stats.wait_seconds += end - start
        self.stats.events.append(MemoryEvent(start, end, "wait"))
        failed = [view for view in self._needed if view.job.error is not None]
        self._needed = []
        if failed:
            self._give_up(failed)

    def hold(self) -> None:
        self._mapper.hold()

    def resume(self) -> None:
        soon, self._soon = self._soon, []
        if soon:
            self._mapper.urge(soon)
        self._mapper.resume()

    def is_shown(self, slot: int, granules: int) -> bool:
        return not any(view.slot == slot and view.start < granules and not view.job.done for view in self._pending)

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
        count = self.spec.block_granules if view.whole else 1
        for index in range(0, len(view.granules), count):
            unit = View(view.slot, view.position + index, view.granules[index], count)
            block = unit.granule // self.spec.block_granules
            work = _shown(self._memory, unit, self._conversion(block, view.whole))
            blocks = [block, *self._in_the_way(unit.slot, unit.start)]
            job = self._mapper.submit(work, [("slot", unit.slot)], [("block", each) for each in blocks])
            self._pending.append(Pending(job, unit.slot, unit.start, view.position, block))

    def _hide(self, slot: int, keep: int) -> None:
        job = self._mapper.submit(self._memory.hide(slot, keep), [("slot", slot)])
        self._pending.append(Pending(job, slot, keep, keep, block=-1))

    def _in_the_way(self, slot: int, start: int) -> list[int]:
        """The block, if any, that is yet to be converted and that a slot may still show whole, from before a position
        on: until then nothing else can be shown there."""
        granule, size = self._table.at(slot, start), self.spec.block_granules
        block = granule // size
        return [block] if granule % size and block in self._conversions else []

    def _conversion(self, block: int, whole: bool) -> Job | None:
        """Have a block taken whole, or split. Returns the job to do so if that has not been done."""
        last = self._conversions.get(block)
        failed = last is not None and last.error is not None
        if self.spec.block_granules > 1 and (failed or self._whole[block] != whole):
            self._whole[block] = whole
            last = self._mapper.submit(self._memory.convert(block, whole), [("block", block)])
            self._conversions[block] = last
        return last

    def _forget(self, plan: MemoryPlan) -> None:
        """Drop what is done, and what a plan replaces: it comes after that, and whether that fails does not matter."""
        self._pending = [view for view in self._pending if not view.job.succeeded]
        views: defaultdict[int, list[Show | Hide]] = defaultdict(list)
        for new in (*plan.views, *plan.ahead):
            views[new.slot].append(new)
        if views:
            left = [view for view in self._pending if not any(_replaces(new, view) for new in views.get(view.slot, ()))]
            self._pending = left
        self._conversions = {block: job for block, job in self._conversions.items() if not job.succeeded}

    def _entered(self, rows: Rows) -> list[Pending]:
        """Pending views of positions that a step's rows read or write."""
        ends, tokens = rows.ends(self.spec.num_slots), self.spec.granule_tokens
        return [view for view in self._pending if view.start * tokens < ends[view.slot]]

    def _moved(self, plan: MemoryPlan) -> list[Pending]:
        """Pending views of blocks that a plan's moves read or write, where those are yet to be converted: contents are
        moved at home, whoever shows them."""
        blocks = {granule // self.spec.block_granules for granule in (*_read(plan), *_written(plan))}
        return [view for view in self._pending if view.block in blocks and view.block in self._conversions]

    def _give_up(self, failed: Sequence[Pending]) -> None:
        """Leave slots with what they show before the views that failed, and raise."""
        errors = [view.job.error for view in failed if view.job.error is not None]
        self._pending = [view for view in self._pending if view not in failed]
        for error in errors:
            if not isinstance(error, MemoryError | OSError):
                raise error
        keep = {view.slot: view.position for view in sorted(failed, key=lambda view: -view.position)}
        hidden = [self._mapper.submit(self._memory.hide(slot, end), [("slot", slot)]) for slot, end in keep.items()]
        self._mapper.urge(hidden)
        self._mapper.wait(hidden)
        self._pending = [view for view in self._pending if view.start < keep.get(view.slot, view.start + 1)]
        for slot, end in keep.items():
            self._table.hide(slot, end)
        self._table.upload()
        raise MemoryError(f"KV memory of slots {sorted(keep)} cannot be mapped: {errors[0]}") from errors[0]

    def _check_moves(self, plan: MemoryPlan) -> None:
        """Raises `ValueError` where moves read contents that end with the plan's own views."""
        length = self.spec.block_granules
        if not plan.moves or length == 1:
            return
        shows = [view for view in (*plan.views, *plan.ahead) if isinstance(view, Show)]
        taken = {(granule // length, view.whole) for view in shows for granule in view.granules}
        for granule in _read(plan):
            block = granule // length
            if (block, not self._whole[block]) in taken:
                raise ValueError(f"a move reads granule {granule}, whose block the same plan takes otherwise")


def _replaces(new: Show | Hide, old: Pending) -> bool:
    """Whether nothing of an older view of the same slot is left where it begins."""
    if isinstance(new, Hide):
        return new.keep <= old.start
    return new.position <= old.start < new.position + len(new.granules)


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


def _shown(memory: CudaMemory, view: View, conversion: Job | None) -> Iterator[bool]:
    """Show a granule or a block, which must have been converted as it should."""
    if conversion is not None and conversion.error is not None:
        # A block shown whole before would otherwise be in the way of the views that come next.
        yield from memory.clear(view)
        raise conversion.error
    yield from memory.show(view)


def _release(mapper: Mapper, memory: CudaMemory) -> None:
    """Finish what is queued, and give the memory back."""
    mapper.close()
    try:
        memory.close()
    except (MemoryError, OSError) as error:
        logger.warning("KV memory was not given back: %s", error)
