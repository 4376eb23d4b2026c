"""The log of decoding sequences' tokens against lists: nothing is lost, doubled or out of order."""

import random
from array import array

import numpy as np

from bladellm_runtime.request import SamplingParams
from bladellm_runtime.scheduler.plan import INVALID
from bladellm_runtime.scheduler.prepared import Prepared
from bladellm_runtime.scheduler.sequence import Sequence
from bladellm_runtime.scheduler.token_log import STEPS, TokenLog

VOCAB = 50
SLOTS = STEPS + 6


def sequence(slot: int, generation: int, stops: frozenset[int] = frozenset(), **params) -> Sequence:
    return Sequence(
        order=generation, request_id=(3 << 48) + 1000 * slot + generation, params=SamplingParams(**params), choice=0,
        known=array("i", [7]), prompt_len=1, max_len=10**6, kv_end=10**6, stops=stops, slot=slot, generation=generation,
    )  # fmt: skip


def step(log: TokenLog, rows: list[Sequence], tokens: list[int]) -> tuple[dict[int, int], list[int]]:
    """Have the log take a token a row; returns what it took by request, and the rows of the others."""
    slots, generations = np.array([[seq.slot, seq.generation] for seq in rows]).T
    taken, others = log.take(slots, generations, np.array(tokens))
    return {} if taken is None else dict(taken.pairs()), others


def test_tokens_come_in_order_whoever_is_in_a_step_and_whenever_they_are_asked_for():
    log, live, wanted = TokenLog(SLOTS, VOCAB), {}, {}
    for number in range(1, 5 * STEPS):
        for slot in random.sample(range(SLOTS), 3):
            if slot in live:
                seq = live.pop(slot)
                log.leave(seq)
                assert list(seq.known) == wanted.pop(slot)
            else:
                stops = frozenset(random.sample(range(2 * VOCAB), random.randrange(3)))
                live[slot] = sequence(slot, number, stops)
                wanted[slot] = [7]
                log.enter(live[slot])
        rows = random.sample(list(live.values()), random.randrange(len(live) + 1))
        if not rows:
            continue
        tokens = [random.randrange(-1, VOCAB) for _ in rows]
        taken, others = step(log, rows, tokens)
        ends = {stop for seq in live.values() for stop in seq.stops} | {INVALID}
        assert others == [row for row, token in enumerate(tokens) if token in ends]
        for row, seq in enumerate(rows):
            if row not in others:
                wanted[seq.slot].append(tokens[row])
        mine = {
            seq.request_id: token
            for row, (seq, token) in enumerate(zip(rows, tokens, strict=True))
            if row not in others
        }
        assert taken == mine
        asked = random.choice(list(live.values()))
        assert list(asked.tokens) == wanted[asked.slot]
    assert all(list(seq.tokens) == wanted[slot] for slot, seq in live.items())


def test_sequences_of_other_generations_and_those_that_ask_for_more_are_not_taken():
    log = TokenLog(8, VOCAB)
    plain, scored, constrained = sequence(1, 4), sequence(2, 1, logprobs=0), sequence(3, 1)
    constrained.prepared = Prepared(matcher=object())
    for seq in (plain, scored, constrained):
        log.enter(seq)
    before = sequence(1, 3)
    assert step(log, [scored, before, constrained], [5, 5, 5]) == ({}, [0, 1, 2])
    assert step(log, [scored, plain], [5, 6]) == ({plain.request_id: 6}, [0])
    for seq in (plain, scored, constrained):
        log.leave(seq)
    assert step(log, [plain], [5]) == ({}, [0])
    assert [list(seq.known) for seq in (plain, scored, constrained)] == [[7, 6], [7], [7]]
