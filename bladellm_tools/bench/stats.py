"""Estimates with intervals: t over runs, block bootstrap within a run, ratios and trends; all of it repeatable."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from statistics import NormalDist
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Floats: TypeAlias = NDArray[np.float64]
Ints: TypeAlias = NDArray[np.int64]

CONFIDENCE = 0.95
NOISY_CV = 0.10
DRAWS = 1000
MOST_BLOCKS = 512
LEAST_BEYOND = 10.0
UNRELATED = 1.5
SEED = 20_240_917


@dataclass(frozen=True, slots=True)
class Interval:
    """A confidence interval; `contains` counts the ends in."""

    low: float
    high: float

    def contains(self, value: float) -> bool:
        """Whether the value lies between the ends."""
        return self.low <= value <= self.high

    def mapped(self, function: "np.ufunc") -> "Interval":
        """The interval of an increasing function of the quantity."""
        return Interval(float(function(self.low)), float(function(self.high)))


def student_cdf(t: float, freedom: int) -> float:
    """Distribution function of Student's t for whole degrees of freedom (Abramowitz and Stegun 26.7.3 and 26.7.4)."""
    angle = math.atan(t / math.sqrt(freedom))
    cosine2 = math.cos(angle) ** 2
    odd = freedom % 2
    term = math.cos(angle) if odd else 1.0
    total = 0.0
    for index in range(freedom // 2):
        total += term
        term *= cosine2 * ((2 * index + 2) / (2 * index + 3) if odd else (2 * index + 1) / (2 * index + 2))
    inside = (2 / math.pi) * (angle + math.sin(angle) * total) if odd else math.sin(angle) * total
    return 0.5 + inside / 2


@cache
def student_quantile(probability: float, freedom: int) -> float:
    """The t value that a share `probability` (0.5 and up) of the distribution does not exceed."""
    low, high = 0.0, 1.0
    while student_cdf(high, freedom) < probability:
        high *= 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if student_cdf(middle, freedom) < probability else (low, middle)
    return (low + high) / 2


def t_interval(values: Sequence[float], confidence: float = CONFIDENCE) -> Interval | None:
    """Interval of the mean of independent runs; None of fewer than two."""
    if len(values) < 2:
        return None
    mean, deviation = float(np.mean(values)), float(np.std(values, ddof=1))
    margin = student_quantile((1 + confidence) / 2, len(values) - 1) * deviation / math.sqrt(len(values))
    return Interval(mean - margin, mean + margin)


def coefficient_of_variation(values: Sequence[float]) -> float | None:
    """Standard deviation of the runs over their mean; None of fewer than two runs or of a mean of 0."""
    if len(values) < 2 or not (mean := float(np.mean(values))):
        return None
    return float(np.std(values, ddof=1)) / abs(mean)


def correlation_time(series: Floats) -> float:
    """How many neighbours tell as much as one independent value: 1 plus twice the sum of the autocorrelations.

    The sum ends where it has run over five times its own result (Sokal's window); 1 where neighbours are unrelated.
    """
    count = len(series)
    if count < 8:
        return 1.0
    spectrum = np.abs(np.fft.rfft(series - series.mean(), 2 * count)) ** 2
    covariance = np.fft.irfft(spectrum)[:count]
    if covariance[0] <= 0:
        return 1.0
    times = 2 * np.cumsum(covariance / covariance[0]) - 1
    ended = np.arange(count) >= 5 * times
    time = float(times[int(np.argmax(ended))] if ended.any() else times.max())
    return time if time > UNRELATED else 1.0


def block_length(series: Floats) -> int:
    """Requests a bootstrap block needs so that neighbours keep their dependence.

    Two correlation times, or what Carlstein (1986) finds best for an AR(1) series with that correlation time if it is
    more; 1 when neighbours are unrelated. There are never fewer than 6 blocks nor more than `MOST_BLOCKS`.
    """
    count, time = len(series), correlation_time(series)
    carlstein = ((time**2 - 1) / (2 * time)) ** (2 / 3) * count ** (1 / 3)
    wanted = math.ceil(max(2 * time, carlstein)) if time > 1 else 1
    return max(1, math.ceil(count / MOST_BLOCKS), min(wanted, count // 6))


def bootstrap_ratio(
    numerator: Floats, denominator: Floats, least_block: int = 1, confidence: float = CONFIDENCE
) -> Interval | None:
    """Interval of sum(numerator) / sum(denominator) over requests, by resampling circular blocks of neighbours.

    Both are one value a request, in order of their intended times; a request without a value has 0 in both. The
    spread is widened as Student's t is against the normal, for there are only so many blocks.
    """
    count = len(numerator)
    if count < 2 or denominator.sum() <= 0:
        return None
    centre = float(numerator.sum() / denominator.sum())
    length = min(max(block_length(numerator - centre * denominator), least_block), count)
    blocks = math.ceil(count / length)
    starts = _drawn_starts(count, blocks)
    above = _block_sums(numerator, length)[starts].sum(axis=1)
    below = _block_sums(denominator, length)[starts].sum(axis=1)
    low, high = np.quantile(above[below > 0] / below[below > 0], [(1 - confidence) / 2, (1 + confidence) / 2])
    upper = (1 + confidence) / 2
    wider = student_quantile(upper, max(blocks - 1, 1)) / NormalDist().inv_cdf(upper)
    return Interval(centre - wider * (centre - float(low)), centre + wider * (float(high) - centre))


@lru_cache(maxsize=8)
def _drawn_starts(count: int, blocks: int) -> Ints:
    """Where the blocks of every draw start: the same for all figures of a level, so drawn once for them."""
    return np.random.default_rng(SEED).integers(0, count, size=(DRAWS, blocks))


def _block_sums(series: Floats, length: int) -> Floats:
    """Sum of each circular block of `length` neighbours, one per start."""
    running = np.concatenate(([0.0], np.cumsum(np.concatenate((series, series[: length - 1])))))
    return np.asarray(running[length:] - running[:-length])


def ratio_interval(above: float, over: Interval | None, below: float, under: Interval | None) -> Interval | None:
    """Interval of above / below from the intervals of two independent quantities; None unless both are positive.

    The two are combined on the log scale, each end by its own distance (the MOVER method of Donner and Zou, 2012).
    """
    if over is None or under is None or min(above, below, over.low, under.low) <= 0:
        return None
    centre = math.log(above / below)
    down = math.hypot(math.log(above / over.low), math.log(under.high / below))
    up = math.hypot(math.log(over.high / above), math.log(below / under.low))
    return Interval(math.exp(centre - down), math.exp(centre + up))


def paired_ratio(above: Sequence[float], below: Sequence[float]) -> tuple[float, Interval | None]:
    """Geometric mean of paired ratios of positive values, with the t interval of their logarithms."""
    logs = np.log(np.asarray(above) / np.asarray(below))
    interval = t_interval(logs.tolist())
    return math.exp(float(logs.mean())), interval.mapped(np.exp) if interval else None


@dataclass(frozen=True, slots=True)
class Trend:
    """A straight line through a series: its slope and the least slope the t margin allows."""

    slope: float
    least: float


def trend(times: Floats, values: Floats, confidence: float = CONFIDENCE) -> Trend | None:
    """Least-squares slope of an evenly spaced series; the margin is widened by the residuals' lag-1 correlation.

    None of fewer than four points, and of times too close together for a slope.
    """
    count = len(times)
    centred = times - times.mean() if count else times
    spread = float(centred @ centred)
    if count < 4 or spread == 0:
        return None
    slope = float(centred @ values) / spread
    residual = values - values.mean() - slope * centred
    power = float(residual @ residual)
    correlation = float(residual[1:] @ residual[:-1]) / power if power > 0 else 0.0
    correlation = min(max(correlation, 0.0), 0.9)
    error = math.sqrt(power / (count - 2) / spread * (1 + correlation) / (1 - correlation))
    return Trend(slope, slope - student_quantile((1 + confidence) / 2, count - 2) * error)


@dataclass(frozen=True)
class Samples:
    """Weighted values of one metric, sorted, with the request each came from.

    `weights` is how many tokens (or 1) a value stands for; `rows` numbers the requests 0 to `requests` - 1 in order of
    their intended times, for the bootstrap; `cumulative` is the running sum of the weights.
    """

    values: Floats
    weights: Floats
    rows: Ints
    requests: int
    cumulative: Floats

    @classmethod
    def of(cls, values: Floats, weights: Floats, rows: Ints, requests: int) -> "Samples":
        """Sort values that belong to `requests` requests."""
        order = np.argsort(values)
        weights = weights[order]
        return cls(values[order], weights, rows[order], requests, np.cumsum(weights))

    @property
    def total(self) -> float:
        """Sum of the weights."""
        return float(self.cumulative[-1]) if len(self.cumulative) else 0.0

    def contributors(self) -> int:
        """How many requests have a value."""
        return int(np.count_nonzero(np.bincount(self.rows, minlength=1)))

    def mean(self) -> float | None:
        """Weighted mean; None without values."""
        return float(self.values @ self.weights) / self.total if self.total else None

    def std(self) -> float | None:
        """Weighted standard deviation; None of fewer than two values."""
        if len(self.values) < 2:
            return None
        centred = self.values - float(self.mean() or 0.0)
        return math.sqrt(float(centred**2 @ self.weights) / self.total)

    def percentile(self, share: float) -> float | None:
        """The least value that at least `share` (0 to 1) of the weight does not exceed; None without values."""
        if not self.total:
            return None
        place = np.searchsorted(self.cumulative, share * self.total * (1 - 1e-12), side="left")
        return float(self.values[min(int(place), len(self.values) - 1)])

    def mean_interval(self) -> Interval | None:
        """Interval of the mean by the block bootstrap over requests; None of too few independent values."""
        weights = self._per_request(self.weights)
        ranks = self._request_ranks(weights)
        if self._independent(ranks) < 2 * LEAST_BEYOND:
            return None
        return bootstrap_ratio(self._per_request(self.values * self.weights), weights, block_length(ranks))

    def percentile_interval(self, share: float) -> Interval | None:
        """Interval of a percentile: the bootstrap interval of the share below it, read back as values (Woodruff).

        None where fewer than `LEAST_BEYOND` independent values lie beyond the percentile: neighbours that wait in the
        same queue are no independent witnesses, and an interval from one burst would be far too narrow.
        """
        middle = self.percentile(share)
        weights = self._per_request(self.weights)
        ranks = self._request_ranks(weights)
        if middle is None or self._independent(ranks) * min(share, 1 - share) < LEAST_BEYOND - 1e-9:
            return None
        below = int(np.searchsorted(self.values, middle, side="right"))
        within = np.bincount(self.rows[:below], self.weights[:below], self.requests).astype(np.float64)
        shares = bootstrap_ratio(within, weights, block_length(ranks))
        if shares is None:
            return None
        low, high = self.percentile(max(shares.low, 0.0)), self.percentile(min(shares.high, 1.0))
        return Interval(min(low or 0.0, middle), max(high or 0.0, middle))

    def _request_ranks(self, weights: Floats) -> Floats:
        """Rank of each request by its own mean: how slow it was among the others, without a tail that hides them."""
        used = weights > 0
        means = self._per_request(self.values * self.weights)[used] / weights[used]
        return np.argsort(np.argsort(means)).astype(np.float64)

    def _independent(self, ranks: Floats) -> float:
        """Independent values that tell as much as these, by how much neighbouring requests resemble each other."""
        return self.total / correlation_time(ranks)

    def _per_request(self, amounts: Floats) -> Floats:
        """Sum of the amounts of each request."""
        return np.bincount(self.rows, weights=amounts, minlength=self.requests).astype(np.float64)
