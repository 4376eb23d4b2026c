"""`TokenLog`: what decoding sequences got, kept in arrays for all of them until somebody asks for one's."""

import numpy as np

from bladellm_runtime.scheduler.plan import INVALID, Ints
from bladellm_runtime.scheduler.sequence import Sequence
from bladellm_runtime.wire.messages import TokenDeltas

STEPS = 32
"""Steps that the log has room for."""
NOBODY = 0
"""No generation of a slot."""


class TokenLog:
    """Takes tokens of sequences in DECODE that ask for nothing but tokens. They are not the last of their answers, as
    more are to be planned. Not taken, but to be looked at row by row, are those that may be stop tokens."""

    def __init__(self, num_slots: int, vocab_size: int) -> None:
        self._generations = np.full(num_slots, NOBODY, dtype=np.int64)
        """Of the sequence in each slot whose tokens are taken."""
        self._request_ids = np.zeros(num_slots, dtype=np.int64)
        self._sequences: list[Sequence | None] = [None] * num_slots
        self._stopped_by = np.zeros(vocab_size + 1, dtype=np.uint16)
        """How many of these sequences end with each token; the last place is that of `INVALID`, which ends all. However
        many tokens that are, looking a step's up takes as long."""
        self._stopped_by[INVALID] = 1
        self._tokens = np.full((STEPS, num_slots), INVALID, dtype=np.int64)
        """A ring; `INVALID` where a slot was not in the step, or its token was handed on."""
        self._places = list(self._tokens)
        self._emptied: list[list[Ints]] = [[] for _ in range(num_slots)]
        """What each slot had in the ring before, `INVALID` still in it."""
        self._rows: tuple[Ints, bytes] | None = None
        """The generations of the last step's rows, if all of these are taken as long as no sequence enters or leaves,
        and the ids of their requests."""
        self._step = 0
        self._share = -(-num_slots // STEPS)
        """Slots emptied in a step."""

    def enter(self, seq: Sequence) -> None:
        """A sequence decodes from now on."""
        if seq.params.logprobs is not None or seq.prepared.matcher is not None:
            return
        self._generations[seq.slot], self._request_ids[seq.slot] = seq.generation, seq.request_id
        self._stopped_by[self._stops(seq)] += 1
        self._sequences[seq.slot] = seq
        seq.log, self._rows = self, None

    def leave(self, seq: Sequence) -> None:
        """A sequence decodes no more."""
        if seq.log is not None:
            seq.known.extend(self.drain(seq.slot))
            self._generations[seq.slot] = NOBODY
            self._stopped_by[self._stops(seq)] -= 1
            self._sequences[seq.slot] = seq.log = self._rows = None

    def take(self, slots: Ints, generations: Ints, tokens: Ints) -> tuple[TokenDeltas | None, list[int]]:
        """Take what one token each of these slots is. Returns the deltas of those that were taken, and which rows the
        others are."""
        if self._rows is None or self._rows[0] is not generations or np.count_nonzero(self._stopped_by[tokens]):
            slots, tokens, others = self._pick(slots, generations, tokens)
            if not len(slots):
                return None, others
            request_ids = self._request_ids[slots].tobytes()
            self._rows = None if others else (generations, request_ids)
        else:
            (_, request_ids), others = self._rows, []
        self._make_room()
        self._places[self._step % STEPS][slots] = tokens
        return TokenDeltas(request_ids, tokens.tobytes()), others

    def _pick(self, slots: Ints, generations: Ints, tokens: Ints) -> tuple[Ints, Ints, list[int]]:
        """Slots and tokens of the rows that are taken, and the other rows."""
        taken = (self._stopped_by[tokens] == 0) & (self._generations[slots] == generations)
        if taken.all():
            return slots, tokens, []
        return slots[taken], tokens[taken], np.flatnonzero(~taken).tolist()

    def drain(self, slot: int) -> list[int]:
        """The tokens of the sequence in a slot since the last call."""
        tokens = np.concatenate([*self._emptied[slot], *self._empty(slot, slot + 1)])
        self._emptied[slot].clear()
        found: list[int] = tokens[tokens != INVALID].tolist()
        return found

    def _make_room(self) -> None:
        """Go on to the next place of the ring, which is empty then: all slots are emptied once in `STEPS` steps."""
        first = (self._step + 1) % STEPS * self._share
        sequences = self._sequences[first : first + self._share]
        if any(sequences):
            for slot, tokens in enumerate(self._empty(first, first + len(sequences)), first):
                if sequences[slot - first] is not None:
                    self._emptied[slot].append(tokens)
        self._step += 1

    def _empty(self, first: int, end: int) -> Ints:
        """Take what slots have out of the ring: [slots, `STEPS`], the oldest first."""
        ring, oldest = self._tokens[:, first:end], (self._step + 1) % STEPS
        tokens = np.concatenate((ring[oldest:], ring[:oldest]))
        ring[:] = INVALID
        return tokens.T

    def _stops(self, seq: Sequence) -> list[int]:
        return [token for token in seq.stops if token < len(self._stopped_by) - 1]
