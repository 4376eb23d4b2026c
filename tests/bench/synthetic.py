"""Runs whose every figure is known beforehand."""

from collections.abc import Sequence
from itertools import accumulate

import numpy as np

from bladellm_tools.bench.records import Benchmark, ClientHealth, LevelRun, Load, Outcome, RequestRecord


def answered(
    intended: float,
    *,
    ttft: float = 0.1,
    gaps: Sequence[float] = (0.01,) * 9,
    tokens: Sequence[int] | None = None,
    index: int = 0,
    lag: float = 0.0,
    prompt: int = 50,
    cached: int = 0,
    asked: int | None = None,
) -> RequestRecord:
    """A request sent `lag` late, whose first content comes `ttft` after the send and whose chunks follow by `gaps`."""
    sent = intended + lag
    times = [sent + ttft + later for later in accumulate(gaps, initial=0.0)]
    tokens = list(tokens) if tokens is not None else [1] * len(times)
    return RequestRecord(
        index=index, intended=intended, sent=sent, headers=sent + ttft / 2, first_chunk=sent + ttft / 2, times=times,
        tokens=tokens, ended=times[-1], outcome=Outcome.OK, status=200, finish_reason="length",
        asked_tokens=sum(tokens) if asked is None else asked, prompt_tokens=prompt, completion_tokens=sum(tokens),
        cached_tokens=cached,
    )  # fmt: skip


def failed(intended: float, outcome: Outcome = Outcome.HTTP_ERROR, status: int | None = 503) -> RequestRecord:
    return RequestRecord(
        index=0, intended=intended, sent=intended, ended=intended + 0.001, outcome=outcome, status=status
    )


def run_of(
    records: list[RequestRecord],
    *,
    load: Load | None = None,
    duration: float | None = None,
    warmup: float = 0.0,
    endpoint: str = "a",
    repeat: int = 0,
    limited: bool = False,
) -> LevelRun:
    for index, record in enumerate(records):
        record.index = index
    end = max((record.intended for record in records), default=0.0) if duration is None else duration
    return LevelRun(
        endpoint=endpoint, load=load or Load(qps=1.0), repeat=repeat, seed=repeat, began=1.7e9, duration=end,
        warmup=warmup, requests=records, client=ClientHealth(headroom=5.0, limited=limited),
    )  # fmt: skip


def queue_run(
    qps: float,
    service: float,
    *,
    count: int = 400,
    seed: int = 0,
    law: str = "exponential",
    endpoint: str = "a",
    repeat: int = 0,
    slower: float = 1.0,
    tokens: int = 10,
) -> LevelRun:
    """Poisson arrivals at one server, first come, first served: TTFT is the sojourn time, tokens follow in no time.

    `slower` multiplies every time but the arrivals' after the queue, so that two runs differ by that factor exactly.
    """
    rng = np.random.default_rng([seed, repeat])
    arrivals = np.cumsum(rng.exponential(1 / qps, count))
    services = rng.exponential(service, count) if law == "exponential" else np.full(count, service)
    every_gap = (slower * rng.gamma(4.0, 0.01 / 4, (count, tokens - 1))).tolist()
    free, records = 0.0, []
    for arrival, takes, gaps in zip(arrivals.tolist(), services.tolist(), every_gap, strict=True):
        free = max(free, arrival) + takes
        records.append(answered(arrival, ttft=slower * (free - arrival), gaps=gaps))
    return run_of(records, load=Load(qps=qps), endpoint=endpoint, repeat=repeat)


def benchmark_of(runs: list[LevelRun]) -> Benchmark:
    return Benchmark(title="synthetic", flags={"qps": ["1"]}, environment={"clock": "perf_counter"}, runs=runs)
