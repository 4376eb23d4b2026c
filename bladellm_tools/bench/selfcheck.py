"""`blade_llm_bench check`: whether this machine can measure, found out with the client against mock servers."""

import time
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from bladellm_tools.bench.answer import AnswerReader
from bladellm_tools.bench.args import LevelArgs, MockArgs, SelfCheckArgs, TargetArgs, WorkloadArgs
from bladellm_tools.bench.eventloop import first_served, raise_file_limit, run_loop
from bladellm_tools.bench.health import LIMIT_CPU_SHARE
from bladellm_tools.bench.level import run_level
from bladellm_tools.bench.mock_process import MockProcess
from bladellm_tools.bench.pacing import Pacer, clock
from bladellm_tools.bench.records import LevelRun, Load, Outcome, RequestRecord
from bladellm_tools.bench.target import resolve_target
from bladellm_tools.bench.workload import plan_requests
from bladellm_tools.check.finding import Finding, failed, passed, warned
from bladellm_tools.check.report import counts_line, exit_code, line

SPARE_FILES = 64
TIMER_TRIALS, TIMER_GAP = 200, 0.005
TIMER_GOOD, TIMER_BEARABLE = 0.0003, 0.001
MEDIAN_TOLERANCE, TAIL_TOLERANCE = 0.02, 0.05
COST_STREAMS, COST_TBT, COST_TOKENS = 256, 0.01, 400
COST_GOOD, COST_BEARABLE = 12e-6, 25e-6
STREAM_TBT, STREAM_TOKENS = 0.05, 80
TRIALS = 2
BUSY = "end other work on this machine and check again"


def run(args: SelfCheckArgs) -> int:
    """Run all checks and print a line each. Returns 1 when one FAILED, else 0."""
    checks = checks_of(args)
    width = max(len(name) for name in checks)
    findings = {}
    for name, check in checks.items():
        findings[name] = check()
        print(line(name, findings[name], width), flush=True)
    print(counts_line(findings))
    return exit_code(findings, strict=False)


def checks_of(args: SelfCheckArgs) -> dict[str, Callable[[], Finding]]:
    """The checks by name, in the order of the report."""
    return {
        "check_open_files": lambda: check_open_files(args.streams),
        "check_timer": lambda: judge_timer(run_loop(timer_errors())),
        "check_accuracy_1": lambda: check_accuracy(1),
        "check_accuracy_64": lambda: check_accuracy(64),
        f"check_{args.streams}_streams": lambda: check_streams(args.streams),
        "check_chunk_cost": check_chunk_cost,
    }


def check_open_files(streams: int) -> Finding:
    """Every stream holds a connection open."""
    limit = raise_file_limit()
    detail = f"{limit} open files allowed"
    if limit >= streams + SPARE_FILES:
        return passed(detail)
    return failed(detail, f"{streams} streams need {streams + SPARE_FILES}; raise the hard limit of ulimit -n")


async def timer_errors() -> list[float]:
    """How late the pacer wakes, in seconds."""
    pacer = Pacer()
    errors = []
    with first_served():
        for _ in range(TIMER_TRIALS):
            deadline = clock() + TIMER_GAP
            await pacer.until(deadline)
            errors.append(clock() - deadline)
    pacer.close()
    return errors


def judge_timer(errors: list[float]) -> Finding:
    """Requests leave as exactly as the timer wakes."""
    middle, tail = (float(np.percentile(errors, share)) for share in (50, 99))
    detail = f"requests leave {micro(middle)} late at the median, {micro(tail)} at p99"
    if tail <= TIMER_GOOD:
        return passed(detail)
    return warned(detail, BUSY) if tail <= TIMER_BEARABLE else failed(detail, BUSY)


def check_accuracy(streams: int) -> Finding:
    """TTFT and TBT of a mock that is exact must come out as they are."""
    settings = MockArgs(ttft=0.15, tbt=0.01)
    detail, wrong = "", True
    for _ in range(TRIALS):
        measured, mock_late = measure(settings, streams, requests=max(4, 2 * streams), tokens=100)
        ttft, tbt = ttfts(measured), token_gaps(measured)
        if not ttft.size:
            return failed(f"no answer: {measured.aborted or measured.requests[0].error}")
        detail = f"{describe('TTFT', settings.ttft, ttft)}, {describe('TBT', settings.tbt, tbt)}"
        wrong = is_off(settings.ttft, ttft) or is_off(settings.tbt, tbt)
        if not wrong:
            return passed(detail)
    late = f"{detail}; the mock itself was {micro(mock_late)} late at p99"
    return warned(late, BUSY) if mock_late > TAIL_TOLERANCE * settings.tbt else failed(late, BUSY)


def check_streams(streams: int) -> Finding:
    """Many slow streams: requests must leave on time and the processor have room."""
    run, _ = measure(MockArgs(tbt=STREAM_TBT), streams, requests=streams, tokens=STREAM_TOKENS)
    client = run.client
    lag = f"requests {micro(client.schedule_lag_p99)} late at p99, event loop {micro(client.loop_lag_p99)}"
    detail = f"{1 / STREAM_TBT:g} tokens/s each: {lag}, {client.cpu_share:.0%} of a core"
    if any(record.outcome is not Outcome.OK for record in run.requests):
        return failed(f"{detail}; not all were answered: {run.aborted}", "lower --streams")
    if client.limited or client.loop_lag_p99 > TAIL_TOLERANCE * STREAM_TBT:
        return failed(detail, f"measure fewer than {streams} streams from this machine, or {BUSY}")
    return passed(detail)


def check_chunk_cost() -> Finding:
    """What a chunk costs while a level runs, and afterwards."""
    run, _ = measure(MockArgs(tbt=COST_TBT), COST_STREAMS, requests=COST_STREAMS, tokens=COST_TOKENS)
    cost = run.client.chunk_cost
    if not cost:
        return failed(f"no answer: {run.aborted}")
    most = int(LIMIT_CPU_SHARE / cost * STREAM_TBT)
    detail = f"{micro(cost)} of CPU a chunk, {micro(reading_cost())} more after the level"
    detail += f"; about {most} streams of {1 / STREAM_TBT:g} tokens/s at most"
    if cost <= COST_GOOD:
        return passed(detail)
    return warned(detail, BUSY) if cost <= COST_BEARABLE else failed(detail, BUSY)


def measure(settings: MockArgs, streams: int, requests: int, tokens: int) -> tuple[LevelRun, float]:
    """A closed loop against a mock in another process: the run, and how late the mock itself was at p99."""
    workload = WorkloadArgs(input_len=32, output_len=tokens)
    level = LevelArgs(arrival="closed", num_requests=requests, warmup=0, drain_limit=30)
    load = Load(concurrency=streams)

    async def main(url: str) -> LevelRun:
        target = await resolve_target(TargetArgs(), "mock", url)
        return await run_level(target, plan_requests(workload, level, load, 0), load, level, 0, 0)

    with MockProcess(settings) as mock:
        run = run_loop(main(mock.url))
        return run, mock.lateness()["late_p99"]


def reading_cost(chunks: int = 2000) -> float:
    """CPU seconds of splitting and decoding a kept chunk."""
    part = b'data: {"id":"x","object":"text_completion","choices":[{"index":0,"text":" a","finish_reason":null}]}\n\n'
    reader = AnswerReader(RequestRecord(0, 0.0))
    began = time.process_time()
    for number in range(chunks):
        reader.feed(float(number), part)
    return (time.process_time() - began) / chunks


def ttfts(run: LevelRun) -> NDArray[np.float64]:
    """Times to the first token from the intended send, of the answers that came."""
    return np.array([r.times[0] - r.intended for r in run.requests if r.outcome is Outcome.OK and r.times])


def token_gaps(run: LevelRun) -> NDArray[np.float64]:
    """Times a token: the gaps between chunks, each as often as tokens came with it."""
    gaps = [
        np.repeat(np.diff(record.times) / record.tokens[1:], record.tokens[1:])
        for record in run.requests
        if record.outcome is Outcome.OK
    ]
    return np.concatenate(gaps) if gaps else np.array([])


def is_off(exact: float, measured: NDArray[np.float64]) -> bool:
    """Whether the median is off by more than 2 % or p99 by more than 5 %."""
    middle, tail = np.percentile(measured, [50, 99])
    return bool(abs(middle / exact - 1) > MEDIAN_TOLERANCE or abs(tail / exact - 1) > TAIL_TOLERANCE)


def describe(name: str, exact: float, measured: NDArray[np.float64]) -> str:
    """`TTFT 150 ms: median 150.2, p99 150.9`."""
    middle, tail = np.percentile(measured, [50, 99]) * 1e3
    return f"{name} {exact * 1e3:g} ms came out as {middle:.2f} (p99 {tail:.2f})"


def micro(seconds: float) -> str:
    """A time in microseconds."""
    return f"{seconds * 1e6:.0f} µs" if seconds >= 1e-5 else f"{seconds * 1e6:.1f} µs"
