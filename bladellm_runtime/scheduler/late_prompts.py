"""Which prompts go first when not all can have their first token in time.

A queue served in the order of arrival makes everybody late once it is as long as the target. Where those who cannot be
in time any more stand aside, as in queues with impatient customers (Barrer, "Queuing with Impatient Customers and
Ordered Service", Operations Research 1957), those behind them are in time.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain

from bladellm_runtime.scheduler import policy
from bladellm_runtime.scheduler.roster import Roster
from bladellm_runtime.scheduler.sequence import Sequence, State
from bladellm_runtime.scheduler.step_cost import StepCost, chunk_pairs

PATIENCE = 5
"""Targets that a late prompt waits for those in time. From then on it takes turns with them: a queue that only grows
serves as many of the one kind as of the other."""


@dataclass(frozen=True, slots=True)
class FirstTokenTarget:
    """`seconds`: from a request's arrival to its first token. `cost`: what steps take."""

    seconds: float
    cost: StepCost


@dataclass(frozen=True, slots=True)
class StepRoom:
    """Of the steps to come: the milliseconds that decodes take of each, `base`, and how long it may be with prompts;
    and the prompt tokens of one that nobody queues for."""

    base: float
    longest: float
    tokens: int


def seconds_to_first_token(cost: StepCost, room: StepRoom, ahead: int, start: int, tokens: int) -> float:
    """How long a prompt's first token takes from now on, with `ahead` tokens of others in front of its own, which begin
    at position `start`."""
    prefill = cost.prefill_milliseconds(ahead + tokens) + cost.prefill_pair * chunk_pairs(start, tokens)
    each = max(room.longest - room.base, cost.step)
    steps = max(prefill / each, 1.0) if each > 0 else 1.0
    return (prefill + room.base * steps) / 1e3


class LatePrompts:
    """Has prompts that cannot be in time stand aside, and calls them back.

    Looked at is the first prompt in line that has not begun, once a step. One is late once only: called back it keeps
    the place of its arrival. So nobody waits for ever, and what runs never stands aside.
    """

    def __init__(self, roster: Roster) -> None:
        self._roster = roster
        self._late_began = False
        """Whether the prompt that began last was late."""
        self._called: Sequence | None = None
        """The one whose turn it is, until it begins or ends."""

    def began(self, seq: Sequence) -> None:
        """Its first chunk is planned."""
        self._late_began = seq.late

    def sort(self, target: FirstTokenTarget, prefilling: Iterable[Sequence], room: StepRoom, now: float) -> None:
        """Before a step is filled. prefilling: those let in that the step is for, in arrival order."""
        line = list(prefilling)
        ahead = sum([policy.tokens_left(seq) for seq in line if seq.loaded])
        while (seq := self._first_to_begin(line)) is not None and self._is_late(target, seq, room, ahead, now):
            self._roster.defer(seq)
        if self._roster.late:
            self._call_back(target, any(seq.state is State.PREFILL for seq in line), room, now)

    def _first_to_begin(self, line: list[Sequence]) -> Sequence | None:
        let_in = (seq for seq in line if seq.state is State.PREFILL and not seq.loaded)
        return next(chain(let_in, self._roster.waiting), None)

    def _is_late(self, target: FirstTokenTarget, seq: Sequence, room: StepRoom, ahead: int, now: float) -> bool:
        if seq.late or seq.cached >= 0 or seq.preemptions:
            return False
        left = target.seconds - (now - seq.arrived)
        start, end = seq.prefill_range
        if seconds_to_first_token(target.cost, room, ahead, start, end - start) <= left:
            return False
        if seq.state is not State.WAITING:
            return True
        start = self._roster.slots.cached_tokens(seq)
        return start == 0 or seconds_to_first_token(target.cost, room, ahead, start, end - start) > left

    def _call_back(self, target: FirstTokenTarget, prefilling: bool, room: StepRoom, now: float) -> None:
        """As many late prompts as fill a step where nobody else is in line, one where it is their turn."""
        roster = self._roster
        if prefilling or roster.waiting:
            waited = now - roster.late[0].arrived
            if waited > PATIENCE * target.seconds and not self._late_began and not self._is_called():
                self._called = roster.late[0]
                roster.call_back(self._called)
            return
        tokens = 0
        while roster.late and (not tokens or tokens + policy.tokens_left(roster.late[0]) <= room.tokens):
            tokens += policy.tokens_left(roster.late[0])
            roster.call_back(roster.late[0])

    def _is_called(self) -> bool:
        """Whether one is in line already, since it was its turn."""
        called = self._called
        return called is not None and not called.loaded and called.state in (State.WAITING, State.PREFILL)
