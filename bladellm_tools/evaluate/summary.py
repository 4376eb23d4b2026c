"""From scores to figures with 95 % intervals: t intervals over windows, the windows of one file being one stratum."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from bladellm_tools.bench.stats import CONFIDENCE, Floats, student_quantile
from bladellm_tools.evaluate.scoring import PairScores, Scores


@dataclass(frozen=True, slots=True)
class Estimate:
    """A figure and the ends of its interval; they are None where too few windows were seen."""

    value: float
    low: float | None = None
    high: float | None = None

    def exp(self) -> "Estimate":
        """The figure's exponential."""
        low, high = (None if end is None else _exp(end) for end in (self.low, self.high))
        return Estimate(_exp(self.value), low, high)


@dataclass(frozen=True, slots=True)
class PairSummary:
    """A model beside its baseline: `ratio` is the model's perplexity over the baseline's, its interval paired; KL in
    nats a token, `kl_p99` the 99th percentile over tokens; `agreement` of the likeliest tokens, 0 to 1."""

    perplexity: Estimate
    ratio: Estimate
    kl_mean: Estimate
    kl_p99: float
    agreement: Estimate


@dataclass(frozen=True, slots=True)
class Summary:
    """Figures of one text or of several together. `targets` is how many tokens were predicted."""

    windows: int
    targets: int
    perplexity: Estimate
    baseline: PairSummary | None = None


def summarise(scores: Sequence[Scores], window: int) -> Summary:
    """One or more texts' scores, every window weighing the same; `window` is its length in tokens."""
    losses = [_floats(text.losses) for text in scores]
    count = sum(map(len, losses))
    pairs = [text.pair for text in scores if text.pair is not None]
    pair = _summarise_pairs(losses, pairs) if pairs else None
    return Summary(count, count * (window - 1), estimate_mean(losses).exp(), pair)


def _summarise_pairs(losses: Sequence[Floats], pairs: Sequence[PairScores]) -> PairSummary:
    baseline = [_floats(pair.losses) for pair in pairs]
    differences = [own - other for own, other in zip(losses, baseline, strict=True)]
    return PairSummary(
        perplexity=estimate_mean(baseline).exp(),
        ratio=estimate_mean(differences).exp(),
        kl_mean=estimate_mean([_floats(pair.kl.double().mean(1)) for pair in pairs]),
        kl_p99=float(np.quantile(np.concatenate([_floats(pair.kl).ravel() for pair in pairs]), 0.99)),
        agreement=estimate_mean([_floats(pair.agreement) for pair in pairs]),
    )


def estimate_mean(strata: Sequence[Floats]) -> Estimate:
    """The mean of all values, with the t interval of a stratified sample: texts are chosen, their windows vary.

    Degrees of freedom after Satterthwaite. No interval where a stratum has a single value.
    """
    total = sum(map(len, strata))
    mean = float(sum(values.sum() for values in strata)) / total
    if any(len(values) < 2 for values in strata):
        return Estimate(mean)
    parts = [(len(values) / total) ** 2 * float(values.var(ddof=1)) / len(values) for values in strata]
    variance = sum(parts)
    if variance == 0:
        return Estimate(mean, mean, mean)
    freedom = variance**2 / sum(part**2 / (len(values) - 1) for part, values in zip(parts, strata, strict=True))
    margin = student_quantile((1 + CONFIDENCE) / 2, max(1, int(freedom))) * math.sqrt(variance)
    return Estimate(mean, mean - margin, mean + margin)


def _floats(values: torch.Tensor) -> Floats:
    return values.double().numpy()


def _exp(value: float) -> float:
    """exp, infinite where it overflows: a broken model has such a perplexity."""
    return math.exp(value) if value < 709 else math.inf
