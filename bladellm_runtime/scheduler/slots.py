"""`SlotTable`: who holds which slot, under which generation, and when a slot may be given back."""

from typing import NamedTuple

from bladellm_runtime.kv.accounting import KvAccounting
from bladellm_runtime.scheduler.plan import StepPlan, StepResult
from bladellm_runtime.scheduler.sequence import Sequence


class RetiredSlot(NamedTuple):
    """A slot whose sequence has left it, the last step that contains it, and the granules that come back at most."""

    slot: int
    last_step: int
    granules: int
    seq: Sequence


class SlotTable:
    """Slots with generation numbers over the KV accounting.

    A sequence that leaves its slot may still be in a step in flight, which reads and writes the slot's memory. Such a
    slot is *retired*: it keeps its granules until the last step that contains it has completed.

    `owner` has, by slot, the sequence that takes the results of steps in flight, None when they are to be dropped.
    `completed` is the last step whose results are in.
    """

    def __init__(self, memory: KvAccounting) -> None:
        self._memory = memory
        self._generations = [0] * memory.spec.num_slots
        self.owner: list[Sequence | None] = [None] * memory.spec.num_slots
        self.retired: list[RetiredSlot] = []
        self.completed = 0
        self.reserved = 0
        """Tokens that the granules of running sequences hold."""

    @property
    def full(self) -> bool:
        """True when every slot is held or retired."""
        return self._memory.live == self._memory.spec.num_slots

    def acquire(self, seq: Sequence, tokens: int, headroom: int) -> bool:
        """Give a sequence a slot that holds `tokens` tokens, if `headroom` granules stay obtainable after that.

        The sequence starts with what the prompt cache has of it. False, with nothing changed, if there is no room.
        """
        read = seq.params.prompt_logprobs is None
        admission = self._memory.admit(seq.tokens, tokens, headroom, seq.salt, read)
        if admission is None:
            return False
        slot = admission.slot
        self._generations[slot] += 1
        self.owner[slot] = seq
        seq.slot, seq.generation = slot, self._generations[slot]
        seq.planned = admission.cached
        seq.reserved = 0
        self._reserve(seq, tokens)
        return True

    def cached_tokens(self, seq: Sequence) -> int:
        """How many of a sequence's known tokens the prompt cache has now."""
        return self._memory.cached_tokens(seq.tokens, seq.salt, seq.params.prompt_logprobs is None)

    def grow(self, seq: Sequence, tokens: int) -> bool:
        """Make the sequence's slot hold `tokens` tokens; False, with nothing changed, when the pool is empty."""
        if not self._memory.grow(seq.slot, tokens):
            return False
        self._reserve(seq, tokens)
        return True

    def is_shown(self, seq: Sequence, tokens: int) -> bool:
        """Whether a step that reads and writes the sequence's first `tokens` tokens need not wait for its memory."""
        return self._memory.is_shown(seq.slot, tokens)

    def is_sound(self, seq: Sequence) -> bool:
        """Whether nothing that the sequence shares has turned out to be wrong since it was let in."""
        return self._memory.is_sound(seq.slot)

    def opens_granule(self, position: int) -> bool:
        """Whether a token is the first of its granule."""
        return position % self._memory.spec.granule_tokens == 0

    def find(self, slot: int, generation: int) -> Sequence | None:
        """The sequence a result belongs to; None for a result that is stale or no longer wanted."""
        seq = self.owner[slot]
        return seq if seq is not None and seq.generation == generation else None

    def owner_of(self, plan: StepPlan, row: int) -> Sequence | None:
        """The sequence that a row's result belongs to, as `find`."""
        return self.find(int(plan.slots[row]), int(plan.generations[row]))

    def retire(self, seq: Sequence) -> None:
        """Give the sequence's slot back, at once or after its last step. Until then its results still reach it."""
        self.reserved -= seq.reserved
        if seq.last_step <= self.completed:
            self._release(seq.slot, seq)
        else:
            granules = self._memory.spec.granules(seq.reserved)
            self.retired.append(RetiredSlot(seq.slot, seq.last_step, granules, seq))

    def disown(self, seq: Sequence) -> None:
        """Drop whatever steps in flight still produce for a sequence."""
        if seq.slot >= 0 and self.owner[seq.slot] is seq:
            self.owner[seq.slot] = None

    def doubt_retired(self, plan: StepPlan, result: StepResult) -> None:
        """Nobody takes the token that a step in flight still sampled of a sequence that has ended. Where it is no
        number, what the step wrote of the sequence may be none either."""
        for item in self.retired:
            # No other sequence has had the slot since.
            if (plan.samples & (plan.slots == item.slot) & (result.tokens < 0)).any():
                item.seq.failed = True

    def release_retired(self) -> None:
        """Give back the retired slots that no step in flight contains any more."""
        if not self.retired:
            return
        due = [item for item in self.retired if item.last_step <= self.completed]
        self.retired = [item for item in self.retired if item.last_step > self.completed]
        for item in due:
            self._release(item.slot, item.seq)

    def retired_granules(self) -> int:
        """Granules that come back once the steps in flight have completed."""
        return sum(item.granules for item in self.retired) + self._memory.moving

    def map_ahead(self, seq: Sequence, tokens: int) -> None:
        """Let the sequence's next granule be mapped before it is needed, if it will be; `tokens` of it are planned."""
        if seq.kv_end > seq.reserved:
            self._memory.map_ahead(seq.slot, tokens)

    def take_ahead(self, seq: Sequence) -> None:
        """Have the sequence hold the granule that was mapped ahead for it, if that is in view."""
        tokens = seq.reserved + 1
        if self._memory.holds_ahead(seq.slot) and self._memory.is_shown(seq.slot, tokens):
            self.grow(seq, tokens)

    def remember(self, seq: Sequence) -> None:
        """Let others share what the sequence's planned chunks write."""
        self._memory.remember(seq.slot, seq.tokens, seq.planned)

    def _reserve(self, seq: Sequence, tokens: int) -> None:
        spec = self._memory.spec
        self.reserved -= seq.reserved
        seq.reserved = spec.granules(tokens) * spec.granule_tokens
        self.reserved += seq.reserved

    def _release(self, slot: int, seq: Sequence) -> None:
        """Give a slot back. What its steps wrote is known as far as their tokens came in."""
        self.owner[slot] = None
        written = min(seq.planned, len(seq.tokens))
        sampled = len(seq.tokens) > seq.prefill_end
        self._memory.release_slot(slot, seq.tokens, written, valid=not seq.failed, proven=sampled)
