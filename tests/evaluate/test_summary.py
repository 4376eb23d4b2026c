"""Figures from scores: means and percentiles by hand, intervals by simulation."""

import math
import random

import numpy as np
import pytest
import torch

from bladellm_tools.bench.stats import t_interval
from bladellm_tools.evaluate.scoring import PairScores, Scores
from bladellm_tools.evaluate.summary import estimate_mean, summarise


def random_scores(windows: int, targets: int) -> Scores:
    kl = torch.rand(windows, targets) ** 4
    losses = torch.rand(windows, dtype=torch.float64)
    return Scores(3 + losses, PairScores(2.9 + losses**2, kl, torch.rand(windows, dtype=torch.float64)))


def test_the_figures_of_several_texts_count_every_window_once() -> None:
    texts = [random_scores(count, 14) for count in (3, 8, 5)]
    summary = summarise(texts, 15)
    losses = [float(loss) for text in texts for loss in text.losses]
    other = [float(loss) for text in texts for loss in text.pair.losses]
    kl = sorted(float(value) for text in texts for value in text.pair.kl.flatten())
    assert (summary.windows, summary.targets) == (16, 16 * 14)
    assert summary.perplexity.value == pytest.approx(math.exp(math.fsum(losses) / 16))
    assert summary.baseline.perplexity.value == pytest.approx(math.exp(math.fsum(other) / 16))
    assert summary.baseline.ratio.value == pytest.approx(math.exp(math.fsum(losses) / 16 - math.fsum(other) / 16))
    assert summary.baseline.kl_mean.value == pytest.approx(math.fsum(kl) / len(kl))
    assert kl[math.floor(0.99 * (len(kl) - 1))] <= summary.baseline.kl_p99 <= kl[math.ceil(0.99 * (len(kl) - 1))]
    agreement = [float(share) for text in texts for share in text.pair.agreement]
    assert summary.baseline.agreement.value == pytest.approx(math.fsum(agreement) / 16)


def test_the_interval_of_one_text_is_students() -> None:
    scores = random_scores(9, 4)
    interval = t_interval(scores.losses.tolist())
    perplexity = summarise([scores], 5).perplexity
    assert (perplexity.low, perplexity.high) == pytest.approx((math.exp(interval.low), math.exp(interval.high)))


def test_the_ratio_is_paired() -> None:
    """Windows of very different difficulty, a model worse by the same share on each: the share is certain."""
    losses = torch.rand(12, dtype=torch.float64) * 5
    scores = Scores(losses + 0.1, PairScores(losses, torch.rand(12, 3), torch.rand(12, dtype=torch.float64)))
    summary = summarise([scores], 4)
    assert summary.perplexity.high / summary.perplexity.low > 1.5
    ratio = summary.baseline.ratio
    assert (ratio.low, ratio.value, ratio.high) == pytest.approx((math.exp(0.1),) * 3)


def test_one_window_has_no_interval() -> None:
    perplexity = summarise([random_scores(1, 4)], 5).perplexity
    assert (perplexity.low, perplexity.high) == (None, None)
    assert summarise([random_scores(1, 4), random_scores(3, 4)], 5).perplexity.low is None


@pytest.mark.parametrize("sizes", [(7,), (4, 11), (3, 5, 20)])
def test_intervals_hold_the_truth_as_often_as_they_say(sizes) -> None:
    """Texts with means and spreads of their own; their windows are drawn anew each time."""
    generator = np.random.default_rng(random.getrandbits(64))
    means, spreads = generator.normal(3, 1, len(sizes)), generator.uniform(0.1, 0.5, len(sizes))
    truth = float(means @ np.asarray(sizes)) / sum(sizes)
    inside = 0
    for _ in range(2000):
        drawn = [generator.normal(*each) for each in zip(means, spreads, sizes, strict=True)]
        estimate = estimate_mean(drawn)
        inside += estimate.low <= truth <= estimate.high
    assert 0.93 <= inside / 2000 <= 0.975


def test_a_hopeless_model_has_an_infinite_perplexity() -> None:
    assert summarise([Scores(torch.full((3,), 1000.0, dtype=torch.float64))], 5).perplexity.value == math.inf
