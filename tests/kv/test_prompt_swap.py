"""What goes to the host and comes back, and what failed requests leave: directed cases."""

import pytest

from bladellm_runtime.kv.operations import SwapIn
from tests.kv.paper_engine import Engine, bytes_of, prompt, spill
from tests.kv.test_accounting import spec_of


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
