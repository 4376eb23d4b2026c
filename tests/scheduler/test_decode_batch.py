"""The decode rows of a batch, planned together, against every sequence counted by itself."""

import random
from array import array

import pytest

from bladellm_runtime.request import SamplingParams
from bladellm_runtime.scheduler.decode_batch import DecodeBatch
from bladellm_runtime.scheduler.sequence import Sequence

SLOTS = 9


def sequence(order: int, slot: int, granule: int) -> Sequence:
    planned = random.randrange(1, 4 * granule)
    return Sequence(
        order=order, request_id=order, params=SamplingParams(), choice=0, known=array("i", [0]), prompt_len=1,
        max_len=10**6, kv_end=planned + random.randrange(1, 8 * granule), stops=frozenset(), slot=slot,
        generation=order + 1, own_planned=planned, reserved=-(-planned // granule) * granule,
    )  # fmt: skip


@pytest.mark.parametrize(("granule", "turn"), [(1, 1), (2, 1), (8, 1), (64, 4), (100, 6)])
def test_rows_are_those_of_sequences_that_are_looked_at_one_by_one(granule, turn):
    """Each is due where it must be, and within a turn after the half of its last granule; else only with others."""
    batch, live, planned, apart, half_full = DecodeBatch(granule, SLOTS), {}, {}, set(), {}
    for step in range(1, 2000):
        free = set(range(SLOTS)) - {seq.slot for seq in live.values()}
        if free and random.random() < 0.2:
            live[step] = sequence(step, random.choice(sorted(free)), granule)
            planned[step] = live[step].planned
            batch.enter(live[step])
            apart.add(live[step])
        due = batch.due()
        assert due == sorted(due, key=lambda seq: seq.order)
        for seq in live.values():
            must = planned[seq.order] in (seq.reserved, seq.kv_end - 1) or seq in apart
            assert not must or seq in due, "an event is missed"
            assert must or seq not in due or batch._pace.tokens % turn == 0, "it could have waited for others"
            if seq.reserved - planned[seq.order] <= granule // 2 - turn and seq not in apart:
                assert half_full[seq.order] == seq.reserved or (batch.thinks_ahead(seq) and seq in due)
        left_out = [seq for seq in due if seq.planned == seq.reserved and random.random() < 0.3]
        for seq in due:
            assert batch.thinks_ahead(seq) == (planned[seq.order] + 1 >= seq.reserved - granule // 2)
            if seq in left_out:
                batch.leave_out(seq)
            elif seq.planned == seq.reserved or (batch.needs_soon(seq) and random.random() < 0.8):
                seq.reserved += granule
            half_full[seq.order] = seq.reserved if batch.thinks_ahead(seq) else None
        plan = batch.advance(step, [seq for seq in due if seq not in left_out])
        apart = set(left_out)
        mine = [seq for order, seq in sorted(live.items()) if seq not in left_out]
        assert plan.slots.tolist() == [seq.slot for seq in mine]
        assert plan.generations.tolist() == [seq.generation for seq in mine]
        assert plan.starts.tolist() == [planned[seq.order] for seq in mine]
        for seq in mine:
            planned[seq.order] += 1
            assert seq.last_step == step
        assert {order: seq.planned for order, seq in live.items()} == planned
        assert batch.planned == sum(planned.values())
        for seq in mine:
            if seq.planned == seq.kv_end or random.random() < 0.01:
                batch.leave(seq)
                assert (seq.planned, seq.last_step) == (planned.pop(seq.order), step)
                del live[seq.order]
        apart &= set(live.values())
        assert len(batch) == len(live)


def test_steps_of_the_same_rows_share_arrays_that_cannot_be_written_to():
    batch = DecodeBatch(8, SLOTS)
    seqs = [sequence(order, order, 8) for order in range(3)]
    for seq in seqs:
        seq.reserved = seq.kv_end = 1000
        batch.enter(seq)
    first, second = (batch.advance(step, batch.due()) for step in (1, 2))
    for name in ("slots", "generations", "query_lens", "samples"):
        assert getattr(second, name) is getattr(first, name)
        assert not getattr(first, name).flags.writeable
    batch.leave(seqs[1])
    third = batch.advance(3, [])
    assert third.slots.tolist() == [0, 2]
