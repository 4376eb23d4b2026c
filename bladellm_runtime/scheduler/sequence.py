"""`Sequence`: one request as the scheduler sees it, and lists of sequences in arrival order."""

from array import array
from bisect import bisect_left, insort
from dataclasses import dataclass, field
from enum import Enum
from operator import attrgetter
from typing import Protocol

from bladellm_runtime.request import SamplingParams
from bladellm_runtime.scheduler.prepared import Prepared
from bladellm_runtime.wire.messages import TokenLogprobs

by_arrival = attrgetter("order")


class State(Enum):
    """Where a sequence is; transitions are made by `Scheduler` alone."""

    WAITING = "waiting"
    """In the queue: new, or preempted (then a slot it held may still be in flight)."""
    LATE = "late"
    """In the queue as well, but its first token cannot be in time any more: those whose can go first."""
    PREFILL = "prefill"
    """Holds a slot; some of its known tokens are not planned yet."""
    DECODE = "decode"
    """Holds a slot; each step may plan one more token."""
    DRAINING = "draining"
    """Every token it may produce is planned; its last step is in flight."""
    ENDED = "ended"
    """Answered with its terminal delta."""


@dataclass(slots=True)
class Pace:
    """Of sequences that decode together: each step of theirs plans one more token of every one. tokens: how many so
    far; step: the last of these steps."""

    tokens: int = 0
    step: int = 0


class TokenSource(Protocol):
    """Keeps tokens that sequences got, until somebody asks for them."""

    def drain(self, slot: int) -> list[int]:
        """The tokens of the sequence in a slot since the last call."""


@dataclass(slots=True, eq=False)
class Sequence:
    """A request with its tokens and how far it is planned.

    `tokens`, int32, is the prompt followed by the generated tokens that are known; `planned` counts the KV positions
    that completed and in-flight steps write, so it can run ahead of `tokens`. Lengths are in tokens: `max_len` is
    prompt plus answer at most, `kv_end` the KV length after which nothing remains to be planned (the last generated
    token is never fed back), `prefill_end` where the prefill of this residence stops, `reserved` what the slot's
    granules hold. `cached` counts the first tokens that the prompt cache had when the first chunk was planned, -1
    before that; `salt` keeps apart whose prompts may be shared, that of the request and its adapter in one. `loaded`:
    the runner has its tokens in this residence. `group`: the micro-batch it runs in. `prepared`: what it was given
    beforehand. `pace` is set while it decodes together with others, `log` while its tokens come by way of one.
    `arrived`: seconds, when its request did. `late`: it was in the state of that name, and is never again.
    """

    order: int
    request_id: int
    params: SamplingParams
    choice: int
    known: "array[int]"
    prompt_len: int
    max_len: int
    kv_end: int
    stops: frozenset[int]
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    state: State = State.WAITING
    slot: int = -1
    generation: int = 0
    own_planned: int = 0
    prefill_end: int = 0
    reserved: int = 0
    own_last_step: int = 0
    preemptions: int = 0
    scheduled_at: float | None = None
    salt: str = ""
    cached: int = -1
    failed: bool = False
    loaded: bool = False
    group: int = 0
    prepared: Prepared = field(default_factory=Prepared)
    pace: Pace | None = None
    log: TokenSource | None = None
    arrived: float = 0.0
    late: bool = False

    @property
    def tokens(self) -> "array[int]":
        """The prompt and all generated tokens that are known: to append to."""
        if self.log is not None:
            self.known.extend(self.log.drain(self.slot))
        return self.known

    @property
    def planned(self) -> int:
        return self.own_planned if self.pace is None else self.own_planned + self.pace.tokens

    @planned.setter
    def planned(self, tokens: int) -> None:
        self.own_planned = tokens if self.pace is None else tokens - self.pace.tokens

    @property
    def last_step(self) -> int:
        """The last step planned with it."""
        return self.own_last_step if self.pace is None else self.pace.step

    @last_step.setter
    def last_step(self, step: int) -> None:
        self.own_last_step = step

    def keep(self, pace: Pace | None) -> None:
        """Go on at another pace, or at none, from where it is now."""
        planned, last_step = self.planned, self.last_step
        self.pace = pace
        self.planned, self.last_step = planned, last_step

    @property
    def generated(self) -> int:
        """Generated tokens that are known."""
        return len(self.tokens) - self.prompt_len

    @property
    def prefill_range(self) -> tuple[int, int]:
        """The positions that its prefill has still to do; of a waiting sequence all, as if nothing were cached."""
        queued = self.state in (State.WAITING, State.LATE)
        return (0, len(self.tokens)) if queued else (self.planned, self.prefill_end)

    def add_prompt_logprobs(self, start: int, entries: list[TokenLogprobs]) -> None:
        """Append what a chunk from position `start` on brings; a recomputed chunk may repeat what is there."""
        self.prompt_logprobs += entries[max(len(self.prompt_logprobs) - start, 0) :]


def insert(sequences: list[Sequence], seq: Sequence) -> None:
    """Put a sequence at its place in a list in arrival order."""
    insort(sequences, seq, key=by_arrival)


def remove(sequences: list[Sequence], seq: Sequence) -> None:
    """Take a sequence out of a list in arrival order."""
    index = bisect_left(sequences, seq.order, key=by_arrival)
    if sequences[index] is not seq:
        raise ValueError(f"request {seq.request_id} is not in this list")
    del sequences[index]
