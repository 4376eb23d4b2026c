"""Sequences that nobody shares: once memory is full, they take over what the oldest left, and nothing is mapped."""

import random

import pytest

from bladellm_runtime.kv.accounting import KvAccounting
from bladellm_runtime.kv.operations import MemoryPlan, Show
from bladellm_runtime.kv.spec import KvGroup, KvSpec

GRANULE, SLOTS = 8, 5


def accounting_of(granules: int, block: int, split: int = 0) -> KvAccounting:
    spec = KvSpec((KvGroup((0,), 64),), GRANULE, granules, SLOTS, granules * GRANULE, block, split)
    return KvAccounting(spec)


def run(accounting: KvAccounting, tokens: list[int], step: int) -> MemoryPlan:
    """One sequence from its beginning to its end; the plan of its only step."""
    admission = accounting.admit(tokens, len(tokens), 0)
    accounting.remember(admission.slot, tokens, len(tokens))
    plan = accounting.drain_ops()
    accounting.complete(step)
    accounting.release_slot(admission.slot, tokens, len(tokens))
    accounting.check()
    return plan


@pytest.mark.parametrize("block", [1, 2, 4])
@pytest.mark.parametrize("length", [3, 3 * GRANULE, 3 * GRANULE + 5])
def test_sequences_of_one_length_map_nothing_once_memory_is_full(block, length):
    granules = SLOTS * (-(-length // GRANULE))
    accounting = accounting_of(-(-granules // block) * block, block)
    shown, waited = [], []
    for step in range(1, 40):
        tokens = [random.randrange(10**6) for _ in range(length)]
        plan = run(accounting, tokens, step)
        shown.append(len(plan.views) + len(plan.ahead))
        waited.append(len(plan.views))
    assert sum(shown[:SLOTS]) >= SLOTS
    assert sum(waited[-3 * SLOTS :]) <= SLOTS, waited
    # The cache keeps nothing of three tokens, so memory is never full of them.
    assert length == 3 or sum(shown[-3 * SLOTS :]) <= SLOTS, shown


def test_what_others_share_stays():
    accounting = accounting_of(12, 1)
    common = list(range(2 * GRANULE))
    for step in range(1, 30):
        unique = [random.randrange(10**6) for _ in range(2 * GRANULE)]
        run(accounting, common + unique, 2 * step - 1)
        match = accounting.cache.match("", bytes(0), 0, 0)
        assert match.cached == 0
        admission = accounting.admit(common + unique[::-1], 4 * GRANULE, 0)
        assert admission.cached >= 2 * GRANULE
        accounting.drain_ops()
        accounting.complete(2 * step)
        accounting.release_slot(admission.slot, common + unique[::-1], 4 * GRANULE)


def test_blocks_that_begin_split_are_taken_for_single_granules():
    accounting = accounting_of(16, 4, split=2)
    first = accounting.admit(list(range(2 * GRANULE)), 2 * GRANULE, 0)
    second = accounting.admit(list(range(100, 100 + 4 * GRANULE)), 4 * GRANULE, 0)
    shows = {view.slot: view for view in accounting.drain_ops().views if isinstance(view, Show)}
    assert not shows[first.slot].whole
    assert max(shows[first.slot].granules) < 8
    assert shows[second.slot].whole
    assert min(shows[second.slot].granules) >= 8
