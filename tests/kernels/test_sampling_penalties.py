"""Penalties against transformers and the OpenAI formula; log-probabilities against log_softmax."""

import random

import pytest
import torch
from bladellm_kernels import logprobs, penalties
from transformers import RepetitionPenaltyLogitsProcessor

from tests.kernels.sampling_support import fresh_generator, fresh_seed


def statistics_of(histories: list[tuple[list[int], list[int]]], vocab: int) -> tuple[torch.Tensor, torch.Tensor]:
    seen = torch.zeros(len(histories), vocab, dtype=torch.bool)
    counts = torch.zeros(len(histories), vocab, dtype=penalties.COUNT_DTYPE)
    for slot, (prompt, output) in enumerate(histories):
        seen[slot, prompt + output] = True
        for token in output:
            counts[slot, token] += 1
    return seen, counts


@pytest.mark.parametrize("vocab", [13, 301, 150_001])
def test_penalties_against_transformers_and_the_plain_reference(vocab):
    seed = fresh_seed()
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    slots = [4, 0, 3]
    histories = [
        (
            [rng.randrange(vocab) for _ in range(rng.randint(1, 40))],
            [rng.randrange(13) for _ in range(rng.randint(0, 40))],
        )
        for _ in range(5)
    ]
    logits = torch.randn(6, vocab, generator=generator) * 5
    logits[2, :4] = torch.tensor([0.0, -0.0, -torch.inf, 1e-30])
    rows, params = [5, 2, 0], [(1.3, 0.5, 0.7), (0.6, -2.0, 0.0), (1.9, 0.0, -1.1)]
    got = penalties.apply_penalties_(
        logits.clone(),
        torch.tensor(rows),
        torch.tensor(slots),
        *statistics_of(histories, vocab),
        *torch.tensor(params).unbind(dim=1),
    )
    for row, slot, (repetition, presence, frequency) in zip(rows, slots, params, strict=True):
        prompt, output = histories[slot]
        scores = RepetitionPenaltyLogitsProcessor(repetition)(torch.tensor([prompt + output]), logits[[row]])[0]
        count = torch.bincount(torch.tensor(output, dtype=torch.int64), minlength=vocab)
        expected = scores - frequency * count - presence * (count > 0)
        torch.testing.assert_close(got[row], expected, rtol=1e-6, atol=1e-6)
        plain = penalties.reference(logits[row], prompt, output, repetition, presence, frequency)
        torch.testing.assert_close(plain, expected, rtol=1e-6, atol=1e-6)
    untouched = [row for row in range(6) if row not in rows]
    assert torch.equal(got[untouched], logits[untouched])


def test_counting_touches_only_its_slots_and_saturates():
    seen, counts = statistics_of([([1], [2, 2])] * 4, 5)
    counts[3, 2] = penalties.MAX_COUNT - 1
    for _ in range(3):
        penalties.count_tokens_(seen, counts, torch.tensor([3, 1]), torch.tensor([2, 4]))
    assert counts.tolist() == [[0, 0, 2, 0, 0], [0, 0, 2, 0, 3], [0, 0, 2, 0, 0], [0, 0, penalties.MAX_COUNT, 0, 0]]
    assert seen[1].tolist() == [False, True, True, False, True]
    assert seen[0].tolist() == [False, True, True, False, False]


def test_statistics_must_fit():
    one, index = torch.ones(1), torch.zeros(1, dtype=torch.int64)
    statistics = statistics_of([([], [])], 5)
    with pytest.raises(ValueError, match="do not fit"):
        penalties.apply_penalties_(torch.zeros(1, 4), index, index, *statistics, one, one, one)


@pytest.mark.parametrize(("rows", "vocab", "k"), [(1, 1, 1), (5, 33, 33), (40, 20_011, 20), (3, 50, 0), (0, 9, 2)])
def test_logprobs_against_log_softmax(rows, vocab, k):
    generator = fresh_generator()
    logits = torch.randn(rows, vocab, generator=generator) * 10 + 50
    logits[:, ::3] = -torch.inf
    logits[:, 0] = 3.0
    tokens = torch.randint(vocab, (rows,), generator=generator)
    ids, values = logprobs.token_logprobs(logits, tokens, k)
    expected_ids, expected = logprobs.reference(logits, tokens, k)
    finite = expected > -torch.inf
    assert torch.equal(ids[finite], expected_ids[finite])
    torch.testing.assert_close(values.double(), expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(ids[:, 0], tokens)


def test_logprobs_of_a_broken_row_are_nan_and_stay_alone():
    logits = torch.randn(3, 10, generator=fresh_generator())
    whole = logprobs.token_logprobs(logits, torch.tensor([1, 2, 3]), 4)
    logits[1, 5] = torch.nan
    ids, values = logprobs.token_logprobs(logits, torch.tensor([1, 2, 3]), 4)
    assert values[1].isnan().all()
    assert ((ids >= 0) & (ids < 10)).all()
    assert torch.equal(values[[0, 2]], whole[1][[0, 2]])


def test_logprobs_refuses_more_than_the_vocabulary():
    with pytest.raises(ValueError, match="vocabulary size 4"):
        logprobs.token_logprobs(torch.zeros(1, 4), torch.zeros(1, dtype=torch.int64), 5)
