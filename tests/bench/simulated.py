"""Level runs of a server that exists only as a formula: one queue, a fixed service time, evenly spaced tokens."""

import random

from bladellm_tools.bench.records import Benchmark, ClientHealth, LevelRun, Load, Outcome, RequestRecord


def simulated_run(
    endpoint: str, qps: float, repeat: int = 0, *, service: float = 0.05, tbt: float = 0.01, tokens: int = 20,
    seconds: float = 20.0, failing: float = 0.0,
) -> LevelRun:  # fmt: skip
    """Poisson arrivals at a first-in-first-out server; `failing` is the share of requests that are refused."""
    draw = random.Random(f"{endpoint} {qps} {repeat}")
    now = free = 0.0
    requests = []
    while (now := now + draw.expovariate(qps)) < seconds:
        record = RequestRecord(len(requests), intended=now, sent=now + 1e-4, asked_tokens=tokens, prompt_tokens=8)
        if draw.random() < failing:
            record.outcome, record.status, record.ended, record.error = Outcome.HTTP_ERROR, 500, now + 0.01, "refused"
        else:
            free = max(free, now) + service
            step = tbt * (1 + 0.02 * qps)
            record.times = [free + step * place * draw.uniform(0.98, 1.02) for place in range(tokens)]
            record.times.sort()
            record.tokens = [1] * tokens
            record.headers = record.first_chunk = record.times[0]
            record.ended, record.outcome, record.status = record.times[-1], Outcome.OK, 200
            record.completion_tokens, record.finish_reason = tokens, "length"
        requests.append(record)
    health = ClientHealth(cpu_share=0.1, chunk_cost=1e-5, headroom=20.0)
    return LevelRun(endpoint, Load(qps=qps), repeat, repeat, 1.7e9, seconds, 2.0, requests, health)


def simulated_benchmark(rates: tuple[float, ...] = (2, 5, 10, 14, 18, 24), repeats: int = 2) -> Benchmark:
    """Two servers, the second half as fast."""
    runs = [
        simulated_run(endpoint, qps, repeat, service=service, tbt=service / 4)
        for qps in rates
        for repeat in range(repeats)
        for endpoint, service in (("ours", 0.045), ("peer", 0.09))
    ]
    return Benchmark("ours and peer", {"seed": 0, "input_len": 8}, {"clock": "simulated"}, runs)
