"""How requests are refused, answered, stopped and aborted."""

import random

import pytest

from bladellm_runtime.request import FinishReason, SamplingParams
from bladellm_runtime.wire.messages import AddRequest, RequestDelta, one_by_one
from tests.scheduler.fake_device import EOS, VOCAB
from tests.scheduler.simulator import Simulation
from tests.scheduler.test_planning import endless, simulation
from tests.support.step_results import step_result


def answer(sim: Simulation, *tokens: int | None) -> list[RequestDelta]:
    """Plan a step and complete it with these tokens, without a device."""
    plan = sim.scheduler.plan()
    return list(one_by_one(sim.scheduler.complete(plan, step_result(tokens), 1.0)))


@pytest.mark.parametrize(
    ("prompt", "error"),
    [
        ([], "invalid_request"),
        ([1, VOCAB], "invalid_request"),
        ([-1], "invalid_request"),
        ([3] * 30, "context_length_exceeded"),
        ([3] * 21, "context_length_exceeded"),
    ],
    ids=["empty", "above vocabulary", "negative", "model length", "arena"],
)
def test_a_prompt_that_can_never_run_is_refused_at_once(prompt, error):
    sim = simulation(num_granules=5, max_model_len=30)
    other = endless(sim, 3, 5)
    refused = sim.add(prompt)
    assert [(d.finish, d.error) for d in sim.deltas[refused]] == [(FinishReason.ERROR, error)]
    sim.finish()
    assert len(sim.tokens(other)) == 5


@pytest.mark.parametrize("prompt", [[2**31], [3, -(2**31) - 1], [2**63], b"", b"abcde"])
def test_what_are_no_tokens_is_refused(prompt):
    scheduler = simulation().scheduler
    assert scheduler.add(AddRequest(7, prompt, SamplingParams(), 0, 0.0)).error == "invalid_request"
    assert scheduler.idle


def test_packed_prompts_are_those_they_were():
    prompt = [random.randrange(2, VOCAB) for _ in range(random.randint(1, 15))]
    loads, errors = [], []
    for _ in range(2):
        scheduler = simulation().scheduler
        request = AddRequest(7, prompt, SamplingParams(), 0, 0.0)
        errors.append(scheduler.add(request.packed() if loads else request))
        loads.append(scheduler.plan().loads[0])
    assert errors == [None, None]
    assert loads[0] == loads[1]
    assert loads[0].ids().tolist() == prompt
    for wrong in ([1, VOCAB], [-1], [3] * 300):
        request = AddRequest(8, wrong, SamplingParams(), 0, 0.0)
        assert scheduler.add(request.packed()).error == scheduler.add(request).error is not None


@pytest.mark.parametrize("depth", [1, 2])
def test_the_largest_prompt_that_fits_is_served(depth):
    sim = simulation(depth, num_granules=5, max_model_len=30, max_batch_tokens=7)
    request_id = endless(sim, 20)
    sim.finish()
    assert len(sim.tokens(request_id)) == 1


def test_a_prompt_must_leave_room_for_one_token():
    sim = simulation(max_model_len=30)
    fits, too_long = endless(sim, 29), endless(sim, 30)
    assert sim.live == [fits]
    assert sim.deltas[too_long][0].error == "context_length_exceeded"
    sim.finish()
    assert len(sim.tokens(fits)) == 1


def test_an_id_that_is_live_is_refused_and_the_first_goes_on():
    sim = simulation()
    endless(sim, 3, 2)
    refused = sim.scheduler.add(AddRequest(0, [1], sim.requests[0].params, 0, 0.0))
    assert refused.error == "invalid_request"
    sim.finish()
    assert len(sim.tokens(0)) == 2


@pytest.mark.parametrize("depth", [1, 2])
def test_max_tokens_zero_scores_the_prompt_and_generates_nothing(depth):
    sim = simulation(depth, prefill_chunk_tokens=3)
    sim.add([4, 5, 6, 7, 8, 9, 10], max_tokens=0, prompt_logprobs=2)
    sim.finish()
    (delta,) = sim.deltas[0]
    assert (delta.tokens, delta.finish, len(delta.prompt_logprobs)) == ([], FinishReason.LENGTH, 6)


def test_eos_and_stop_tokens_end_a_request_and_are_part_of_it():
    sim = simulation()
    (eos, *_) = EOS
    sim.add([5], max_tokens=9)
    sim.add([5], max_tokens=9, stop_token_ids=[33])
    sim.add([5], max_tokens=9, ignore_eos=True)
    deltas = answer(sim, eos, 33, eos)
    assert [d.tokens for d in deltas] == [[eos], [33], [eos]]
    assert [d.finish for d in deltas] == [FinishReason.STOP, FinishReason.STOP, None]


def test_a_stop_within_min_tokens_does_not_end_a_request():
    sim = simulation()
    (eos, *_) = EOS
    sim.add([5], max_tokens=9, min_tokens=2)
    assert [answer(sim, eos)[0].finish for _ in range(3)] == [None, None, FinishReason.STOP]


def test_a_stop_on_the_last_token_is_a_stop():
    sim = simulation()
    (eos, *_) = EOS
    sim.add([5], max_tokens=1)
    assert answer(sim, eos)[0].finish is FinishReason.STOP


def test_logits_that_are_not_finite_end_only_their_request():
    sim = simulation()
    endless(sim, 2, 3)
    endless(sim, 2, 3)
    first, second = answer(sim, -1, 7)
    assert (first.tokens, first.finish, first.error) == ([], FinishReason.ERROR, "invalid_logits")
    assert (second.tokens, second.finish) == ([7], None)
    assert len(answer(sim, 7)) == 1
    sim.scheduler.check()


def test_the_time_of_scheduling_is_when_the_first_chunk_was_planned():
    sim = simulation(prefill_chunk_tokens=2)
    endless(sim, 5, 2)
    for now in (10.0, 20.0, 30.0, 40.0):
        sim.now = now
        sim.step()
    assert [d.scheduled_at for d in sim.deltas[0]] == [11.0, None]


@pytest.mark.parametrize("steps", range(7))
@pytest.mark.parametrize("depth", [1, 2])
def test_an_abort_answers_once_and_frees_everything(depth, steps):
    sim = simulation(depth, prefill_chunk_tokens=4, num_slots=1)
    running, waiting = endless(sim, 10, 4), endless(sim, 3, 2)
    for _ in range(steps):
        sim.launch()
        if steps % 2:
            sim.complete()
    live = sim.live
    assert [delta.request_id for delta in sim.abort([running, 77, waiting])] == live
    assert sim.abort([running, 77, waiting]) == []
    assert not sim.scheduler.has_work
    sim.finish()


def test_a_slot_is_not_reused_while_a_step_with_its_old_request_is_in_flight():
    sim = simulation(depth=2, num_slots=1)
    old = endless(sim, 5, 9)
    sim.launch()
    sim.launch()
    sim.abort([old])
    new = endless(sim, 5, 3)
    assert sim.memory.used > 0
    assert sim.scheduler.plan() is None
    sim.complete()
    assert sim.scheduler.plan() is None
    assert sim.complete() == []
    assert sim.memory.used == 0
    plan = sim.launch()
    assert plan.generations.tolist() == [2]
    sim.finish()
    assert len(sim.tokens(new)) == 3


def test_a_result_of_another_generation_is_dropped():
    sim = simulation()
    endless(sim, 3, 5)
    plan = sim.scheduler.plan()
    plan.generations = plan.generations - 1
    assert sim.scheduler.complete(plan, step_result([9]), 1.0) == []


def test_steps_complete_in_the_order_planned():
    sim = simulation()
    endless(sim, 3, 5)
    first, second = sim.scheduler.plan(), sim.scheduler.plan()
    result = step_result([9])
    with pytest.raises(ValueError, match="not the oldest"):
        sim.scheduler.complete(second, result, 1.0)
    assert sim.scheduler.complete(first, result, 1.0)
    assert sim.scheduler.complete(second, result, 1.0)
