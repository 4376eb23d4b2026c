"""Which rank is to blame, and when."""

import random

from bladellm_runtime.ranks.messages import Hello, Pulse, RankFailed
from bladellm_runtime.ranks.watchdog import SILENT_SECONDS, STARTING_SECONDS, Watchdog

LATE = SILENT_SECONDS + 0.1


def serving(*ranks: int) -> Watchdog:
    dog = Watchdog(ranks)
    for rank in ranks:
        dog.hear(Hello(rank, {}, ""), 0.0)
    dog.serving = True
    return dog


def test_ranks_that_keep_up_are_well():
    """An hour of steps of any length, with pulses that are half a second old."""
    dog, now, sent, done = serving(1, 2), 0.0, 0, 0
    while now < 3600:
        now += 0.5
        begun = sent
        if random.random() < 0.6:
            sent += random.randrange(5)
            done = max(done, sent - 2)
        for rank in (1, 2):
            dog.hear(Pulse(rank, begun, min(begun, done), False), now)
        assert dog.verdict(now, sent, done, {}) is None


def test_a_step_on_a_cpu_may_be_long():
    dog = serving(1)
    for second in range(1000):
        dog.hear(Pulse(1, 8, 7, False), float(second))
        assert dog.verdict(float(second), 8, 7, {}) is None


def test_a_step_on_a_gpu_may_not():
    dog = serving(1)
    dog.hear(Pulse(1, 8, 7, True), 1.0)
    assert dog.verdict(1.0, 8, 7, {}) is None
    dog.hear(Pulse(1, 8, 7, True), 1.0 + LATE)
    assert "rank 1 has done nothing for 6 seconds" in (dog.verdict(1.0 + LATE, 8, 7, {}) or "")


def test_a_silent_rank_is_lost_and_while_starting_later():
    dog = serving(1, 2)
    dog.hear(Pulse(2, 0, 0, False), LATE)
    assert dog.verdict(LATE, 0, 0, {}) == "rank 1 has not answered for 6 seconds"
    dog.serving = False
    assert dog.verdict(LATE, 0, 0, {}) is None
    assert dog.verdict(STARTING_SECONDS + 1, 0, 0, {}) == "rank 1 has not answered for 180 seconds"


def test_a_rank_that_takes_no_orders_hangs_and_so_does_one_that_does_not_finish():
    for pulse, done in ((Pulse(1, 3, 3, False), 3), (Pulse(1, 9, 8, False), 9)):
        dog, now = serving(1), 0.0
        while now < SILENT_SECONDS - 1:
            dog.hear(pulse, now)
            assert dog.verdict(now, 9, done, {}) is None
            now += 0.5
        dog.hear(pulse, 2 * LATE)
        assert dog.verdict(2 * LATE, 9, done, {}) == "rank 1 has done nothing for 6 seconds, although it had to"


def test_of_a_rank_that_has_fallen_silent_that_is_said():
    """Its last pulse may have been like the one before, and so what it had to do is older than its silence."""
    dog = serving(1)
    dog.hear(Pulse(1, 9, 8, False), 1.0)
    dog.hear(Pulse(1, 9, 8, False), 1.5)
    now = 1.5
    while now <= 1.5 + SILENT_SECONDS:
        assert dog.verdict(now, 9, 9, {}) is None
        now += 0.1
    assert dog.verdict(now, 9, 9, {}) == "rank 1 has not answered for 6 seconds"


def test_a_step_may_take_as_long_on_every_stage():
    """Of what rank 0 has not finished either; what it has finished is due."""
    for done, limit in ((5, 3 * SILENT_SECONDS), (7, SILENT_SECONDS)):
        dog = Watchdog([1], stages=3)
        dog.serving = True
        dog.hear(Hello(1, {}, ""), 0.0)
        now = 0.0
        while (verdict := dog.verdict(now, 9, done, {})) is None:
            now += 0.5
            dog.hear(Pulse(1, 7, 6, True), now)
        assert limit < now <= limit + 1.5
        assert verdict == f"rank 1 has done nothing for {limit:g} seconds, although it had to"


def test_the_cause_comes_before_its_effects():
    dog = serving(1, 2, 3)
    dog.hear(RankFailed(3, "RuntimeError: connection closed by peer", False), 1.0)
    assert dog.trouble({})
    assert dog.verdict(1.0, 5, 5, {}) == "rank 3: RuntimeError: connection closed by peer"
    assert dog.verdict(1.0, 5, 5, {3: 1, 2: -9}) == "rank 2 was killed by signal 9"
    assert dog.verdict(1.0, 5, 5, {2: None}) == "rank 3: RuntimeError: connection closed by peer"
    assert serving(2).verdict(1.0, 5, 5, {2: None}) == "rank 2 is gone"
    dog.hear(RankFailed(1, "a step ran out of memory", True), 1.1)
    assert dog.verdict(1.1, 5, 5, {3: 1, 1: 1}) == "rank 1: a step ran out of memory"


def test_who_is_missing_and_who_is_nobody():
    dog = Watchdog([1, 2])
    dog.hear(Pulse(1, 0, 0, False), 0.0)
    assert dog.missing == [1, 2]
    dog.hear(Hello(2, {}, ""), 0.0)
    dog.hear(RankFailed(7, "stranger", True), 0.0)
    assert dog.missing == [1]
    assert not dog.trouble({})
