"""What is cached, shared, copied and evicted: directed cases, each executed on KV memory on paper."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bladellm_runtime.kv import prompt_match
from bladellm_runtime.kv.operations import Copy
from bladellm_runtime.kv.prompt_match import COPY_TOKENS
from tests.kv.paper_engine import Engine, bytes_of, prompt, shows
from tests.kv.test_accounting import spec_of
from tests.support.cases import examples


@settings(max_examples=examples(150), deadline=None)
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


def test_part_of_a_block_is_found_behind_newer_prompts_that_begin_alike():
    """All prompts have the first token, as with a token for the beginning of every text."""
    engine = Engine(spec_of(4, 256, 4, 20, block=4))
    tokens = prompt(17)
    engine.serve(tokens)
    for index in range(30):
        engine.serve([tokens[0], 2000 + index, *prompt(16)])
    assert engine.serve([*tokens[:11], 1999, *prompt(9)]).cached == 11


def test_of_many_blocks_that_begin_alike_few_are_compared(monkeypatch):
    engine = Engine(spec_of(4, 512, 4, 20, block=4))
    beginning, compared = prompt(10), 0

    def count(one: bytes, other: bytes) -> int:
        nonlocal compared
        compared += 1
        return common(one, other)

    common = prompt_match._common
    monkeypatch.setattr(prompt_match, "_common", count)
    for index in range(100):
        compared = 0
        assert engine.serve([*beginning, 2000 + index, *prompt(8)]).cached == (10 if index else 0)
    assert compared <= prompt_match.CANDIDATES


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
