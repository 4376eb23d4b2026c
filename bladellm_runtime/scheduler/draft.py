"""`Draft`: a step plan in the making."""

from dataclasses import dataclass, field

import numpy as np

from bladellm_runtime.kv.operations import MemoryPlan
from bladellm_runtime.scheduler.decode_batch import DecodeRows
from bladellm_runtime.scheduler.plan import Ints, SlotLoad, StepPlan
from bladellm_runtime.scheduler.sequence import Sequence


@dataclass(slots=True)
class Draft:
    """The decode rows of a step with the positions of their tokens, and the prefill chunks that were added to them."""

    step: int
    decodes: DecodeRows
    decode_starts: Ints
    loads: list[SlotLoad] = field(default_factory=list)
    chunks: list[tuple[int, int, int, int, bool]] = field(default_factory=list)
    """Slot, generation, start, query tokens, and whether the chunk samples."""

    @property
    def num_decode(self) -> int:
        return len(self.decode_starts)

    def add_chunk(self, seq: Sequence, tokens: int, samples: bool) -> None:
        """Add a row: the next tokens of a sequence's prefill."""
        self.chunks.append((seq.slot, seq.generation, seq.planned, tokens, samples))

    def plan(self) -> StepPlan:
        """The plan of these rows, to be completed by what concerns all of them."""
        decodes = self.decodes
        rows, samples = [decodes.slots, decodes.generations, self.decode_starts, decodes.ones], decodes.samples
        if self.chunks:
            *columns, sampling = np.array(self.chunks, dtype=np.int64).T
            rows = [np.concatenate(both) for both in zip(rows, columns, strict=True)]
            samples = np.concatenate((samples, sampling.astype(np.bool_)))
        slots, generations, starts, query_lens = rows
        plan = StepPlan(self.step, self.loads, MemoryPlan(), slots, generations, starts, query_lens, samples)
        plan.num_decode = self.num_decode
        return plan
