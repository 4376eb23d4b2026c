"""Temperature, top-k, top-p, min-p: against transformers' processors, alone and combined, by every path."""

import random

import pytest
import torch
from bladellm_kernels.gumbel import gumbel_argmax, uniform
from bladellm_kernels.sampling import CANDIDATES, Filters, reference_probabilities, sample_tokens, top_candidates

from tests.kernels.sampling_support import (
    ALARM,
    assert_best,
    chi_square_p,
    fresh_generator,
    fresh_seed,
    keys_for,
    warped_by_transformers,
)


def filters_for(rows: list[tuple[float, int, float, float]], width: int, vocab: int) -> Filters:
    """`Filters` from (temperature, top_k, top_p, min_p) of each row; filters off in all rows are None."""
    temperature, top_k, top_p, min_p = (torch.tensor(column, dtype=torch.float32) for column in zip(*rows, strict=True))
    top_k = torch.where(top_k > 0, top_k, vocab).to(torch.int32)
    return Filters(
        width,
        temperature,
        top_k if bool((top_k < vocab).any()) else None,
        top_p if bool((top_p < 1).any()) else None,
        min_p if bool((min_p > 0).any()) else None,
    )


def random_row(rng: random.Random, top_k: int) -> tuple[float, int, float, float]:
    return (
        rng.choice([0.1, 0.7, 1.0, 1.3, 2.0]),
        top_k,
        rng.choice([1.0, 0.05, 0.5, 0.9, 0.99]),
        rng.choice([0.0, 0.0, 0.02, 0.3, 1.0]),
    )


def draw(logits: torch.Tensor, keys: torch.Tensor, filters: Filters) -> torch.Tensor:
    return sample_tokens(logits, logits.amax(dim=-1), keys, filters)


def noise_of(keys: torch.Tensor, vocab: int) -> torch.Tensor:
    """The noise of every token, by its definition in float64."""
    return -torch.log(-torch.log1p(-uniform(keys, torch.arange(vocab)).double()))


@pytest.mark.parametrize("vocab", [7, 129, 1023, 5003])
@pytest.mark.parametrize("kind", ["none", "narrow top-k", "wide top-k", "top-p"])
def test_draw_is_the_best_noisy_token_of_those_transformers_keeps(kind, vocab):
    """Not just the distribution: the very token, from transformers' mask and the noise's definition."""
    seed = fresh_seed()
    rng, generator, rows = random.Random(seed), torch.Generator().manual_seed(seed), 60
    widest = min(vocab, CANDIDATES)
    top_k = {"none": lambda: 0, "top-p": lambda: 0}.get(kind) or (
        (lambda: rng.choice([1, 2, rng.randint(1, widest)]))
        if kind == "narrow top-k"
        else (lambda: rng.randint(vocab // 2, vocab))
    )
    params = [random_row(rng, top_k()) for _ in range(rows)]
    if kind == "none":
        params = [(temperature, 0, 1.0, min_p) for temperature, _, _, min_p in params]
    width = {"none": 0, "narrow top-k": max(row[1] for row in params)}.get(kind, vocab)
    logits = torch.randn(rows, vocab, generator=generator) * torch.rand(rows, 1, generator=generator) * 8
    keys = keys_for(range(seed % 2**40, seed % 2**40 + rows), position=rng.randrange(10**6))
    scores = torch.cat([warped_by_transformers(logits[[row]], *params[row]) for row in range(rows)])
    before = logits.clone()
    got = draw(logits, keys, filters_for(params, width, vocab))
    assert_best(got, scores + noise_of(keys, vocab), params)
    assert torch.equal(logits, before), "the logits were changed"


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "min_p"),
    [
        (1.0, 0, 1.0, 0.0),
        (0.3, 0, 1.0, 0.0),
        (1.7, 9, 1.0, 0.0),
        (1.0, 0, 0.6, 0.0),
        (1.0, 0, 1.0, 0.2),
        (0.8, 30, 0.9, 0.05),
        (2.0, 0, 0.95, 0.01),
    ],
)
def test_distribution_over_many_seeds(temperature, top_k, top_p, min_p):
    generator, draws, vocab = fresh_generator(), 20_000, 61
    logits = torch.randn(1, vocab, generator=generator) * 2.5
    expected = warped_by_transformers(logits, temperature, top_k, top_p, min_p).softmax(dim=-1)[0]
    filters = filters_for([(temperature, top_k, top_p, min_p)] * draws, top_k or (vocab if top_p < 1 else 0), vocab)
    tokens = draw(logits.expand(draws, vocab), keys_for(range(draws), position=77), filters)
    assert chi_square_p(torch.bincount(tokens, minlength=vocab), expected * draws) > ALARM


def test_plain_reference_agrees_with_transformers():
    seed = fresh_seed()
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    for _ in range(200):
        vocab = rng.randint(1, 200)
        logits = torch.randn(vocab, generator=generator) * 4
        params = random_row(rng, rng.choice([0, rng.randint(1, vocab)]))
        expected = warped_by_transformers(logits[None], *params).softmax(dim=-1)[0]
        torch.testing.assert_close(reference_probabilities(logits, *params), expected, rtol=1e-9, atol=1e-12)


def test_wide_and_narrow_paths_draw_the_same_token():
    """A row alone takes another path than beside rows that need more: the token may not tell."""
    seed = fresh_seed()
    rng, generator, rows, vocab = random.Random(seed), torch.Generator().manual_seed(seed), 40, 4099
    logits = torch.randn(rows, vocab, generator=generator) * 3
    keys = keys_for(range(rows), position=3)
    params = [random_row(rng, rng.randint(1, 50)) for _ in range(rows)]
    drawn = [draw(logits, keys, filters_for(params, width, vocab)) for width in (50, 200, CANDIDATES, vocab)]
    assert all(torch.equal(drawn[0], other) for other in drawn[1:])
    # Top-p alone: from candidates when the nucleus is narrow, by sorting when it is not; beside a top-k, by sorting.
    nucleus = [(temperature, 0, top_p, 0.0) for temperature, _, top_p, _ in params]
    alone = draw(logits, keys, filters_for(nucleus, vocab, vocab))
    beside = filters_for([*nucleus[:-1], (1.0, vocab - 1, 1.0, 0.0)], vocab, vocab)
    assert torch.equal(alone[:-1], draw(logits, keys, beside)[:-1])


def test_rows_are_drawn_alone_as_in_any_batch():
    generator, rows, vocab = fresh_generator(), 67, 9001
    logits = torch.randn(rows, vocab, generator=generator) * 2
    keys = keys_for(range(rows))
    params = [(0.9, 0, 0.97, 0.0)] * rows
    together = draw(logits, keys, filters_for(params, vocab, vocab))
    for row in (0, 28, 29, 66):
        alone = draw(logits[[row]].clone(), keys[[row]], filters_for(params[:1], vocab, vocab))
        assert alone.item() == together[row].item()


@pytest.mark.parametrize("width", [1, 5, 40, CANDIDATES, 3000])
def test_equal_logits_are_ordered_by_id(width):
    """Rounded logits have many ties, among them +0.0 and -0.0, which are equal."""
    generator, vocab = fresh_generator(), 3000
    logits = (torch.randn(6, vocab, generator=generator) * 4).round()
    logits[0] = torch.where(torch.rand(vocab, generator=generator) < 0.5, 0.0, -0.0)
    shifted = logits - logits.amax(dim=-1, keepdim=True)
    values, ids = top_candidates(shifted, width)
    expected = shifted.sort(dim=-1, descending=True, stable=True)
    assert torch.equal(ids, expected.indices[:, :width])
    assert torch.equal(values, expected.values[:, :width])


def test_ties_are_cut_the_same_way_by_every_path():
    generator, rows, vocab = fresh_generator(), 30, 2500
    logits = (torch.randn(rows, vocab, generator=generator) * 3).round()
    keys = keys_for(range(rows), position=8)
    params = [(1.0, 1 + row, 0.8 if row % 2 else 1.0, 0.0) for row in range(rows)]
    narrow, wide = (draw(logits, keys, filters_for(params, width, vocab)) for width in (rows, vocab))
    assert torch.equal(narrow, wide)
    assert narrow[0] == logits[0].argmax(), "top-k 1 is not the arg-max"
    for row in range(rows):
        kept = reference_probabilities(logits[row], *params[row])
        scores = kept.log()[None] + noise_of(keys[[row]], vocab)
        assert_best(narrow[[row]], scores)


@pytest.mark.parametrize("width", [0, 3, 11])
def test_excluded_tokens_are_never_drawn(width):
    vocab, rows = 11, 300
    logits = torch.full((rows, vocab), -torch.inf)
    logits[:, [2, 7]] = torch.tensor([-3.0, 4.0])
    params = [(2.0, 3 if width == 3 else 0, 0.999 if width else 1.0, 0.0)] * rows
    tokens = draw(logits, keys_for(range(rows)), filters_for(params, width, vocab))
    assert set(tokens.tolist()) == {2, 7}


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("width", [0, 5, 2000])
def test_a_row_that_is_not_finite_stays_alone(width, bad):
    generator, vocab = fresh_generator(), 2000
    logits = torch.randn(9, vocab, generator=generator) * 5
    keys = keys_for(range(9))
    params = [(0.8, 5 if width == 5 else 0, 0.9 if width else 1.0, 0.01)] * 9
    expected = draw(logits, keys, filters_for(params, width, vocab))
    broken = logits.clone()
    broken[4] = bad
    got = draw(broken, keys, filters_for(params, width, vocab))
    others = [row for row in range(9) if row != 4]
    assert torch.equal(got[others], expected[others])
    assert 0 <= got[4] < vocab, "an index outside the vocabulary would be a device fault"


def test_extreme_logits_and_temperatures():
    logits = torch.tensor([[3e38, -3e38, 0.0, 2.9e38]] * 3)
    params = [(1e-5, 0, 0.9, 0.0), (2.0, 0, 0.9, 0.0), (1.0, 0, 0.9, 0.5)]
    for width in (0, 4):
        assert draw(logits, keys_for(range(3)), filters_for(params, width, 4)).tolist() == [0, 0, 0]


def test_top_p_of_one_beside_a_smaller_one_keeps_the_tail():
    """A filter that is off must not cut the tail of its row because another row needs it."""
    rows, vocab = 3000, 50
    logits = torch.linspace(0, -12, vocab).expand(rows, vocab)
    keys = keys_for(range(rows))
    params = [(1.0, 0, 0.5 if row == 0 else 1.0, 0.0) for row in range(rows)]
    got = draw(logits, keys, filters_for(params, vocab, vocab))
    assert torch.equal(got[1:], gumbel_argmax(logits, keys)[1:])


def test_no_rows_and_bad_widths():
    assert draw(torch.zeros(0, 5), torch.zeros(0, 2, dtype=torch.int32), Filters(0, torch.zeros(0))).shape == (0,)
    with pytest.raises(ValueError, match="vocabulary size 5"):
        draw(torch.zeros(1, 5), keys_for([1]), Filters(6, torch.ones(1)))


def test_top_p_below_one_counts_exactly():
    """Four equal tokens: p = 0.5 keeps two, a little more keeps three; whatever the rounding of a float sum."""
    logits, keys = torch.zeros(4000, 4), keys_for(range(4000))
    for top_p, kept in ((0.25, 1), (0.26, 2), (0.5, 2), (0.51, 3), (0.76, 4)):
        tokens = draw(logits, keys, filters_for([(1.0, 0, top_p, 0.0)] * 4000, 4, 4))
        assert set(tokens.tolist()) == set(range(kept))
    assert torch.equal(tokens, gumbel_argmax(logits, keys))
