"""How long a step waits for a request that is announced, and how much of the time."""

import random

import pytest

from bladellm_runtime.engine.arrival_hold import HOLD_SHARE, MOST_SECONDS, PATIENCE_SECONDS, ArrivalHold


def test_a_step_waits_until_the_request_comes():
    hold = ArrivalHold()
    assert hold.left(10.0, True) == 0
    hold.announce(10.0)
    assert hold.left(10.001, True) == pytest.approx(PATIENCE_SECONDS - 0.001)
    hold.arrive()
    assert hold.left(10.0015, True) == 0


def test_a_step_does_not_wait_for_one_that_never_comes():
    hold = ArrivalHold()
    hold.announce(10.0)
    assert hold.left(10.0, True) > 0
    assert hold.left(10.0 + PATIENCE_SECONDS, True) == 0
    hold.announce(11.0)
    assert hold.left(11.0, True) == pytest.approx(PATIENCE_SECONDS)


def test_announcements_without_end_hold_steps_for_a_share_of_the_time():
    hold, rng, now, held, begun = ArrivalHold(), random.Random(), 100.0, 0.0, 100.0
    while now < begun + 20.0:
        hold.announce(now)
        wait = hold.left(now, True)
        held += wait
        now += wait
        hold.end(now)
        now += rng.uniform(0.0005, 0.006)
    assert 0.8 * HOLD_SHARE * (now - begun) < held <= HOLD_SHARE * (now - begun) + MOST_SECONDS


def test_time_in_which_nothing_waits_is_not_saved_up_for_ever():
    hold = ArrivalHold()
    held, now = 0.0, 1e6
    while True:
        hold.announce(now)
        if not (wait := hold.left(now, True)):
            break
        held, now = held + wait, now + wait
        hold.end(now)
    assert held < 1.1 * MOST_SECONDS


def test_waiting_while_the_device_is_busy_costs_nothing():
    hold, now = ArrivalHold(), 5.0
    for _ in range(100):
        hold.announce(now)
        assert hold.left(now, False) == pytest.approx(PATIENCE_SECONDS)
        now += PATIENCE_SECONDS
    hold.announce(now)
    assert hold.left(now, True) == pytest.approx(PATIENCE_SECONDS)
