"""One run of one level as figures: `summarise`. What each figure means is in docs/bench_metrics.md."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from bladellm_tools.bench.columns import TIMES, RequestColumns, columns, samples
from bladellm_tools.bench.records import LevelRun, Load, Outcome
from bladellm_tools.bench.slo import PERCENTILES, SloLimit, kept
from bladellm_tools.bench.stats import Samples
from bladellm_tools.bench.window import Window, mean_in_flight, peak_in_flight, piles_up, steady_window

LEAST_COMPLETIONS = {"p99": 200, "p99.9": 1000}
"""Requests with a value that a percentile needs; with fewer the figure is None."""
STATISTICS = ("mean", "std", *PERCENTILES)
RATES = (
    "intended_qps",
    "offered_qps",
    "achieved_qps",
    "requests_per_s",
    "input_tokens_per_s",
    "output_tokens_per_s",
    "total_tokens_per_s",
    "overall_requests_per_s",
    "overall_input_tokens_per_s",
    "overall_output_tokens_per_s",
    "overall_total_tokens_per_s",
    "goodput",
    "goodput_share",
)
SHARES = ("success_share", "tokens_per_chunk", "cached_share", "short_share", "in_flight_mean", "in_flight_peak")
CLIENT = (
    "schedule_lag_p50",
    "schedule_lag_p99",
    "late_share",
    "client_cpu_share",
    "loop_lag_p99",
    "chunk_cost",
    "client_headroom",
)
FIGURES = (*(f"{name}_{statistic}" for name in TIMES for statistic in STATISTICS), *RATES, *SHARES, *CLIENT)
"""Every figure of a level, in the order of levels.csv. Times are seconds."""


@dataclass(frozen=True)
class LevelSummary:
    """One repeat of one level: its figures (None where there are too few completions), and what is wrong with it.

    `requests` counts those due in the window, `completed` those of them that were answered in full; `outcomes` and
    `http` count the same requests by `Outcome` and by status code. `totals` adds prompt and completion tokens of the
    completed ones.
    """

    endpoint: str
    load: Load
    repeat: int
    window: Window
    values: dict[str, float | None]
    requests: int
    completed: int
    outcomes: dict[str, int]
    http: dict[str, int]
    prompt_tokens: int
    completion_tokens: int
    oversaturated: bool
    client_limited: bool
    aborted: str | None
    notes: tuple[str, ...]
    run: LevelRun = field(repr=False, compare=False)

    @property
    def failed(self) -> int:
        """Requests due in the window that were not answered in full."""
        return self.requests - self.completed


def summarise(run: LevelRun, slo: Sequence[SloLimit] = ()) -> LevelSummary:
    """The figures of one run; goodput only where limits are given."""
    table = columns(run.requests)
    window = steady_window(table, run.warmup, run.duration)
    due = window.holds(table.intended)
    counted = due & table.ok
    records = [record for record in run.requests if window.start <= record.intended <= window.end]
    values: dict[str, float | None] = dict.fromkeys(FIGURES)
    values |= _statistics(samples(table, counted))
    values |= _rates(table, window, due, run.load) | _overall(table) | _goodput(table, window, due, slo)
    values |= _shares(table, window, due) | _client(run)
    values["intended_qps"] = run.load.qps
    return LevelSummary(
        endpoint=run.endpoint,
        load=run.load,
        repeat=run.repeat,
        window=window,
        values=values,
        requests=len(records),
        completed=int(counted.sum()),
        outcomes=dict(sorted(Counter(record.outcome.value for record in records).items())),
        http=dict(sorted(Counter(str(record.status) for record in records if record.status is not None).items())),
        prompt_tokens=int(table.prompt[counted].sum()),
        completion_tokens=int(table.tokens[counted].sum()),
        oversaturated=run.load.qps is not None and piles_up(table, window),
        client_limited=run.client.limited,
        aborted=run.aborted,
        notes=_notes(run, table, window, counted),
        run=run,
    )


def pooled_samples(runs: Sequence[LevelSummary]) -> dict[str, Samples]:
    """The values behind each metric of `TIMES` over the windows of several runs, in their order."""
    parts = []
    for summary in runs:
        table = columns(summary.run.requests)
        parts.append(samples(table, summary.window.holds(table.intended) & table.ok))
    return {name: _pooled([part[name] for part in parts]) for name in TIMES}


def _pooled(parts: list[Samples]) -> Samples:
    if len(parts) == 1:
        return parts[0]
    firsts = np.cumsum([0, *(part.requests for part in parts)])
    rows = [part.rows + first for part, first in zip(parts, firsts[:-1], strict=True)]
    values, weights = (np.concatenate([getattr(part, name) for part in parts]) for name in ("values", "weights"))
    return Samples.of(values, weights, np.concatenate(rows), int(firsts[-1]))


def enough_for(statistic: str, completions: int) -> bool:
    """Whether that many completions carry the statistic."""
    return completions >= LEAST_COMPLETIONS.get(statistic, 1)


def _statistics(found: dict[str, Samples]) -> dict[str, float | None]:
    values: dict[str, float | None] = {}
    for name, sample in found.items():
        completions = sample.contributors()
        values[f"{name}_mean"], values[f"{name}_std"] = sample.mean(), sample.std()
        for statistic, share in PERCENTILES.items():
            enough = enough_for(statistic, completions)
            values[f"{name}_{statistic}"] = sample.percentile(share) if enough else None
    return values


def _rates(table: RequestColumns, window: Window, due: NDArray[np.bool_], load: Load) -> dict[str, float | None]:
    """What happened a second inside the window, by the time it happened. Of a closed loop that comes in bursts."""
    if not window.length:
        return {}
    weights = window.even if load.concurrency is None else window.smooth
    completed, begun = (weights(times) * table.ok for times in (table.ended, table.first))
    output = float((weights(table.chunk_time) * table.ok[table.chunk_row] * table.chunk_tokens).sum())
    prompts = float((begun * table.prompt).sum())
    amounts = {
        "offered_qps": float(due.sum()),
        "achieved_qps": float(window.holds(table.sent).sum()),
        "requests_per_s": float(completed.sum()),
        "input_tokens_per_s": prompts,
        "output_tokens_per_s": output,
        "total_tokens_per_s": prompts + output,
    }
    return {name: amount / window.length for name, amount in amounts.items()}


def _overall(table: RequestColumns) -> dict[str, float | None]:
    """The same over all that was answered, warm-up and drain too, from the first intended send to the last end."""
    if not table.ok.any():
        return {}
    span = float(np.max(table.left[table.ok]) - np.min(table.intended))
    if span <= 0:
        return {}
    prompts, output = float(table.prompt[table.ok].sum()), float(table.tokens[table.ok].sum())
    return {
        "overall_requests_per_s": float(table.ok.sum()) / span,
        "overall_input_tokens_per_s": prompts / span,
        "overall_output_tokens_per_s": output / span,
        "overall_total_tokens_per_s": (prompts + output) / span,
    }


def _goodput(
    table: RequestColumns, window: Window, due: NDArray[np.bool_], slo: Sequence[SloLimit]
) -> dict[str, float | None]:
    if not slo or not due.any():
        return {}
    good = float((kept(table, slo) & due).sum())
    return {"goodput_share": good / float(due.sum()), "goodput": good / window.length if window.length else None}


def _shares(table: RequestColumns, window: Window, due: NDArray[np.bool_]) -> dict[str, float | None]:
    done = due & table.ok
    chunks = done[table.chunk_row]
    prompts = int(table.prompt[done].sum())
    completions = int(done.sum())
    return {
        "success_share": completions / int(due.sum()) if due.any() else None,
        "tokens_per_chunk": float(table.chunk_tokens[chunks].mean()) if chunks.any() else None,
        "cached_share": float(table.cached[done].sum()) / prompts if prompts else None,
        "short_share": float((table.tokens < table.asked)[done].sum()) / completions if completions else None,
        "in_flight_mean": mean_in_flight(table, window),
        "in_flight_peak": float(peak_in_flight(table, window)),
    }


def _client(run: LevelRun) -> dict[str, float | None]:
    client = run.client
    return {
        "schedule_lag_p50": client.schedule_lag_p50,
        "schedule_lag_p99": client.schedule_lag_p99,
        "late_share": client.late_share,
        "client_cpu_share": client.cpu_share,
        "loop_lag_p99": client.loop_lag_p99,
        "chunk_cost": client.chunk_cost,
        "client_headroom": client.headroom,
    }


def _notes(run: LevelRun, table: RequestColumns, window: Window, counted: NDArray[np.bool_]) -> tuple[str, ...]:
    """What a reader of the figures must know, one clause each."""
    notes = [f"ended early: {run.aborted}"] if run.aborted else []
    if run.client.limited:
        notes.append("the client was the limit: these are not figures of the server")
    if window.note:
        notes.append(f"only the warm-up was cut: {window.note}")
    short = int((table.tokens < table.asked)[counted].sum())
    if short:
        notes.append(f"{short} of {int(counted.sum())} answers are shorter than asked")
    counters = Counter(record.counted_by for record in run.requests if record.outcome is Outcome.OK)
    for source, count in sorted(counters.items()):
        if source != "usage":
            notes.append(f"tokens of {count} answers were counted by the {source}, not by the server")
    return tuple(notes)
