"""Random sequences over tiny pools: the counts are exact, and every slot has its own tokens when plans are executed."""

import zlib
from collections import deque
from dataclasses import dataclass

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from bladellm_runtime.kv.accounting import KvAccounting
from bladellm_runtime.kv.operations import MemoryPlan
from bladellm_runtime.kv.spec import KvGroup, KvSpec
from tests.kv.fake_memory import FakeMemory

KEYS = ["", "", "", "a"]


def spec_of(size: int, granules: int, slots: int, longest: int, block: int = 1, host: int = 0) -> KvSpec:
    return KvSpec((KvGroup((0,), 64),), size, granules, slots, longest * size, block, host_granules=host)


@dataclass
class Live:
    """A live sequence: its tokens, of which `written` are in a plan, and the last plan that touches its memory."""

    key: str
    writer: int
    tokens: list[int]
    written: int
    last_plan: int = 0


@dataclass(frozen=True)
class Row:
    slot: int
    start: int
    end: int


class AccountingMachine(RuleBasedStateMachine):
    """What a scheduler could do, in any order, with up to two plans in flight.

    KV memory holds for each token (key, a hash of it and all before it, who wrote it, where).
    """

    @initialize(
        size=st.sampled_from([1, 3, 4]),
        granules=st.one_of(st.integers(5, 19), st.integers(1, 40)),
        slots=st.one_of(st.integers(2, 5), st.integers(1, 4)),
        longest=st.one_of(st.integers(5, 12), st.integers(1, 12)),
        block=st.sampled_from([1, 2, 4]),
        host=st.sampled_from([0, 0, 2, 5, 30]),
        shares=st.sampled_from([True, True, True, False]),
        prompt_cache=st.sampled_from([True, True, True, False]),
        seed=st.integers(0, 99),
    )
    def start(self, size, granules, slots, longest, block, host, shares, prompt_cache, seed):
        self.spec = spec_of(size, granules, slots, longest, block, host)
        self.accounting = KvAccounting(self.spec, shares=shares, prompt_cache=prompt_cache)
        self.caching = shares and prompt_cache
        self.memory = FakeMemory(self.spec, shares=shares, seed=seed)
        self.live: dict[int, Live] = {}
        self.rows: list[Row] = []
        self.in_flight: deque[tuple[MemoryPlan, list[Row]]] = deque()
        self.drained = self.completed = self.writers = 0
        self.prompts: list[list[int]] = []
        self.tainted: set[int] = set()
        self.proven: set[tuple] = set()
        # Slots whose cached tokens are checked once the plan is executed, and who had failed when they were admitted:
        # who fails later may be shared already.
        self.admitted: dict[int, frozenset[int]] = {}

    @rule(
        fresh=st.lists(st.integers(0, 1), max_size=12),
        data=st.data(),
        key=st.sampled_from(KEYS),
        more=st.integers(0, 4),
        headroom=st.sampled_from([0, 0, 0, 1, 3]),
        read=st.sampled_from([True, True, True, False]),
    )
    def admit(self, fresh, data, key, more, headroom, read):
        old = data.draw(st.sampled_from(self.prompts[-12:] or [[]]))
        keep = data.draw(st.one_of(st.just(len(old)), st.integers(0, len(old))))
        tokens = (old[:keep] + fresh or [0])[: self.spec.max_tokens]
        room = len(tokens) + more
        before, available = self.state(), self.accounting.available()
        admission = self.accounting.admit(tokens, room, headroom, key, read)
        possible = len(self.live) < self.spec.num_slots and room <= self.spec.max_tokens
        plain = self.spec.granules(room) + headroom <= available
        if admission is None:
            assert not (possible and plain), "a sequence that fits even without the prompt cache is refused"
            assert self.state() == before
            return
        assert possible
        assert plain or self.caching
        assert self.accounting.available() >= headroom
        assert 0 <= admission.cached < len(tokens)
        assert admission.cached == 0 or (self.caching and read)
        assert admission.slot not in self.live
        self.prompts.append(tokens)
        self.writers += 1
        self.live[admission.slot] = Live(key, self.writers, tokens, admission.cached)
        self.admitted[admission.slot] = frozenset(self.tainted)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), count=st.integers(1, 14), token=st.integers(0, 1))
    def write(self, data, count, token):
        """A prefill chunk or a decode row."""
        self.add_row(data.draw(st.sampled_from(sorted(self.live))), count, token)

    @precondition(lambda self: self.live and len(self.in_flight) < 2)
    @rule(count=st.integers(1, 60), token=st.integers(0, 1))
    def step(self, count, token):
        """A row for every sequence, executed."""
        for slot in self.live:
            self.add_row(slot, count, token)
        self.execute()

    @precondition(lambda self: self.live)
    @rule(valid=st.sampled_from([True, True, True, False]))
    def finish(self, valid):
        """Complete everything; all sequences end, oldest first."""
        self.execute()
        while self.in_flight:
            self.complete()
        for slot in list(self.live):
            self.release_slot(slot, valid, True)

    def add_row(self, slot, count, token):
        seq = self.live[slot]
        room = self.accounting.needed(slot) * self.spec.granule_tokens
        end = min(seq.written + count, room)
        if end <= seq.written or any(row.slot == slot for row in self.rows):
            return
        seq.tokens = seq.tokens + [token] * (end - len(seq.tokens))
        self.rows.append(Row(slot, seq.written, end))
        seq.written, seq.last_plan = end, self.drained + 1
        self.accounting.remember(slot, seq.tokens, end)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), more=st.integers(-3, 14))
    def grow(self, data, more):
        slot = data.draw(st.sampled_from(sorted(self.live)))
        needed = self.accounting.needed(slot)
        tokens = max(0, needed * self.spec.granule_tokens + more)
        before = self.state()
        added = max(0, self.spec.granules(tokens) - needed)
        possible = added == 0 or (tokens <= self.spec.max_tokens and added <= self.accounting.available())
        assert self.accounting.grow(slot, tokens) == possible
        if possible:
            assert self.accounting.needed(slot) == needed + added
            assert self.accounting.available() == before["available"] - added
        else:
            assert self.state() == before

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def map_ahead(self, data):
        slot = data.draw(st.sampled_from(sorted(self.live)))
        before = self.accounting.available()
        self.accounting.map_ahead(slot, self.live[slot].written)
        assert self.accounting.available() == before

    @precondition(lambda self: self.live)
    @rule(data=st.data(), valid=st.sampled_from([True, True, True, False]), proven=st.booleans())
    def release(self, data, valid, proven):
        idle = [slot for slot, seq in self.live.items() if seq.last_plan <= self.completed]
        if idle:
            self.release_slot(data.draw(st.sampled_from(sorted(idle))), valid, proven)

    def release_slot(self, slot, valid, proven):
        seq = self.live.pop(slot)
        # Of a sequence that no step has run nothing was sampled.
        proven = proven and slot not in self.admitted
        if slot not in self.admitted:
            if not valid:
                self.tainted.add(seq.writer)
            elif proven:
                self.proven |= {self.memory.read(slot, position) for position in range(seq.written)}
        self.admitted.pop(slot, None)
        self.accounting.release_slot(slot, seq.tokens, seq.written, valid=valid, proven=proven)
        with pytest.raises(ValueError, match="not live"):
            self.accounting.release_slot(slot)

    @precondition(lambda self: len(self.in_flight) < 2)
    @rule()
    def execute(self):
        """Drain a plan and run its step."""
        plan = self.accounting.drain_ops()
        self.drained += 1
        busy = [(row.slot, row.end) for _, rows in self.in_flight for row in rows]
        self.memory.apply(plan, busy, [move for earlier, _ in self.in_flight for move in earlier.moves])
        for row in self.rows:
            self.run(row)
        self.in_flight.append((plan, self.rows))
        self.rows = []
        for slot, seq in self.live.items():
            self.check_contents(slot, seq, seq.written)
        self.admitted.clear()

    def run(self, row):
        seq = self.live[row.slot]
        self.check_contents(row.slot, seq, row.start)
        for position in range(row.start, row.end):
            granule = self.memory.granule(row.slot, position)
            self.check_write(row.slot, position, granule)
            self.memory.write(row.slot, position, (seq.key, self.states(seq)[position], seq.writer, position))

    def check_write(self, slot, position, granule):
        """Nobody else needs the granule, but who was admitted for this very step and shares all of its tokens."""
        size, seq = self.spec.granule_tokens, self.live[slot]
        index = position // size
        for number, other in self.live.items():
            needed = self.memory.slots[number][: self.accounting.needed(number)]
            if number != slot and granule in needed:
                assert number in self.admitted
                assert needed.index(granule) == index
                assert other.key == seq.key
                end = (index + 1) * size
                assert other.tokens[:end] == seq.tokens[:end], "a granule of another live sequence is written"

    def check_contents(self, slot, seq, end):
        states = self.states(seq)
        for position in range(end):
            found = self.memory.read(slot, position)
            assert found is not None, "a token that was never written"
            assert found[:2] == (seq.key, states[position]), "the KV of another prefix"
            if slot in self.admitted:
                failed = found[2] in self.admitted[slot]
                assert found in self.proven or not failed, "what failed is used again"

    def states(self, seq):
        states, state = [], 0
        for token in seq.tokens:
            state = zlib.crc32(bytes([token]), state)
            states.append(state)
        return states

    @precondition(lambda self: self.in_flight)
    @rule()
    def complete(self):
        self.in_flight.popleft()
        self.completed += 1
        self.accounting.complete(self.completed)

    @precondition(lambda self: not self.in_flight and not self.rows)
    @rule()
    def reset(self):
        self.accounting.reset_prompt_cache()
        assert self.accounting.cache.idle == 0
        assert self.accounting.swap.used == 0

    @invariant()
    def counts(self):
        if not hasattr(self, "accounting"):
            return
        accounting = self.accounting
        accounting.check()
        views = {slot: accounting.granules.slots[slot].view.granules for slot in self.live}
        distinct = {granule for slot, view in views.items() for granule in view[: accounting.needed(slot)]}
        assert accounting.used == len(distinct) + accounting.moving
        assert accounting.live == len(self.live)
        assert accounting.available() == accounting.pool.free + accounting.cache.idle + accounting.granules.ahead
        if not self.caching:
            assert accounting.cache.idle == accounting.cache.shared == 0
        assert accounting.used <= sum(accounting.needed(slot) for slot in self.live) + accounting.moving

    def state(self):
        accounting = self.accounting
        return {
            "available": accounting.available(),
            "free": accounting.pool.free,
            "used": accounting.used,
            "idle": accounting.cache.idle,
            "needed": [accounting.needed(slot) for slot in range(self.spec.num_slots)],
            "views": [list(slot.view.granules) for slot in accounting.granules.slots],
            "plan": repr(accounting.granules.plan),
        }

    def teardown(self):
        if not hasattr(self, "accounting"):
            return
        self.execute()
        while self.in_flight:
            self.complete()
        for slot in list(self.live):
            self.release_slot(slot, True, False)
        self.execute()
        while self.in_flight:
            self.complete()
        self.reset()
        self.counts()
        assert self.accounting.pool.free == self.spec.num_granules
        assert list(self.accounting.cache.nodes()) == []
        assert not self.accounting.cache._roots


QUICK = settings(max_examples=50, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck))
TestAccounting = AccountingMachine.TestCase
TestAccounting.settings = QUICK


@pytest.mark.slow
@pytest.mark.timeout(900)
class TestAccountingLong(AccountingMachine.TestCase):
    settings = settings(QUICK, max_examples=1500, stateful_step_count=80, report_multiple_bugs=False)
