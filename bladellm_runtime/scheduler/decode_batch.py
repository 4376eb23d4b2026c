"""`DecodeBatch`: the decoding sequences of a micro-batch, planned together, so that what a step costs the host hardly
grows with their number."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from bladellm_runtime.scheduler.plan import Ints, StepPlan
from bladellm_runtime.scheduler.sequence import Pace, Sequence, by_arrival

AHEAD_TURNS = 8
"""Into so many turns half a granule is divided, and memory is asked for ahead, and taken, at the first step of a turn:
a step with such a wish costs the arena about as much as one with several."""


class DecodeRows(NamedTuple):
    """The rows of a batch, read-only: steps of the same rows have the same arrays. offsets: what the tokens of the pace
    are added to for the position of each row's token. ones, samples: query lengths, and that all rows sample."""

    slots: Ints
    generations: Ints
    offsets: Ints
    ones: Ints
    samples: NDArray[np.bool_]


class DecodeBatch:
    """Sequences that were in the last step of the batch keep its *pace*: one token more in every step. Looked at one by
    one, in steps in which they are *due*, are those that

    - begin to decode, or were left out of the last step for want of memory;
    - need memory for their token; have some mapped ahead that they will need within a turn; or had better have some
      mapped ahead, as all do from half of their last granule on;
    - have their last token planned.
    """

    def __init__(self, granule_tokens: int, num_slots: int) -> None:
        self._half_granule = granule_tokens // 2
        self._turn = max(self._half_granule // AHEAD_TURNS, 1)
        """Steps of a turn."""
        self._pace = Pace()
        self._columns = np.empty((4, num_slots), dtype=np.int64)
        """Of each member, in arrival order: its order, slot, generation and offset."""
        self._count = 0
        self._offsets = 0
        """The sum of theirs."""
        self._apart: dict[int, Sequence] = {}
        """Those that do not keep the pace, by arrival."""
        self._due: dict[int, dict[int, Sequence]] = {}
        """Members by the tokens of the pace at which they are due, and by arrival."""
        self._due_at: dict[int, int] = {}
        self._rows: DecodeRows | None = None

    def __len__(self) -> int:
        return self._count + len(self._apart)

    @property
    def planned(self) -> int:
        """KV tokens planned for all of them."""
        apart = sum([seq.planned for seq in self._apart.values()])
        return self._offsets + self._count * self._pace.tokens + apart

    def enter(self, seq: Sequence) -> None:
        """A sequence decodes from now on."""
        self._apart[seq.order] = seq

    def leave(self, seq: Sequence) -> None:
        """A sequence decodes no more."""
        if seq.pace is None:
            del self._apart[seq.order]
        else:
            self._part(seq)

    def due(self) -> list[Sequence]:
        """Those to be looked at before the next step, in arrival order."""
        due = self._due.get(self._pace.tokens)
        if due is None and not self._apart:
            return []
        return sorted([*self._apart.values(), *(due or {}).values()], key=by_arrival)

    def thinks_ahead(self, seq: Sequence) -> bool:
        """Whether a sequence that is due had better have its next granule mapped."""
        return seq.planned + 1 >= self._ahead_at(seq)

    def needs_soon(self, seq: Sequence) -> bool:
        """Whether a sequence that is due will need more memory within a turn."""
        return seq.reserved - seq.planned <= self._turn

    def _ahead_at(self, seq: Sequence) -> int:
        """Planned tokens of a sequence from which on it had."""
        return seq.reserved - self._half_granule

    def leave_out(self, seq: Sequence) -> None:
        """The next step has no token of a sequence."""
        if seq.pace is not None:
            self._part(seq)
            self._apart[seq.order] = seq

    def advance(self, step: int, due: list[Sequence]) -> StepPlan:
        """Plan a step: one token of each member, and of each of `due`, which are members from now on."""
        for seq in due:
            if seq.pace is None:
                self._join(seq)
            else:
                self._forget(seq)
        rows = self._rows or self._make_rows()
        starts = rows.offsets + self._pace.tokens
        if self._count:
            self._pace.tokens += 1
            self._pace.step = step
        for seq in due:
            self._remind(seq)
        return StepPlan(
            step, slots=rows.slots, generations=rows.generations, starts=starts, query_lens=rows.ones,
            samples=rows.samples, num_decode=self._count,
        )  # fmt: skip

    def _join(self, seq: Sequence) -> None:
        """Have one that is apart keep the pace."""
        del self._apart[seq.order]
        seq.keep(self._pace)
        place, end = self._place(seq), self._count
        self._columns[:, place + 1 : end + 1] = self._columns[:, place:end]
        self._columns[:, place] = seq.order, seq.slot, seq.generation, seq.own_planned
        self._count, self._offsets, self._rows = end + 1, self._offsets + seq.own_planned, None

    def _part(self, seq: Sequence) -> None:
        """Let a member go on alone."""
        self._forget(seq)
        self._offsets -= seq.own_planned
        seq.keep(None)
        place, end = self._place(seq), self._count
        self._columns[:, place : end - 1] = self._columns[:, place + 1 : end]
        self._count, self._rows = end - 1, None

    def _place(self, seq: Sequence) -> int:
        return int(self._columns[0, : self._count].searchsorted(seq.order))

    def _remind(self, seq: Sequence) -> None:
        """Note when a member is due."""
        now = self._pace.tokens
        further = now - seq.planned  # from tokens of the sequence to tokens of the pace
        needed, ahead, last = further + seq.reserved, further + self._ahead_at(seq) - 1, further + seq.kv_end - 1
        taken, asked = needed // self._turn * self._turn, -(-ahead // self._turn) * self._turn
        times = [taken if taken > now else needed]
        if ahead >= now:
            times.append(asked)
        if last >= now:
            times.append(last)
        tokens = min(times)
        self._due.setdefault(tokens, {})[seq.order] = seq
        self._due_at[seq.order] = tokens

    def _forget(self, seq: Sequence) -> None:
        """Take back what `_remind` has noted."""
        tokens = self._due_at.pop(seq.order)
        others = self._due[tokens]
        del others[seq.order]
        if not others:
            del self._due[tokens]

    def _make_rows(self) -> DecodeRows:
        _, slots, generations, offsets = self._columns[:, : self._count].copy()
        ones = np.ones(self._count, dtype=np.int64)
        self._rows = DecodeRows(slots, generations, offsets, ones, ones.astype(np.bool_))
        for array in self._rows:
            array.flags.writeable = False
        return self._rows
