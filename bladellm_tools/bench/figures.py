"""A level over its repeats: `combine` gives every figure with its interval."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from bladellm_tools.bench.columns import TIMES
from bladellm_tools.bench.metrics import FIGURES, STATISTICS, LevelSummary, enough_for, pooled_samples, summarise
from bladellm_tools.bench.records import Benchmark, Load
from bladellm_tools.bench.slo import PERCENTILES, SloLimit
from bladellm_tools.bench.stats import NOISY_CV, Interval, Samples, coefficient_of_variation, t_interval


@dataclass(frozen=True, slots=True)
class Figure:
    """A value (None: too few completions), its 95 % interval where there is one, and the runs' variation."""

    value: float | None = None
    interval: Interval | None = None
    cv: float | None = None

    @property
    def noisy(self) -> bool:
        """Whether the runs vary by more than 10 %."""
        return self.cv is not None and self.cv > NOISY_CV


@dataclass(frozen=True)
class LevelFigures:
    """One level of one endpoint over its usable runs, in seconds and per second.

    Runs that the client limited are left out; if it limited all, they are all there and `client_limited` is true.
    `oversaturated`: most of the usable runs were. `values` has every name of `metrics.FIGURES`.
    """

    endpoint: str
    load: Load
    values: dict[str, Figure]
    requests: int
    completed: int
    outcomes: dict[str, int]
    http: dict[str, int]
    oversaturated: bool
    client_limited: bool
    notes: tuple[str, ...]
    runs: tuple[LevelSummary, ...] = field(repr=False)

    def value(self, name: str) -> float | None:
        """The value of a figure."""
        return self.values[name].value

    @property
    def failed(self) -> int:
        """Requests due in the windows that were not answered in full."""
        return self.requests - self.completed

    @property
    def rate(self) -> float:
        """Where the level lies on a QPS axis: what was intended, or what a closed loop achieved."""
        return self.load.qps if self.load.qps is not None else self.value("requests_per_s") or 0.0

    @property
    def marks(self) -> str:
        """What disqualifies the level, in words; empty if nothing."""
        marks = {"client-limited": self.client_limited, "over-saturated": self.oversaturated}
        return ", ".join(mark for mark, is_so in marks.items() if is_so)


def level_figures(benchmark: Benchmark, slo: Sequence[SloLimit] = ()) -> list[LevelFigures]:
    """Every level of every endpoint, endpoints in the order given and levels from the lightest."""
    found = []
    for endpoint in benchmark.endpoints:
        for load in benchmark.loads:
            runs = [run for run in benchmark.runs if run.endpoint == endpoint and run.load == load]
            if runs:
                found.append(combine([summarise(run, slo) for run in runs]))
    return found


def combine(summaries: Sequence[LevelSummary]) -> LevelFigures:
    """The repeats of one level as one: means over runs with t intervals, or one run with bootstrap intervals."""
    usable = [summary for summary in summaries if not summary.client_limited] or list(summaries)
    return LevelFigures(
        endpoint=usable[0].endpoint,
        load=usable[0].load,
        values=_values(usable),
        requests=sum(summary.requests for summary in usable),
        completed=sum(summary.completed for summary in usable),
        outcomes=_added(summary.outcomes for summary in usable),
        http=_added(summary.http for summary in usable),
        oversaturated=2 * sum(summary.oversaturated for summary in usable) > len(usable),
        client_limited=usable[0].client_limited,
        notes=_notes(summaries, usable),
        runs=tuple(usable),
    )


def _added(counts: Iterable[dict[str, int]]) -> dict[str, int]:
    total: Counter[str] = Counter()
    for count in counts:
        total.update(count)
    return dict(sorted(total.items()))


def _values(runs: list[LevelSummary]) -> dict[str, Figure]:
    """Every figure over the runs; from the requests themselves where the runs alone do not give one."""
    values = {name: _over_runs([run.values[name] for run in runs]) for name in FIGURES}
    wanting = [name for name in TIMES if any(_wanting(values[f"{name}_{statistic}"]) for statistic in STATISTICS)]
    pooled = pooled_samples(runs) if wanting else {}
    for name in wanting:
        for statistic in STATISTICS:
            if _wanting(values[f"{name}_{statistic}"]):
                values[f"{name}_{statistic}"] = _over_requests(pooled[name], statistic)
    return values


def _wanting(figure: Figure) -> bool:
    return figure.value is None or figure.interval is None


def _over_runs(values: Sequence[float | None]) -> Figure:
    """Mean of the runs; nothing if a run has no value, because the runs without one are not like the others."""
    found = [value for value in values if value is not None]
    if not found or len(found) < len(values):
        return Figure()
    return Figure(float(np.mean(found)), t_interval(found), coefficient_of_variation(found))


def _over_requests(sample: Samples, statistic: str) -> Figure:
    """One statistic of the pooled requests, with a bootstrap interval."""
    if not enough_for(statistic, sample.contributors()):
        return Figure()
    if statistic in PERCENTILES:
        share = PERCENTILES[statistic]
        return Figure(sample.percentile(share), sample.percentile_interval(share))
    if statistic == "mean":
        return Figure(sample.mean(), sample.mean_interval())
    return Figure(sample.std())


def _notes(summaries: Sequence[LevelSummary], usable: list[LevelSummary]) -> tuple[str, ...]:
    """The runs' notes, each once with the number of runs it is true of."""
    notes = Counter(note for summary in usable for note in summary.notes)
    found = [
        note if count == len(usable) else f"{note} (run {_runs_with(note, usable)})" for note, count in notes.items()
    ]
    if len(usable) < len(summaries):
        left_out = len(summaries) - len(usable)
        found.append(f"{left_out} of {len(summaries)} runs left out: the client was the limit")
    return tuple(found)


def _runs_with(note: str, runs: list[LevelSummary]) -> str:
    return ", ".join(str(run.repeat + 1) for run in runs if note in run.notes)
