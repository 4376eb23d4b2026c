"""What is cached, shared, copied, swapped and forgotten: directed cases, each executed on KV memory on paper."""

import random
import zlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bladellm_runtime.kv.accounting import Admission, KvAccounting
from bladellm_runtime.kv.operations import Copy, MemoryPlan, Show, SwapIn, SwapOut
from bladellm_runtime.kv.prompt_match import COPY_TOKENS
from bladellm_runtime.kv.spec import KvSpec
from tests.kv.fake_memory import FakeMemory
from tests.kv.test_accounting import spec_of


def prompt(length: int, seed: int = 0) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(1000) for _ in range(length)]


def states(tokens: list[int]) -> list[int]:
    found, state = [], 0
    for token in tokens:
        state = zlib.crc32(token.to_bytes(4, "little"), state)
        found.append(state)
    return found


class Engine:
    """An accounting and the memory its plans are executed on, one plan at a time. Every slot is checked and filled in
    each step up to its known tokens."""

    def __init__(self, spec: KvSpec, **options: bool) -> None:
        self.accounting = KvAccounting(spec, **options)
        self.memory = FakeMemory(spec)
        self.live: dict[int, tuple[str, list[int], int]] = {}
        self.steps = 0
        self.spilled: list[SwapOut] = []

    def admit(self, tokens: list[int], key: str = "", room: int = 0) -> Admission:
        admission = self.accounting.admit(tokens, max(room, len(tokens)), 0, key)
        assert admission is not None
        self.live[admission.slot] = (key, tokens, admission.cached)
        self.accounting.remember(admission.slot, tokens, len(tokens))
        return admission

    def append(self, slot: int, tokens: list[int]) -> None:
        """Tokens that the next step decodes, all at once."""
        key, known, cached = self.live[slot]
        self.live[slot] = (key, known + tokens, cached)
        assert self.accounting.grow(slot, len(known + tokens))

    def step(self) -> MemoryPlan:
        plan = self.accounting.drain_ops()
        self.steps += 1
        self.spilled += [move for move in plan.moves if isinstance(move, SwapOut)]
        self.memory.apply(plan)
        for slot, (key, tokens, cached) in self.live.items():
            wanted = [(key, state) for state in states(tokens)]
            assert [self.memory.read(slot, p) for p in range(cached)] == wanted[:cached]
            for position in range(cached, len(tokens)):
                self.memory.write(slot, position, wanted[position])
            self.live[slot] = (key, tokens, len(tokens))
        self.accounting.complete(self.steps)
        self.accounting.check()
        return plan

    def release(self, slot: int, **how: bool) -> None:
        _, tokens, written = self.live.pop(slot)
        self.accounting.release_slot(slot, tokens, written, **how)
        self.accounting.check()

    def serve(self, tokens: list[int], key: str = "", answer: list[int] | None = None, **how: bool) -> Admission:
        """A request from beginning to end."""
        admission = self.admit(tokens, key)
        self.step()
        if answer:
            self.append(admission.slot, answer)
            self.step()
        self.release(admission.slot, **how)
        return admission

    def cached(self, tokens: list[int], key: str = "") -> int:
        """What a request with these tokens and one more finds; it is cached itself then."""
        admission = self.admit([*tokens, 1000], key)
        self.step()
        self.release(admission.slot)
        return admission.cached


def shows(plan: MemoryPlan) -> list[Show]:
    return [view for view in plan.views if isinstance(view, Show)]


@settings(max_examples=150, deadline=None)
@given(
    size=st.sampled_from([1, 3, 4, 6]),
    prompts=st.lists(
        st.tuples(st.sampled_from(["", "a"]), st.lists(st.integers(0, 1), min_size=1, max_size=25)), max_size=8
    ),
)
def test_what_is_cached_is_the_longest_common_beginning(size, prompts):
    engine = Engine(spec_of(size, 300, 2, 30))
    for index, (key, tokens) in enumerate(prompts):
        expected = 0
        for other_key, other in prompts[:index]:
            if other_key == key:
                common = next((i for i, (a, b) in enumerate(zip(tokens[:-1], other, strict=False)) if a != b), None)
                common = min(len(tokens) - 1, len(other)) if common is None else common
                full = common // size * size
                expected = max(expected, common if common - full >= COPY_TOKENS else full)
        assert engine.serve(tokens, key).cached == expected


def test_two_salts_never_share():
    engine = Engine(spec_of(4, 60, 4, 20))
    tokens = prompt(28)
    engine.serve(tokens, "one")
    assert engine.cached(tokens, "two") == 0
    assert engine.cached(tokens) == 0
    assert engine.cached(tokens, "one") == 28
    first, second = engine.admit(tokens, "one"), engine.admit(tokens, "two")
    engine.step()
    shown = [set(engine.memory.slots[slot][:7]) for slot in (first.slot, second.slot)]
    assert not shown[0] & shown[1]


def test_tokens_are_compared_to_the_last_not_only_where_they_are_looked_up():
    """Units are looked up by their first granule: one that differs behind it is found there and must not be shown."""
    engine = Engine(spec_of(4, 64, 4, 20, block=4))
    tokens = prompt(33)
    original = set(engine.memory.slots[engine.serve(tokens).slot][:8])
    for changed in (5, 15, 31):
        other = tokens.copy()
        other[changed] += 1
        admission = engine.admit(other)
        engine.step()
        assert len(original.intersection(engine.memory.slots[admission.slot][:9])) == changed // 16 * 4
        assert admission.cached == changed
        engine.release(admission.slot)


def test_the_least_recently_used_goes_first_and_leaves_before_parents():
    engine = Engine(spec_of(4, 12, 4, 12))
    old, new = prompt(16, 1), prompt(16, 2)
    engine.serve(old)
    engine.serve(new)
    slot = engine.admit(prompt(24, 3)).slot
    assert (engine.accounting.cache.idle, engine.accounting.pool.free) == (6, 0)
    engine.step()
    engine.release(slot)
    found = engine.accounting.cache.match("", b"".join(t.to_bytes(4, "little") for t in old), 16, 0)
    assert found.length == 8, "its last two granules went, what they follow is there"
    assert engine.cached(new[:15]) >= 12


def test_use_makes_recent():
    engine = Engine(spec_of(4, 12, 4, 12))
    first, second = prompt(16, 1), prompt(16, 2)
    engine.serve(first)
    engine.serve(second)
    assert engine.serve([*first, 5]).cached == 16
    engine.serve(prompt(20, 3))
    matches = [engine.accounting.cache.match("", bytes_of(tokens), 16, 0).length for tokens in (first, second)]
    assert matches[0] == 16
    assert matches[1] < 16


def bytes_of(tokens: list[int]) -> bytes:
    return b"".join(token.to_bytes(4, "little") for token in tokens)


@pytest.mark.parametrize("common", [3, 4, 7, 8, 11, 17, 31])
def test_part_of_a_block_is_copied(common):
    engine = Engine(spec_of(8, 64, 4, 20, block=4))
    tokens = prompt(32)
    assert engine.serve(tokens, answer=[7]).cached == 0
    admission = engine.admit([*tokens[:common], 1000, 1001])
    plan = engine.step()
    copies = [move for move in plan.moves if isinstance(move, Copy)]
    assert admission.cached == (common if common >= COPY_TOKENS else 0)
    assert sum(copy.tokens for copy in copies) == admission.cached
    assert all(copy.tokens == 8 for copy in copies[:-1])


def test_a_tail_is_copied_not_shared():
    engine = Engine(spec_of(8, 64, 4, 20))
    tokens = prompt(22)
    engine.serve(tokens)
    admission = engine.admit([*tokens, 1000])
    plan = engine.step()
    assert admission.cached == 22
    (copy,) = plan.moves
    assert copy.tokens == 6
    assert copy.target == engine.memory.slots[admission.slot][2] != copy.source


def test_who_is_refused_enters_as_soon_as_anything_makes_room():
    engine = Engine(spec_of(4, 10, 4, 10))
    tokens, other = prompt(24), prompt(32, 1)
    first = engine.admit(tokens[:20])
    assert engine.accounting.admit(other, 32, 0) is None
    assert engine.accounting.admit(tokens, 24, 5) is None
    engine.step()
    assert engine.accounting.admit(tokens, 24, 5) is None
    assert engine.accounting.admit(tokens, 24, 4) is not None, "less headroom is asked for"
    assert engine.accounting.admit(other, 32, 0) is None
    engine.release(first.slot)
    assert engine.accounting.admit(other, 32, 0) is None
    engine.accounting.release_slot(1 - first.slot, tokens, 20)
    assert engine.accounting.admit(other, 32, 0) is not None


def test_who_is_refused_enters_when_more_of_it_is_cached():
    engine = Engine(spec_of(4, 10, 4, 10))
    tokens = prompt(29)
    slot = engine.accounting.admit(tokens[:28], 28, 0).slot
    assert engine.accounting.admit(tokens, 29, 0) is None
    engine.accounting.remember(slot, tokens, 28)
    assert engine.accounting.admit(tokens, 29, 0).cached == 28


def test_what_is_copied_stays_until_the_move_is_done():
    engine = Engine(spec_of(8, 6, 2, 6))
    tokens = prompt(14)
    engine.serve(tokens)
    assert engine.accounting.admit([*tokens, 1000], 24, 0).cached == 14
    assert (engine.accounting.used, engine.accounting.moving) == (4, 1)
    other = prompt(20, 1)
    assert engine.accounting.admit(other, 20, 0) is None
    engine.accounting.drain_ops()
    engine.accounting.complete(1)
    assert engine.accounting.admit(other, 20, 0) is None
    engine.accounting.complete(2)
    assert (engine.accounting.used, engine.accounting.moving) == (3, 0)
    assert engine.accounting.admit(other, 20, 0) is not None


def test_nothing_is_copied_where_there_is_no_room_for_the_original():
    engine = Engine(spec_of(8, 4, 2, 4))
    tokens = prompt(14)
    engine.serve(tokens)
    assert engine.admit([*tokens, 1000], room=32).cached == 8
    assert not engine.step().moves


def test_a_conversation_takes_its_slot_again_and_maps_only_what_is_new():
    engine = Engine(spec_of(4, 200, 8, 60))
    tokens = prompt(21)
    for seed in (1, 2, 3):
        engine.admit(prompt(9, seed))
    first = engine.serve(tokens, answer=prompt(11, 4))
    tokens += prompt(11, 4)
    for turn in range(4):
        engine.serve(prompt(13, 10 + turn))
        admission = engine.admit([*tokens, 1000])
        plan = engine.step()
        assert admission.slot == first.slot
        assert admission.cached == len(tokens)
        assert [show for show in shows(plan) if show.slot == first.slot and show.position < len(tokens) // 4] == []
        assert sum(len(show.granules) for show in shows(plan)) <= 1
        engine.append(admission.slot, prompt(7, 20 + turn))
        engine.step()
        tokens += [1000, *prompt(7, 20 + turn)]
        engine.release(admission.slot)


def test_a_long_hit_is_mapped_block_by_block():
    engine = Engine(spec_of(128, 600, 2, 300, block=16))
    tokens = prompt(32 * 1024 + 300)
    engine.admit(tokens)
    engine.step()
    second = engine.admit([*tokens, 1])
    plan = engine.step()
    assert second.cached == 32 * 1024 + 300 - 44
    assert sum(show.whole for show in shows(plan)) == 16
    assert len(shows(plan)) <= 17
    assert not plan.moves
    assert engine.accounting.cache.shared == 256 + 2


def spill(engine: Engine) -> None:
    """Idle steps, until nothing is left to copy to the host."""
    moves = [engine.step().moves for _ in range(30)]
    assert moves[-1] == []


@pytest.mark.parametrize("block", [1, 4])
def test_what_is_evicted_comes_back_from_the_host(block):
    engine = Engine(spec_of(4, 16, 4, 16, block=block, host=16))
    tokens = prompt(49)
    engine.serve(tokens)
    engine.serve(prompt(8, 5))
    spill(engine)
    assert engine.accounting.swap.used >= 12, "whole paths are copied, not only their ends"
    engine.serve(prompt(63, 6))
    assert engine.accounting.cache.match("", bytes_of(tokens), 49, 0).path[0].unit is None
    admission = engine.admit(tokens)
    plan = engine.step()
    assert admission.cached == 48
    assert sum(isinstance(move, SwapIn) for move in plan.moves) == 12


def test_host_copies_come_to_rest():
    """More idle units than places: those evicted first are copied, and then nothing moves any more."""
    engine = Engine(spec_of(4, 20, 4, 20, host=5))
    for seed in range(6):
        engine.serve(prompt(12, seed))
    spill(engine)
    assert engine.accounting.swap.used == 5
    before = len(engine.spilled)
    spill(engine)
    assert len(engine.spilled) == before


def test_what_is_computed_again_is_not_copied_before_it_is_written():
    """A node that was on the host only takes a unit that the next step writes."""
    engine = Engine(spec_of(8, 6, 3, 6, host=6))
    tokens = prompt(17)
    engine.serve(tokens)
    engine.serve(prompt(31, 1))
    spill(engine)
    engine.serve(prompt(47, 2))
    (node, _) = engine.accounting.cache.match("", bytes_of(tokens), 16, 0).path
    assert node.unit is None
    admission = engine.accounting.admit(tokens, 17, 0, "", False)
    assert admission.cached == 0
    engine.accounting.remember(admission.slot, tokens, 17)
    other = engine.accounting.admit([*tokens[:6], 1000], 7, 0)
    assert other.cached == 0
    engine.accounting.check()


@pytest.mark.parametrize("ended", [True, False])
def test_a_failed_request_leaves_nothing_to_hit(ended):
    engine = Engine(spec_of(4, 60, 4, 20))
    tokens = prompt(22)
    if ended:
        engine.serve(tokens, valid=False)
    else:
        first, second = engine.admit(tokens), engine.admit([*tokens, 3])
        assert second.cached == 20
        engine.step()
        engine.release(first.slot, valid=False)
        assert engine.accounting.cache.shared == 0
    assert engine.cached(tokens) == 0
    if not ended:
        engine.append(second.slot, prompt(9, 1))
        engine.accounting.remember(second.slot, engine.live[second.slot][1], 32)
        engine.step()
        engine.release(second.slot)
        assert engine.accounting.cache.idle == 5, "only what was computed since"
        engine.accounting.reset_prompt_cache()
        assert engine.accounting.pool.free == 60


def test_a_failed_request_takes_nothing_from_those_that_were_right():
    engine = Engine(spec_of(4, 60, 4, 20))
    tokens = prompt(20)
    engine.serve(tokens)
    engine.serve([*tokens, *prompt(10, 1)], valid=False)
    assert engine.cached(tokens) == 20
    assert engine.cached([*tokens, *prompt(10, 1)]) == 20


def test_a_request_that_fails_on_what_an_aborted_one_left_takes_it_along():
    engine = Engine(spec_of(4, 60, 4, 20))
    tokens = prompt(20)
    engine.serve(tokens, proven=False)
    assert engine.serve([*tokens, *prompt(10, 1)], valid=False).cached == 20
    assert engine.cached(tokens) == 0


def test_salts_leave_nothing_behind():
    engine = Engine(spec_of(4, 20, 4, 20))
    for number in range(200):
        engine.serve(prompt(9, number), f"salt {number}")
    assert len(engine.accounting.cache._roots) <= 20
    for number in range(200):
        engine.serve(prompt(9, number), f"salt {number}", valid=False)
    engine.accounting.reset_prompt_cache()
    assert engine.accounting.cache._roots == {}


def test_the_order_of_use_does_not_grow_with_time():
    engine = Engine(spec_of(4, 20, 2, 20))
    for _ in range(300):
        engine.serve(prompt(14))
    assert len(engine.accounting.cache._leaves) < 200


def test_two_equal_prompts_at_once_are_cached_once():
    engine = Engine(spec_of(4, 40, 4, 10))
    tokens = prompt(18)
    first = engine.accounting.admit(tokens, 30, 0)
    second = engine.accounting.admit(tokens, 30, 0)
    assert (first.cached, second.cached) == (0, 0), "neither has written anything"
    for admission in (first, second):
        engine.live[admission.slot] = ("", tokens, 0)
        engine.accounting.remember(admission.slot, tokens, 18)
    engine.step()
    assert engine.accounting.used == 16
    engine.append(first.slot, [1] * 6)
    engine.append(second.slot, [2] * 6)
    engine.step()
    engine.release(first.slot)
    engine.release(second.slot)
    # Four granules in common; then what each has alone, two of them full.
    assert engine.accounting.cache.idle == 4 + 2 + 2
    assert engine.cached(tokens + [1] * 6) == 24
    assert engine.cached(tokens + [2] * 6) == 24


def test_what_is_admitted_in_the_step_that_writes_is_shared():
    engine = Engine(spec_of(4, 40, 4, 10))
    tokens = prompt(18)
    engine.admit(tokens)
    assert engine.admit(tokens).cached == 16, "shown, as the step writes it before it is read; never copied"
    assert not [move for move in engine.step().moves if isinstance(move, Copy)]


def test_a_sequence_that_gave_way_finds_its_own_granules():
    engine = Engine(spec_of(4, 20, 4, 20))
    tokens = prompt(17)
    slot = engine.admit(tokens, room=18).slot
    engine.step()
    engine.append(slot, [5, 6, 7, 8, 9])
    engine.step()
    held = list(engine.memory.slots[slot][:5])
    engine.release(slot)
    back = engine.admit([*tokens, 5, 6, 7, 8, 9, 10])
    plan = engine.step()
    assert (back.slot, back.cached) == (slot, 20)
    assert engine.memory.slots[slot][:5] == held
    assert sum(len(show.granules) for show in shows(plan)) <= 1


def test_what_is_mapped_ahead_goes_to_who_needs_it():
    engine = Engine(spec_of(4, 10, 2, 10))
    first = engine.admit(prompt(4), room=4)
    engine.accounting.map_ahead(first.slot, 2)
    assert engine.accounting.granules.ahead == 1
    assert [show.granules for show in engine.step().ahead] == [
        [engine.accounting.granules.slots[first.slot].view.at(1)]
    ]
    assert (engine.accounting.used, engine.accounting.available()) == (1, 9)
    second = engine.accounting.admit(prompt(36, 1), 36, 0)
    assert second is not None
    assert (engine.accounting.available(), engine.accounting.granules.ahead) == (0, 0)
    assert not engine.accounting.grow(first.slot, 5)


@pytest.mark.parametrize("drained", [True, False])
def test_what_is_mapped_ahead_needs_no_view_when_it_is_used(drained):
    engine = Engine(spec_of(4, 10, 2, 10))
    slot = engine.admit(prompt(4), room=4).slot
    engine.accounting.map_ahead(slot, 2)
    if drained:
        engine.step()
    assert engine.accounting.grow(slot, 5)
    plan = engine.step()
    assert not plan.ahead
    assert (len(shows(plan)) == 0) == drained


def test_a_slot_does_not_count_on_a_view_that_was_to_come_later():
    """A sequence leaves before the plan that maps a granule ahead for it is drained, and another takes its slot."""
    engine = Engine(spec_of(4, 10, 1, 10), prompt_cache=False)
    slot = engine.admit(prompt(4), room=4).slot
    engine.step()
    engine.accounting.map_ahead(slot, 2)
    engine.release(slot)
    engine.admit(prompt(12, 1))
    plan = engine.step()
    assert sum(len(show.granules) for show in shows(plan)) == 2
    assert not plan.ahead


def test_a_granule_is_not_taken_from_a_whole_block_that_a_slot_showed():
    engine = Engine(spec_of(4, 32, 2, 10, block=4), prompt_cache=False)
    slot = engine.admit(prompt(16)).slot
    other = engine.admit(prompt(3, 1)).slot
    engine.step()
    engine.release(slot)
    assert engine.admit(prompt(3, 2)).slot == slot
    engine.step()
    assert engine.memory.granule(slot, 0) // 4 == engine.memory.granule(other, 0) // 4
    assert engine.accounting.pool.free_blocks == 7


def test_nothing_is_mapped_ahead_early_in_tight_memory_or_beyond_the_end():
    engine = Engine(spec_of(8, 10, 2, 3))
    slot = engine.admit(prompt(8), room=8).slot
    engine.accounting.map_ahead(slot, 3)
    assert engine.accounting.granules.ahead == 0
    engine.accounting.grow(slot, 24)
    engine.accounting.map_ahead(slot, 24)
    assert engine.accounting.granules.ahead == 0
    tight = Engine(spec_of(8, 8, 2, 8))
    slot = tight.admit(prompt(56), room=56).slot
    tight.accounting.map_ahead(slot, 56)
    assert tight.accounting.granules.ahead == 0


def test_without_a_cache_a_slot_takes_the_granules_it_shows():
    engine = Engine(spec_of(4, 20, 4, 10), prompt_cache=False)
    first = engine.serve(prompt(30, 1))
    assert engine.accounting.pool.free == 20
    second = engine.admit(prompt(30, 2))
    assert second.slot == first.slot
    assert shows(engine.step()) == []


def test_long_prompts_get_whole_blocks_in_a_full_cache():
    engine = Engine(spec_of(4, 400, 6, 100, block=8))
    draw = random.Random(0)
    whole = total = 0
    for seed in range(200):
        engine.admit(prompt(draw.choice([13, 100, 200, 300]), seed))
        for other in list(engine.live):
            engine.append(other, prompt(draw.randrange(1, 9), seed))
        found = shows(engine.step())
        if seed >= 50:
            whole += sum(len(show.granules) for show in found if show.whole)
            total += sum(len(show.granules) for show in found)
        if len(engine.live) == 4:
            engine.release(draw.choice(list(engine.live)))
    assert engine.accounting.pool.free < 80
    assert whole > 0.7 * total, "pieces take over the pool"


def test_check_finds_wrong_counts():
    engine = Engine(spec_of(4, 20, 4, 10))
    slot = engine.admit(prompt(9)).slot
    accounting = engine.accounting
    for owner, name in ((accounting.cache, "idle"), (accounting.cache, "shared"), (accounting.pool, "free")):
        setattr(owner, name, getattr(owner, name) + 1)
        with pytest.raises(RuntimeError):
            accounting.check()
        setattr(owner, name, getattr(owner, name) - 1)
    accounting.check()
    accounting.granules.slots[slot].view.granules[0] += 1
    with pytest.raises(RuntimeError, match="does not show"):
        accounting.check()
