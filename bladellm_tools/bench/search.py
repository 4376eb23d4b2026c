"""Levels that are found by measuring: `--qps auto` and `--find_capacity`."""

import dataclasses
import statistics
from collections.abc import Sequence

from bladellm_runtime.errors import UserError
from bladellm_tools.bench.args import LevelArgs
from bladellm_tools.bench.campaign import Campaign, InterruptedCampaignError
from bladellm_tools.bench.capacity import fails
from bladellm_tools.bench.endpoints import Endpoint
from bladellm_tools.bench.figures import LevelFigures, combine
from bladellm_tools.bench.loads import auto_loads, next_rate
from bladellm_tools.bench.records import LevelRun, Load, Outcome
from bladellm_tools.bench.slo import SloLimit
from bladellm_tools.bench.turns import Turn

SERIAL_REQUESTS = 5
PROBE_STREAMS = (8, 32, 128, 512)
WORTHWHILE = 1.1
"""A probe of four times the streams that does not gain this factor has found the limit."""
ANSWERS_PER_PROBE = 3.0
"""How many times the duration of an answer a probe lasts; below two, it would not see one after another."""
LEAST_PROBE_SECONDS, MOST_PROBE_SECONDS = 1.0, 120.0
MOST_SEARCH_LEVELS = 20


async def find_loads(campaign: Campaign, endpoints: Sequence[Endpoint]) -> list[Load]:
    """Levels from far below saturation to beyond it, from a probe of every endpoint."""
    rates = []
    for endpoint in endpoints:
        rate = await saturation(campaign, endpoint)
        campaign.view.say(f"{endpoint.name} saturates at about {rate:.3g} requests a second")
        rates.append(rate)
    return auto_loads(rates)


async def saturation(campaign: Campaign, endpoint: Endpoint) -> float:
    """Requests a second an endpoint answers at most, roughly: one at a time, then ever more at once while it gains."""
    serial = probe_level(campaign.level, duration=0.1, least=SERIAL_REQUESTS)
    run = await probe(campaign, endpoint, 1, serial)
    seconds = answer_seconds(run)
    best = 1 / seconds
    for streams in PROBE_STREAMS:
        duration = min(max(ANSWERS_PER_PROBE * seconds, LEAST_PROBE_SECONDS), MOST_PROBE_SECONDS)
        run = await probe(campaign, endpoint, streams, probe_level(campaign.level, duration, 2 * streams))
        rate, seconds = answers_a_second(run), answer_seconds(run)
        if rate < WORTHWHILE * best:
            return max(rate, best)
        best = rate
    return best


def probe_level(level: LevelArgs, duration: float, least: int) -> LevelArgs:
    """A short closed loop without warm-up."""
    changes = {"arrival": "closed", "duration": duration, "min_requests": least, "num_requests": None, "warmup": 0.0}
    return dataclasses.replace(level, **changes)  # type: ignore[arg-type]


async def probe(campaign: Campaign, endpoint: Endpoint, streams: int, level: LevelArgs) -> LevelRun:
    """One probe; it is no level of the benchmark. Raises `UserError` when nothing succeeds."""
    run = await campaign.measure(Turn(endpoint, Load(concurrency=streams), 0), level)
    if campaign.stop.is_set():
        raise InterruptedCampaignError
    if not any(record.outcome is Outcome.OK for record in run.requests):
        why = next((record.error for record in run.requests if record.error), run.aborted or "no answer")
        raise UserError(f"no request of the probe for --qps auto succeeded at {endpoint.name}: {why}")
    return run


def answer_seconds(run: LevelRun) -> float:
    """Median duration of the answers."""
    return statistics.median(
        record.ended - record.intended
        for record in run.requests
        if record.outcome is Outcome.OK and record.ended is not None
    )


def answers_a_second(run: LevelRun) -> float:
    """Rate of completions between the first one and the last request that was sent, where all streams are busy."""
    ends = sorted(record.ended for record in run.requests if record.outcome is Outcome.OK and record.ended is not None)
    busy = [end for end in ends if end <= run.duration]
    if len(busy) < 2 or busy[-1] <= busy[0]:
        return len(ends) / max(ends[-1], 1e-6)
    return (len(busy) - 1) / (busy[-1] - busy[0])


async def find_capacity(campaign: Campaign, endpoint: Endpoint) -> None:
    """Measure levels until the highest rate within the SLO is known to 10 %, and note it."""
    verdicts: dict[float, bool | None] = {}
    for _ in range(MOST_SEARCH_LEVELS):
        if not judge(campaign, endpoint, verdicts):
            return
        unknown = [rate for rate, verdict in verdicts.items() if verdict is None]
        if unknown:
            reason = why_unknown(level_at(campaign, endpoint, unknown[0]))
            campaign.note(f"{endpoint.name}: the search for capacity ended: {reason}.")
            return
        rate = next_rate(*parted(verdicts))
        if rate is None:
            break
        await campaign.take_level(endpoint, Load(qps=float(f"{rate:.4g}")))
    campaign.note(sentence(endpoint.name, *parted(verdicts), campaign.slo))


def judge(campaign: Campaign, endpoint: Endpoint, verdicts: dict[float, bool | None]) -> list[float]:
    """Add the verdicts on levels that were measured since; returns their rates, none where the endpoint is gone."""
    own = [summary for summary in campaign.summaries if summary.endpoint == endpoint.name]
    rates = {summary.load.qps for summary in own if summary.load.qps is not None} - verdicts.keys()
    for rate in rates:
        verdicts[rate] = passes(level_at(campaign, endpoint, rate), campaign.slo)
    return list(rates)


def level_at(campaign: Campaign, endpoint: Endpoint, rate: float) -> LevelFigures:
    """What was measured of an endpoint at a rate."""
    return combine([run for run in campaign.summaries if run.endpoint == endpoint.name and run.load.qps == rate])


def why_unknown(level: LevelFigures) -> str:
    """Why a level does not tell whether it is within the limits."""
    if level.client_limited:
        return f"at {level.load.label} the client was the limit; see blade_llm_bench check"
    return f"{level.load.label} has too few completions for the SLO; raise --min_requests"


def parted(verdicts: dict[float, bool | None]) -> tuple[list[float], list[float]]:
    """Rates that passed, and rates that failed."""
    return [rate for rate, passed in verdicts.items() if passed], [
        rate for rate, passed in verdicts.items() if not passed
    ]


def passes(level: LevelFigures, slo: Sequence[SloLimit]) -> bool | None:
    """Whether a level keeps every limit in a steady state; None where it has too few completions to tell.

    A client that could not keep up adds to latencies: a level it limited may pass, but does not say what is too much.
    """
    failed = None if level.client_limited else False
    if level.oversaturated or not level.completed or any(fails(level, limit) for limit in slo):
        return failed
    values = [(level.value(limit.figure), limit.seconds) for limit in slo]
    if any(value is not None and value > seconds for value, seconds in values):
        return failed
    return None if any(value is None for value, _ in values) else True


def sentence(name: str, passed: list[float], failed: list[float], slo: Sequence[SloLimit]) -> str:
    """The result in a sentence."""
    limits = " and ".join(limit.text for limit in slo)
    within = [rate for rate in passed if not failed or rate < min(failed)]
    if not within:
        return f"{name} keeps {limits} at no rate that was tried, down to {min(failed):.3g} QPS."
    if not failed:
        return f"{name} keeps {limits} at every rate that was tried, up to {max(within):.3g} QPS."
    return f"{name} keeps {limits} up to {max(within):.3g} QPS, and no longer at {min(failed):.3g} QPS."
