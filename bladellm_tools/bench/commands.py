"""The commands of `blade_llm bench` that measure and report. Each takes its argument sections and returns an exit code.

Exit codes: 0 measured, 1 not one request succeeded, 130 interrupted; whatever was measured is reported first.
"""

import asyncio
import signal
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path

from bladellm_runtime.errors import ConfigError, UserError
from bladellm_tools.bench.args import (
    CompareArgs,
    LevelArgs,
    OutputArgs,
    PlotArgs,
    RunLevelArgs,
    SloArgs,
    SweepArgs,
    TargetArgs,
    WorkloadArgs,
)
from bladellm_tools.bench.campaign import Campaign, InterruptedCampaignError, Servers
from bladellm_tools.bench.effects import check_effects
from bladellm_tools.bench.endpoints import Endpoint, parse_endpoints
from bladellm_tools.bench.environment import environment, flags_in_effect, shown_url
from bladellm_tools.bench.eventloop import run_loop
from bladellm_tools.bench.live import View, make_view
from bladellm_tools.bench.loads import is_auto, loads_of
from bladellm_tools.bench.merging import merged
from bladellm_tools.bench.records import Benchmark, Load, Outcome
from bladellm_tools.bench.reporting import REPORT, make_report
from bladellm_tools.bench.search import find_capacity, find_loads
from bladellm_tools.bench.slo import SloLimit, parse_slo
from bladellm_tools.bench.stopping import StopRule, parse_rules
from bladellm_tools.bench.storage import load as load_results
from bladellm_tools.bench.storage import save_newest
from bladellm_tools.bench.target import parse_extra_body, parse_headers
from bladellm_tools.bench.turns import Order, make_turns
from bladellm_tools.bench.workload import own_qps, plan_requests
from bladellm_tools.console import fail

INTERRUPTED = 130
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True)
class Job:
    """What to measure, checked. `loads` is None where a probe finds them."""

    endpoints: list[Endpoint]
    target: TargetArgs
    workload: WorkloadArgs
    level: LevelArgs
    output: OutputArgs
    slo: list[SloLimit]
    loads: list[Load] | None
    flags: dict[str, object]
    rules: Sequence[StopRule] = ()
    find_capacity: bool = False
    order: Order = "abab"

    @property
    def title(self) -> str:
        """The report's title."""
        return self.output.title or " and ".join(endpoint.name for endpoint in self.endpoints)


def run(target: TargetArgs, workload: WorkloadArgs, level: RunLevelArgs, slo: SloArgs, output: OutputArgs) -> int:
    """One level of one server."""
    flags = flags_in_effect([target, workload, level, slo, output])
    endpoints, loads = one_endpoint(target, "run"), chosen_loads(workload, level)
    if loads is None or len(loads) != 1:
        raise ConfigError("run measures one level; give one --qps (or --concurrency), or use sweep")
    return carry_out(Job(endpoints, target, workload, level, output, parse_slo(slo.slo), loads, flags))


def sweep(
    target: TargetArgs, workload: WorkloadArgs, level: LevelArgs, sweep: SweepArgs, slo: SloArgs, output: OutputArgs
) -> int:
    """The curves of one server."""
    flags = flags_in_effect([target, workload, level, sweep, slo, output])
    limits = parse_slo(slo.slo)
    check_search(level, sweep, limits)
    job = Job(
        one_endpoint(target, "sweep"), target, workload, level, output, limits, chosen_loads(workload, level), flags,
        parse_rules(sweep.stop_when), sweep.find_capacity,
    )  # fmt: skip
    return carry_out(job)


def compare(
    target: TargetArgs,
    workload: WorkloadArgs,
    level: LevelArgs,
    sweep: SweepArgs,
    turns: CompareArgs,
    slo: SloArgs,
    output: OutputArgs,
) -> int:
    """The curves of two or more servers, measured in turn with the same requests."""
    flags = flags_in_effect([target, workload, level, sweep, turns, slo, output])
    endpoints, limits = parse_endpoints(target.endpoint), parse_slo(slo.slo)
    if len(endpoints) < 2:
        raise ConfigError("compare needs two or more --endpoint NAME=URL; for one server use sweep")
    check_search(level, sweep, limits)
    job = Job(
        endpoints, target, workload, level, output, limits, chosen_loads(workload, level), flags,
        parse_rules(sweep.stop_when), sweep.find_capacity, turns.order,
    )  # fmt: skip
    return carry_out(job)


def plot(results: PlotArgs, slo: SloArgs, output: OutputArgs) -> int:
    """The report again, from stored results; several folders are shown as one."""
    if not results.results:
        raise ConfigError("--results is missing; give one or more folders that blade_llm bench wrote")
    folders = [Path(text) for text in results.results]
    benchmark = merged([(folder, load_results(folder)) for folder in folders])
    if not benchmark.runs:
        raise UserError(f"{folders[0]} holds no runs; nothing was measured there")
    if output.title is not None:
        benchmark.title = output.title
    folder = folders[0] if output.out is None and len(folders) == 1 else results_folder(output)
    if (folder / "benchmark.json").exists() and [folder.resolve()] != [one.resolve() for one in folders]:
        raise UserError(f"--out {folder} holds other results; choose another folder")
    text = make_report(benchmark, parse_slo(slo.slo), folder, store=False, vllm_names=output.compat == "vllm")
    print(text)
    return 0


def one_endpoint(target: TargetArgs, command: str) -> list[Endpoint]:
    """The endpoint of a command that measures one."""
    endpoints = parse_endpoints(target.endpoint)
    if not endpoints:
        raise ConfigError("--endpoint is missing; give NAME=URL, such as ours=http://127.0.0.1:8081")
    if len(endpoints) > 1:
        raise ConfigError(f"{command} measures one --endpoint, got {len(endpoints)}; use compare")
    return endpoints


def chosen_loads(workload: WorkloadArgs, level: LevelArgs) -> list[Load] | None:
    """The levels; None where a probe finds them. With a recorded trace, auto is the trace's own rate."""
    check_effects(workload, level)
    if not is_auto(level):
        return loads_of(level)
    return [Load(qps=own_qps(workload))] if level.arrival == "trace" else None


def check_search(level: LevelArgs, sweep: SweepArgs, limits: list[SloLimit]) -> None:
    """Refuse a search for capacity where nothing could be searched."""
    if sweep.find_capacity and level.arrival == "closed":
        raise ConfigError("--find_capacity searches a rate, which --arrival closed has not; use poisson")
    if sweep.find_capacity and not limits:
        raise ConfigError("--find_capacity needs a limit to keep; give --slo, such as ttft_p99=500ms")


def results_folder(output: OutputArgs) -> Path:
    """The folder of the results, made. Raises `UserError` where one of an earlier benchmark would be overwritten."""
    folder = Path(output.out or f"bench-{datetime.now():%Y%m%d-%H%M%S}")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--out {folder} cannot be made: {error.strerror}") from error
    return folder


def check_job(job: Job) -> None:
    """Raise `ConfigError` for what cannot be sent or planned, before a server is started for it."""
    parse_headers(job.target)
    parse_extra_body(job.target.extra_body)
    if not any(endpoint.command for endpoint in job.endpoints):
        if job.target.start_timeout != TargetArgs().start_timeout:
            raise ConfigError("--start_timeout has no effect here: it needs an --endpoint NAME=cmd:COMMAND LINE")
    else:
        first = job.loads[0] if job.loads else Load(qps=1.0)
        plan_requests(job.workload, job.level, first, 0, job.target.tokenizer)


@contextmanager
def kept_if_used(folder: Path, is_new: bool) -> Iterator[None]:
    """A folder that was made for results and got none is removed again."""
    try:
        yield
    finally:
        if is_new:
            with suppress(OSError):  # it holds something, or is gone
                folder.rmdir()


def carry_out(job: Job) -> int:
    """Measure, report, and say how it ended."""
    check_job(job)
    is_new = job.output.out is None or not Path(job.output.out).exists()
    folder = results_folder(job.output)
    if (folder / "benchmark.json").exists():
        raise UserError(f"--out {folder} holds results already; choose another folder")
    with kept_if_used(folder, is_new):
        benchmark, interrupted = measured(job, folder)
    if not benchmark.runs:
        raise KeyboardInterrupt
    text = make_report(benchmark, job.slo, folder, store=True, vllm_names=job.output.compat == "vllm")
    print(text, flush=True)
    if interrupted:
        fail(f"interrupted; what was measured is in {folder / REPORT}")
        return INTERRUPTED
    if not any(record.outcome is Outcome.OK for run in benchmark.runs for record in run.requests):
        raise UserError(f"not one request succeeded: {commonest_error(benchmark)}; the report is {folder / REPORT}")
    return 0


def measured(job: Job, folder: Path) -> tuple[Benchmark, bool]:
    """Everything a job asks for, shown while it comes."""
    view = make_view(job.output.quiet)
    try:
        return run_loop(measure(job, folder, view))
    finally:
        view.close()


def commonest_error(benchmark: Benchmark) -> str:
    """What most requests failed of."""
    errors = Counter(record.error or record.outcome.value for run in benchmark.runs for record in run.requests)
    return errors.most_common(1)[0][0] if errors else "none was sent"


async def measure(job: Job, folder: Path, view: View) -> tuple[Benchmark, bool]:
    """Everything a job asks for, or what an interruption left of it. Raises `UserError` when nothing was measured."""
    stop = asyncio.Event()
    servers = Servers(job.target, job.workload.ignore_eos, folder)
    campaign = Campaign(job.workload, job.level, job.slo, job.rules, servers, view, stop)
    found = environment() | {f"server of {e.name}": shown_url(e.url) for e in job.endpoints}
    benchmark = Benchmark(job.title, job.flags, found, campaign.runs, campaign.notes)
    campaign.keep = partial(save_newest, benchmark, folder)
    interrupted = False
    with_signals(stop)
    try:
        await measure_levels(job, campaign)
    except InterruptedCampaignError:
        interrupted = True
        if campaign.runs:
            campaign.note("Interrupted: the levels that follow were not measured.")
    except asyncio.CancelledError as error:
        raise KeyboardInterrupt from error
    finally:
        await servers.close()
    return benchmark, interrupted


async def measure_levels(job: Job, campaign: Campaign) -> None:
    """The levels asked for or found, then the search for capacity."""
    loads = job.loads if job.loads is not None else await find_loads(campaign, job.endpoints)
    await campaign.take(make_turns(job.endpoints, loads, job.level.repeats, job.order, job.workload.seed))
    if job.find_capacity:
        for endpoint in job.endpoints:
            await find_capacity(campaign, endpoint)


def with_signals(stop: asyncio.Event) -> None:
    """The first signal asks to stop, with a report of what there is; the second ends at once, servers included."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()

    def on_signal() -> None:
        if stop.is_set() and task is not None:
            task.cancel()
        stop.set()

    for number in SIGNALS:
        loop.add_signal_handler(number, on_signal)
