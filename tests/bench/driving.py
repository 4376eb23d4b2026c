"""Levels run against mock servers, for tests."""

import asyncio
from collections.abc import Callable, Iterable

import pytest

from bladellm_tools.bench.args import LevelArgs, MockArgs, TargetArgs, WorkloadArgs
from bladellm_tools.bench.eventloop import run_loop
from bladellm_tools.bench.level import run_level
from bladellm_tools.bench.mock_process import MockProcess
from bladellm_tools.bench.records import LevelRun, Load
from bladellm_tools.bench.target import resolve_target
from bladellm_tools.bench.workload import plan_requests

DISTURBED_SECONDS = 0.0003
"""Of lateness, the client's and the mock's at p99 together."""
TRIALS, LATE_TRIALS = 6, 3


def closed(streams: int, requests: int) -> tuple[Load, LevelArgs]:
    """A closed loop of exactly so many requests, without a warm-up."""
    return Load(concurrency=streams), LevelArgs(arrival="closed", num_requests=requests, warmup=0, drain_limit=30)


def open_loop(qps: float, **fields: object) -> tuple[Load, LevelArgs]:
    """An open loop without a warm-up, unless the fields say otherwise."""
    return Load(qps=qps), LevelArgs(**{"warmup": 0, "drain_limit": 30, **fields})


async def ask(url: str, load: Load, level: LevelArgs, tokens: int, seed: int = 0, **target_fields: object) -> LevelRun:
    """One level against a server."""
    workload = WorkloadArgs(input_len=16, output_len=tokens, seed=seed)
    target = await resolve_target(TargetArgs(**target_fields), "mock", url)
    return await run_level(target, plan_requests(workload, level, load, 0), load, level, 0, seed)


def drive(
    mock: MockArgs, load: Load, level: LevelArgs, tokens: int, seed: int = 0, **target_fields: object
) -> LevelRun:
    """One level against a mock of its own."""
    with MockProcess(mock) as server:
        return run_loop(ask(server.url, load, level, tokens, seed, **target_fields))


def drive_together(mock: MockArgs, levels: list[tuple[Load, LevelArgs]], tokens: int) -> list[LevelRun]:
    """Several levels at the same time against one mock."""

    async def main(url: str) -> list[LevelRun]:
        return await asyncio.gather(*(ask(url, load, level, tokens) for load, level in levels))

    with MockProcess(mock) as server:
        return run_loop(main(server.url))


def disturbed(runs: Iterable[LevelRun], late: float) -> bool:
    """Whether the client of a run, or a mock that was so late at p99, says that it was kept from its work."""
    return any(run.client.limited or run.client.loop_lag_p99 + late >= DISTURBED_SECONDS for run in runs)


def undisturbed(
    check: Callable[[LevelRun], None],
    mock: MockArgs,
    load: Load,
    level: LevelArgs,
    tokens: int,
    seed: int = 0,
    **target: object,
) -> LevelRun:
    """As `drive`, with `check` of the run; returns a run that passed.

    Where one does not pass, and client or mock say that they were kept from their work by what runs beside them, it is
    measured again. The test is skipped where the mock was late `LATE_TRIALS` times and never in time, which no fault of
    the client can bring about.
    """
    lateness: list[float] = []
    for trial in range(TRIALS):
        with MockProcess(mock) as server:
            run = run_loop(ask(server.url, load, level, tokens, seed, **target))
            lateness.append(server.lateness()["late_p99"])
        try:
            check(run)
            return run
        except AssertionError:
            if not disturbed([run], lateness[-1]) or (trial == TRIALS - 1 and min(lateness) <= DISTURBED_SECONDS):
                raise
        if trial + 1 >= LATE_TRIALS and min(lateness) > DISTURBED_SECONDS:
            break
    pytest.skip(f"this machine is too busy to keep time: the mock was {min(lateness) * 1e3:.1f} ms late at p99")
