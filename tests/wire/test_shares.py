"""Deltas of many requests in one: taken apart, and divided between front ends."""

import random

import pytest

from bladellm_runtime.wire.messages import FRONT_END_SHIFT, RequestDelta, TokenDeltas, one_by_one
from bladellm_runtime.wire.shares import shares_of


def some_pairs(front_ends: list[int]) -> list[tuple[int, int]]:
    return [
        ((random.choice(front_ends) << FRONT_END_SHIFT) + random.randrange(2**40), random.randrange(-1, 2**20))
        for _ in range(random.randrange(1, 40))
    ]


def test_each_front_end_gets_its_own_in_order():
    for _ in range(30):
        front_ends = [0, 1, 5]
        deltas = []
        for _ in range(5):
            deltas.append(TokenDeltas.of(some_pairs(random.sample(front_ends, random.randrange(1, 4)))))
            deltas += [RequestDelta(request_id, [token]) for request_id, token in some_pairs(front_ends)[:3]]
        shares = shares_of(deltas, front_ends)
        for number in front_ends:
            own = [delta for delta in one_by_one(deltas) if delta.request_id >> FRONT_END_SHIFT == number]
            assert list(one_by_one(shares[number])) == own


def test_a_front_end_that_is_not_there_has_no_share():
    with pytest.raises(KeyError):
        shares_of([TokenDeltas.of([(2 << FRONT_END_SHIFT, 1)])], [0, 1])


@pytest.mark.parametrize(("request_ids", "tokens"), [(bytes(8), bytes(16)), (bytes(7), bytes(7))])
def test_deltas_that_do_not_fit_together_are_refused(request_ids, tokens):
    with pytest.raises(ValueError, match=r"argument|bytes"):
        list(TokenDeltas(request_ids, tokens).pairs())
