"""When the requests of an open loop leave: drawn before the level, the same for every endpoint."""

import numpy as np
from numpy.typing import NDArray

from bladellm_runtime.errors import ConfigError
from bladellm_tools.bench.args import LevelArgs

Times = NDArray[np.float64]


def send_times(level: LevelArgs, qps: float, rng: np.random.Generator, trace: list[float] | None = None) -> list[float]:
    """Intended send times in seconds, rising; the warm-up is those before `level.warmup`.

    After it come `num_requests`, or the arrivals of `duration` seconds and at least `min_requests`. `trace` are the
    times of a recorded trace, stretched to a mean of `qps`; it may end earlier.
    """
    if level.arrival == "burst":
        return burst(level, qps)
    if level.arrival == "trace":
        times = stretched(trace or [], qps)
    else:
        times = np.cumsum(gaps(level, qps, rng))
        if level.arrival == "constant":
            times -= times[0]
    return [float(time) for time in times[: needed(level, times)]]


def needed(level: LevelArgs, times: Times) -> int:
    """How many of the times a level uses."""
    warm = int(np.searchsorted(times, level.warmup))
    if level.num_requests is not None:
        return warm + level.num_requests
    return max(int(np.searchsorted(times, level.warmup + level.duration)), warm + level.min_requests)


def expected_count(level: LevelArgs, qps: float) -> float:
    """How many requests a level has, warm-up included, but where it follows a trace."""
    return level.warmup * qps + (level.num_requests or max(level.duration * qps, level.min_requests))


def gaps(level: LevelArgs, qps: float, rng: np.random.Generator) -> Times:
    """More gaps than a level can need, by twelve standard deviations of their sum."""
    shape = {"constant": np.inf, "gamma": level.burstiness}.get(level.arrival, 1.0)
    count = expected_count(level, qps)
    count = int(count + 12 * np.sqrt(count / shape) + 100 / min(shape, 1.0))
    if np.isinf(shape):
        return np.full(count, 1 / qps)
    return rng.gamma(shape, 1 / (shape * qps), count)


def burst(level: LevelArgs, qps: float) -> list[float]:
    """As many requests as the level would have, all at once; the warm-up before it is constant at `qps`."""
    count = level.num_requests or max(level.min_requests, round(level.duration * qps))
    warm = [number / qps for number in range(int(np.ceil(level.warmup * qps)))]
    return [time for time in warm if time < level.warmup] + [level.warmup] * count


def trace_qps(times: list[float]) -> float:
    """The mean rate of a trace's arrivals. Raises `ConfigError` where it has none."""
    span = times[-1] - times[0] if times else 0.0
    if span <= 0:
        raise ConfigError("--data: a trace needs at least two rising times t; give another file or --arrival poisson")
    return (len(times) - 1) / span


def stretched(times: list[float], qps: float) -> Times:
    """A trace from time 0, its shape kept and its mean rate made `qps`."""
    scale = trace_qps(times) / qps
    return (np.asarray(times) - times[0]) * scale
