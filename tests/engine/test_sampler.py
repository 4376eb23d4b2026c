"""The sampler's features, one by one and all together, against transformers and plain formulas."""

import random
from dataclasses import replace

import pytest
import torch

from bladellm_runtime.request import SamplingParams
from tests.engine.sampler_support import CPU, Engine, Request, expected_scores, made_up_logits, random_params
from tests.kernels.sampling_support import (
    ALARM,
    assert_best,
    chi_square_p,
    fresh_generator,
    fresh_seed,
    warped_by_transformers,
)

GREEDY = SamplingParams(temperature=0.0)


def test_greedy_is_the_argmax_and_the_lowest_of_equals():
    engine, generator = Engine(8, 1021), fresh_generator()
    logits = (torch.randn(8, 1021, generator=generator) * 3).round()
    logits[:, ::5] = -torch.inf
    rows = [(slot, Request([1], SamplingParams(temperature=1e-6 * (slot % 2)))) for slot in range(8)]
    for slot, request in rows:
        engine.load(slot, request)
    expected = [int((row == row.max()).nonzero()[0]) for row in logits]
    outputs = engine.sample(rows, logits)
    assert outputs.tokens.tolist() == outputs.feedback.tolist() == expected
    assert list(outputs.read_logprobs()) == []


@pytest.mark.parametrize("top_k", [0, 5])
def test_a_top_p_that_float32_does_not_have_keeps_the_best_token(top_k):
    engine, logits = Engine(8, 301), torch.randn(8, 301, generator=fresh_generator())
    rows = [(slot, Request([1], SamplingParams(top_p=10.0 ** -(44 + 20 * slot), top_k=top_k))) for slot in range(8)]
    for slot, request in rows:
        engine.load(slot, request)
    assert torch.equal(engine.sample(rows, logits).tokens, logits.argmax(1))


@pytest.mark.parametrize("vocab", [17, 509, 3001])
def test_every_combination_of_features_against_transformers(vocab):
    """Requests with random parameters come, generate, are preempted and resumed elsewhere, and end; every token is
    compared."""
    seed = fresh_seed()
    rng, slots, eos = random.Random(seed), 6, (3, vocab - 1)
    engine = Engine(slots, vocab, eos)
    running: dict[int, Request] = {}
    for _ in range(60):
        for slot in range(slots):
            if slot in running and rng.random() < 0.1:
                del running[slot]
            elif slot in running and rng.random() < 0.15:
                target = rng.choice([free for free in range(slots) if free not in running] or [slot])
                running[target] = running.pop(slot)
                engine.load(target, running[target])
            elif slot not in running and rng.random() < 0.7:
                prompt = [rng.randrange(vocab) for _ in range(rng.randint(1, 12))]
                running[slot] = Request(prompt, random_params(rng, vocab), choice=rng.randrange(4))
                engine.load(slot, running[slot])
        rows = rng.sample(sorted(running.items()), rng.randint(0, len(running)))
        logits = [made_up_logits(request, vocab) for _, request in rows]
        if not rows:
            assert engine.sample(rows, torch.zeros(0, vocab)).tokens.shape == (0,)
            continue
        expected = [expected_scores(request, row, eos) for (_, request), row in zip(rows, logits, strict=True)]
        outputs = engine.sample(rows, torch.stack(logits))
        assert_best(outputs.tokens, torch.stack(expected), [request for _, request in rows])
        check_logprobs(outputs, rows, torch.stack(logits))


def check_logprobs(outputs, rows, logits):
    """Raw log-probabilities of the token sampled last, then of the most likely ones, for the rows that asked."""
    entries = dict(outputs.read_logprobs())
    assert set(entries) == {row for row, (_, request) in enumerate(rows) if request.params.logprobs is not None}
    for row, entry in entries.items():
        request = rows[row][1]
        expected = logits[row].double().log_softmax(dim=0)
        best = expected.topk(request.params.logprobs)
        assert entry.token_ids == [request.output[-1], *best.indices.tolist()]
        wanted = [expected[request.output[-1]].item(), *best.values.tolist()]
        assert entry.logprobs == pytest.approx(wanted, abs=1e-4)


def test_distribution_over_seeds_with_everything_on():
    """Frequencies over many seeds against the exact distribution, with penalties, bias and all filters."""
    draws, vocab, generator = 4096, 40, fresh_generator()
    logits = torch.randn(vocab, generator=generator) * 2
    base, engine = fresh_seed() % 2**60, Engine(draws, vocab)
    options = {"temperature": 0.9, "top_k": 25, "top_p": 0.95, "min_p": 0.01, "repetition_penalty": 1.3}
    options |= {"presence_penalty": 0.4, "frequency_penalty": 0.2, "logit_bias": {1: 1.5, 2: -0.5}}
    prompt, output = [1, 5, 9], [2, 2, 7]
    rows = [
        (slot, Request(prompt, SamplingParams(seed=base + slot, **options), output=list(output)))
        for slot in range(draws)
    ]
    for slot, request in rows:
        engine.load(slot, request)
    tokens = engine.sample(rows, logits.expand(draws, vocab)).tokens
    scores = logits.double()
    for token in {*prompt, *output}:
        scores[token] = scores[token] / 1.3 if scores[token] > 0 else scores[token] * 1.3
    scores[2] -= 0.4 + 2 * 0.2 + 0.5
    scores[7] -= 0.4 + 0.2
    scores[1] += 1.5
    exact = warped_by_transformers(scores[None], 0.9, 25, 0.95, 0.01).softmax(dim=-1)[0]
    assert chi_square_p(torch.bincount(tokens, minlength=vocab), exact * draws) > ALARM


@pytest.mark.parametrize("ignore_eos", [False, True])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_min_tokens_holds_back_what_ends_the_request(temperature, ignore_eos):
    engine = Engine(3, 50, eos=(7, 8))
    params = SamplingParams(
        temperature=temperature, min_tokens=5, stop_token_ids=(9, 1000), ignore_eos=ignore_eos, seed=1
    )
    fresh, resumed = Request([1, 2], params), Request([1, 2], params, output=[3, 3, 3])
    engine.load(0, fresh)
    engine.load(1, resumed)
    logits = torch.zeros(50)
    logits[[7, 8, 9]] = 60.0
    for _ in range(6):
        engine.sample([(0, fresh), (1, resumed)], logits.expand(2, 50))
    for request in (fresh, resumed):
        assert not {7, 8, 9} & set(request.output[:5])
        assert set(request.output[5:]) <= {7, 8, 9}


def test_bias_of_100_forces_and_forbids_and_unknown_ids_are_left_out():
    engine, generator = Engine(2, 30), fresh_generator()
    logits = torch.randn(2, 30, generator=generator)
    best = int(logits[0].argmax())
    forced = Request([1], SamplingParams(logit_bias={11: 100.0, 29: 0.0, 30: 100.0, 10**9: 100.0}, seed=3))
    forbidden = Request([1], SamplingParams(logit_bias={best: -100.0}, temperature=0.0))
    engine.load(0, forced)
    engine.load(1, forbidden)
    assert engine.sample([(0, forced), (1, forbidden)], logits[[0, 0]]).tokens.tolist() == [
        11,
        int(logits[0].topk(2).indices[1]),
    ]


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_row_that_is_not_finite_is_marked_and_stays_alone(bad):
    seed = fresh_seed()
    rng, vocab = random.Random(seed), 401
    requests = [Request([1, 2, row], random_params(rng, vocab)) for row in range(12)]
    logits = torch.stack([made_up_logits(request, vocab) for request in requests])

    def run(values):
        engine = Engine(12, vocab, eos=(0,))
        rows = [(slot, Request(each.prompt, each.params)) for slot, each in enumerate(requests)]
        for slot, request in rows:
            engine.load(slot, request)
        first = engine.sample(rows, values)
        return first, engine.sample(rows, logits)

    clean, clean_next = run(logits)
    for broken in (2, 9):
        values = logits.clone()
        values[broken, ... if bad < 0 else 57] = bad
        marked, following = run(values)
        others = [row for row in range(12) if row != broken]
        assert marked.tokens[broken] == -1
        assert marked.feedback[broken] == 0
        assert torch.equal(marked.tokens[others], clean.tokens[others])
        assert torch.equal(following.tokens[others], clean_next.tokens[others])


def test_nan_hidden_behind_a_mask_is_still_found():
    engine = Engine(1, 10, eos=(4,))
    request = Request([1], SamplingParams(min_tokens=2, temperature=0.0))
    engine.load(0, request)
    logits = torch.zeros(1, 10)
    logits[0, 4] = torch.inf
    assert engine.sample([(0, request)], logits).tokens.tolist() == [-1]


def test_a_row_left_without_any_token_is_marked():
    engine = Engine(1, 10, eos=(4,))
    request = Request([1], SamplingParams(min_tokens=2, seed=0))
    engine.load(0, request)
    logits = torch.full((1, 10), -torch.inf)
    logits[0, 4] = 1.0
    assert engine.sample([(0, request)], logits).tokens.tolist() == [-1]


def test_logprobs_are_raw_whatever_changes_the_logits():
    engine, generator, vocab = Engine(4, 700, eos=(1,)), fresh_generator(), 700
    logits = torch.randn(4, vocab, generator=generator) * 4
    changing = {"logit_bias": {5: 50.0}, "repetition_penalty": 1.5, "min_tokens": 3, "top_k": 2, "seed": 4}
    wanted = [None, 0, 20, 3]
    rows = [(slot, Request([5, 6], SamplingParams(logprobs=k, **changing))) for slot, k in enumerate(wanted)]
    for slot, request in rows:
        engine.load(slot, request)
    check_logprobs(engine.sample(rows, logits), rows, logits)


def test_only_rows_that_sample_count_and_logits_are_checked():
    engine = Engine(4, 20)
    rows = [(slot, Request([1] * (slot + 1), GREEDY)) for slot in range(4)]
    for slot, request in rows:
        engine.load(slot, request)
    plan = engine.plan(rows, samples=[True, False, False, True])
    for load in plan.loads:
        engine.state.load(load)
    inputs = engine.sampler.prepare(plan)
    assert (inputs.slots.tolist(), inputs.positions.tolist()) == ([0, 3], [1, 4])
    logits = torch.eye(20)[[13, 6]]
    assert engine.sampler.sample(logits, inputs).tokens.tolist() == [13, 6]
    for wrong in (torch.zeros(4, 20), torch.zeros(2, 21), torch.zeros(2, 20).double()):
        with pytest.raises(ValueError, match=r"float32 \(2, 20\)"):
            engine.sampler.sample(wrong, inputs)


def test_steps_for_kernels_upload_less_and_sample_the_same():
    """The other route's slots, stages and uploads, sampled by sample_step's operators: the same tokens and scores."""
    seed = fresh_seed()
    rng, vocab, eos = random.Random(seed), 701, (0, 9)
    engines = [Engine(9, vocab, eos), Engine(9, vocab, eos)]
    engines[1].state.use_kernels()
    last_token = torch.full((9,), -1)
    for generation in range(3):
        requests = [Request([1, 2, slot], random_params(rng, vocab)) for slot in range(rng.randint(1, 8))]
        copies = [replace(request, output=[]) for request in requests]
        for engine, rows in zip(engines, (requests, copies), strict=True):
            for slot, request in enumerate(rows):
                engine.load(slot + generation % 2, request)
        for _ in range(9):
            logits = torch.stack([made_up_logits(request, vocab) for request in requests])
            one, other = (
                engine.sample([(slot + generation % 2, request) for slot, request in enumerate(rows)], logits)
                for engine, rows in zip(engines, (requests, copies), strict=True)
            )
            assert torch.equal(one.tokens, other.tokens)
            assert list(one.read_logprobs()) == list(other.read_logprobs())
    plan = engines[1].plan([(generation % 2, copies[0])])
    outputs = engines[1].sampler.sample(logits[:1].bfloat16(), engines[1].sampler.prepare(plan), last_token)
    assert last_token[generation % 2] == outputs.feedback[0]
    assert (last_token == -1).sum() == 8


def test_memory_is_counted_and_statistics_wait_for_a_penalised_request_on_cpu():
    engine = Engine(10, 1000)
    before = engine.state.bytes
    assert before < 10 * 100
    request = Request([1], GREEDY)
    engine.load(0, request)
    engine.sample([(0, request)], torch.zeros(1, 1000))
    assert engine.state.bytes == before
    penalised = Request([1], SamplingParams(temperature=0.0, presence_penalty=1.0))
    engine.load(1, penalised)
    engine.sample([(1, penalised)], torch.zeros(1, 1000))
    assert engine.state.bytes == before + 10 * 1000 * 3
    assert engine.state.device == CPU
