"""`Roster`: every live sequence, the list it is in, the slot it holds; and the only transitions between states."""

import logging
from collections.abc import Callable, Iterator
from itertools import chain

from bladellm_runtime.kv.accounting import KvAccounting
from bladellm_runtime.kv.shared_reads import SharedReads
from bladellm_runtime.scheduler import policy
from bladellm_runtime.scheduler.decode_batch import DecodeBatch
from bladellm_runtime.scheduler.sequence import Sequence, State, insert, remove
from bladellm_runtime.scheduler.slots import SlotTable
from bladellm_runtime.scheduler.token_log import TokenLog

logger = logging.getLogger(__name__)


class Roster:
    """Live sequences by state, each list in arrival order.

    Only the head of the queue is admitted and only the newest running sequence is preempted, so whatever runs
    arrived before whatever waits, but for those that were late and are called back.
    """

    def __init__(
        self, memory: KvAccounting, vocab_size: int, shared_reads: SharedReads | None = None, groups: int = 1
    ) -> None:
        """shared_reads: told which slots decode. groups: micro-batches."""
        self.slots = SlotTable(memory)
        self._shared_reads = shared_reads
        self.live: dict[int, Sequence] = {}
        self.waiting: list[Sequence] = []
        self.late: list[Sequence] = []
        self.prefilling: list[Sequence] = []
        self.decoding: list[Sequence] = []
        spec = memory.spec
        self.batches = [DecodeBatch(spec.granule_tokens, spec.num_slots) for _ in range(groups)]
        """The same by micro-batch, as they are planned."""
        self.log = TokenLog(spec.num_slots, vocab_size)
        self.preemptions = 0
        self.constrained = 0
        """Live sequences with a constraint."""
        self.ended: Callable[[int], None] | None = None
        """Called with the id of every request that ends."""
        self._lists = {
            State.WAITING: self.waiting, State.LATE: self.late,
            State.PREFILL: self.prefilling, State.DECODE: self.decoding,
        }  # fmt: skip

    def add(self, seq: Sequence) -> None:
        """Queue a new sequence behind all others."""
        self.live[seq.request_id] = seq
        self.constrained += seq.prepared.matcher is not None
        insert(self.waiting, seq)

    def admit(self, now: float) -> Sequence | None:
        """Let the head of the queue in, if it has left the slot it may have had and there is room; else None.

        Room is: all its known tokens, its first decode token, and headroom for those that run. Nothing overtakes a
        head that does not fit: it needs the room that those behind it would take.
        """
        seq = self.waiting[0]
        if self.slots.full or seq.last_step > self.slots.completed:
            return None
        spare = policy.headroom(seq, self.running())
        if not self.slots.acquire(seq, policy.admission_tokens(seq), spare):
            return None
        seq.prefill_end, seq.loaded = len(seq.tokens), False
        if seq.scheduled_at is None:
            seq.scheduled_at = now
        self._move(seq, State.PREFILL)
        return seq

    def prefilled(self, seq: Sequence) -> None:
        """The last chunk of a sequence is planned: it decodes, or drains if that chunk brings its last token."""
        if seq.planned == seq.kv_end:
            self.drain(seq)
        else:
            self._move(seq, State.DECODE)

    def running(self) -> Iterator[Sequence]:
        """The sequences that hold a slot and have tokens to plan."""
        return chain(self.prefilling, self.decoding)

    @property
    def has_prompts(self) -> bool:
        """Whether a sequence waits or is being prefilled."""
        return bool(self.waiting or self.late or self.prefilling)

    @property
    def unused_tokens(self) -> int:
        """Tokens for which running sequences hold room beyond what is planned."""
        planned = sum([seq.planned for seq in self.prefilling]) + sum([batch.planned for batch in self.batches])
        return self.slots.reserved - planned

    def newest_running(self) -> Sequence:
        """The sequence that gives way first. Something must be running."""
        return policy.newest(self.prefilling, self.decoding)

    def preempt(self, seq: Sequence) -> None:
        """Put a running sequence back into the queue. Tokens of it in flight still count; the rest is recomputed."""
        self.slots.retire(seq)
        self._move(seq, State.WAITING)
        seq.preemptions += 1
        self.preemptions += 1
        logger.info(
            "KV cache full: preempted request %d with %d tokens (its preemption %d, %d in all)",
            seq.request_id, len(seq.tokens), seq.preemptions, self.preemptions,
        )  # fmt: skip

    def put_back(self, seq: Sequence) -> None:
        """Put a sequence that was let in, and has had no part in a step yet, back into the queue."""
        self.slots.retire(seq)
        self._move(seq, State.WAITING)

    def defer(self, seq: Sequence) -> None:
        """Have a sequence that has had no part in a step yet stand aside: it is late."""
        if seq.state is State.PREFILL:
            self.slots.retire(seq)
        seq.late = True
        self._move(seq, State.LATE)

    def call_back(self, seq: Sequence) -> None:
        """Put a late sequence back into the queue, where it was."""
        self._move(seq, State.WAITING)

    def requeue_all(self) -> None:
        """Put every sequence that has a part in planned steps back into the queue; no step may be in flight."""
        for seq in self.live.values():
            if seq.state in (State.PREFILL, State.DECODE):
                self.slots.retire(seq)
            if seq.state not in (State.WAITING, State.LATE):
                self._move(seq, State.WAITING)
                self.preemptions += 1
        self.slots.release_retired()

    def drain(self, seq: Sequence) -> None:
        """Stop planning a sequence: every token it may produce is planned."""
        self.slots.retire(seq)
        self._move(seq, State.DRAINING)

    def end(self, seq: Sequence) -> None:
        """Forget a sequence; what it holds comes back once no step in flight contains it."""
        if seq.state in (State.PREFILL, State.DECODE):
            self.slots.retire(seq)
        self.slots.disown(seq)
        self._move(seq, State.ENDED)
        del self.live[seq.request_id]
        self.constrained -= seq.prepared.matcher is not None
        if self.ended is not None:
            self.ended(seq.request_id)

    def _move(self, seq: Sequence, state: State) -> None:
        """Change a sequence's state, and with it the list it is in; draining and ended ones are in none."""
        if (old := self._lists.get(seq.state)) is not None:
            remove(old, seq)
        if (new := self._lists.get(state)) is not None:
            insert(new, seq)
        if state is State.DECODE:
            self._begin_decoding(seq)
        elif seq.state is State.DECODE:
            self._end_decoding(seq)
        seq.state = state

    def _begin_decoding(self, seq: Sequence) -> None:
        self.batches[seq.group].enter(seq)
        self.log.enter(seq)
        if self._shared_reads is not None:
            self._shared_reads.enter(seq.slot)

    def _end_decoding(self, seq: Sequence) -> None:
        self.batches[seq.group].leave(seq)
        self.log.leave(seq)
        if self._shared_reads is not None:
            self._shared_reads.leave(seq.slot)
