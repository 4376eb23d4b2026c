"""The steady window of a run, the requests in flight over time, and whether they keep piling up."""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from bladellm_tools.bench.columns import RequestColumns
from bladellm_tools.bench.stats import Floats, trend

SLICE = 2.0
SETTLED_SLICES = 3
SETTLED_WITHIN = 0.10
MEDIAN_SLICES = 5
LEAST_SLICES = 2 * SETTLED_SLICES
MOST_SLICES = 10**6
"""Three weeks: only damaged results say that a level lasted longer."""
BATCHES = 12
LEAST_GROWTH = 0.2
LEAST_PILED_UP = 2.0
EARLY_ANSWERS = 20


@dataclass(frozen=True, slots=True)
class Window:
    """The part of a run that counts, in seconds of the level's clock, both ends in.

    `settled` says that token throughput was seen to be steady from `start` on; `note` says why not, or is empty.
    """

    start: float
    end: float
    settled: bool
    note: str = ""

    @property
    def length(self) -> float:
        """Seconds between the ends."""
        return max(self.end - self.start, 0.0)

    def holds(self, times: Floats) -> NDArray[np.bool_]:
        """Which of the times lie in the window."""
        return (times >= self.start) & (times <= self.end)

    def even(self, times: Floats) -> Floats:
        """What something at these times counts: 1 in the window, 0 outside it."""
        return self.holds(times).astype(np.float64)

    def smooth(self, times: Floats) -> Floats:
        """The same for what comes in bursts, of which a window has one more or less by where it begins: from 0 at the
        ends to 2 in the middle, 1 on average (the window of von Hann)."""
        inside = self.holds(times)
        turn = np.where(inside, times - self.start, 0.0) / max(self.length, 1e-9)
        return 1.0 - np.cos(2 * np.pi * turn)


def steady_window(table: RequestColumns, warmup: float, duration: float) -> Window:
    """The window from where token throughput settles to the last intended arrival.

    Throughput over 2 s slices has settled at the first of three in a row within 10 % of the running median of five.
    The search ends half-way. It does not begin in a run of fewer than six slices, nor where those of the second half
    scatter by more than 10 %: the window is then everything after the warm-up, and the note says so.
    """
    slices = int((duration - warmup) / SLICE)
    if slices < LEAST_SLICES:
        return Window(warmup, duration, False, f"too short to see throughput settle ({duration - warmup:.0f} s)")
    if slices > MOST_SLICES:
        return Window(warmup, duration, False, f"too long to look for a settled part ({duration - warmup:g} s)")
    edges = warmup + SLICE * np.arange(slices + 1)
    amounts = np.histogram(table.chunk_time, edges, weights=table.chunk_tokens)[0].astype(np.float64)
    second_half = amounts[slices // 2 :]
    middle = float(second_half.mean())
    scatter = float(second_half.std(ddof=1)) / middle if middle else float("inf")
    if scatter > SETTLED_WITHIN:
        return Window(warmup, duration, False, "throughput scatters too much between 2 s slices to see it settle")
    return Window(float(edges[_first_settled(amounts)]), duration, True)


def _first_settled(amounts: Floats) -> int:
    """The first slice that, with the next two, lies within 10 % of the median of five from it on; half-way at most."""
    half = len(amounts) // 2
    for first in range(half):
        middle = float(np.median(amounts[first : first + MEDIAN_SLICES]))
        if (np.abs(amounts[first : first + SETTLED_SLICES] - middle) <= SETTLED_WITHIN * middle).all():
            return first
    return half


def time_in_flight(entered: Floats, left: Floats, start: float, end: float) -> float:
    """Request-seconds between start and end of requests that entered and left at the given times (NaN: never came)."""
    spent = np.clip(left, start, end) - np.clip(entered, start, end)
    return float(np.nansum(np.maximum(spent, 0.0)))


def mean_in_flight(table: RequestColumns, window: Window) -> float | None:
    """Mean number of requests sent and not yet ended; None of an empty window."""
    if not window.length:
        return None
    return time_in_flight(table.sent, table.left, window.start, window.end) / window.length


def peak_in_flight(table: RequestColumns, window: Window) -> int:
    """Most requests sent and not yet ended at one moment of the window."""
    was_sent = ~np.isnan(table.sent) & (table.sent <= window.end) & (table.left >= window.start)
    entered, left = np.maximum(table.sent[was_sent], window.start), table.left[was_sent]
    times = np.concatenate((left, entered))
    steps = np.concatenate((np.full(len(left), -1), np.full(len(entered), 1)))
    # A request that leaves at the moment another enters leaves first.
    order = np.lexsort((steps, times))
    return int(np.cumsum(steps[order]).max(initial=0))


def in_flight_over_time(table: RequestColumns, edges: Floats) -> Floats:
    """Mean number of requests sent and not yet ended between each two neighbouring edges; for charts."""
    return mean_counts(table.sent, table.left, edges)


def mean_counts(entered: Floats, left: Floats, edges: Floats) -> Floats:
    """Mean number of requests between each two neighbouring edges that entered and left at the given times."""
    means = [time_in_flight(entered, left, a, b) / (b - a) for a, b in pairwise(edges.tolist())]
    return np.array(means, dtype=np.float64)


def piles_up(table: RequestColumns, window: Window) -> bool:
    """Whether requests due and not yet answered keep growing over the window: the server is over-saturated.

    They are counted from the intended time, so that a limit on requests in flight cannot hide the queue; those that
    would be there in any case, were each answered as fast as the early ones, do not count, for more of them come at
    times. The slope of 12 means of the others must, less its t margin, amount to at least 20 % of all requests' mean
    and to two requests over their span. The span begins two early answer times into the run, by when a server that
    keeps up has filled, or half-way if sooner.
    """
    if window.length <= 0 or not table.ok.any():
        return False
    early = float(np.median((table.ended - table.intended)[table.ok][:EARLY_ANSWERS]))
    filled = table.intended[0] + 2 * early
    start = min(max(window.start, filled), (window.start + window.end) / 2)
    edges = np.linspace(start, window.end, BATCHES + 1)
    due = mean_counts(table.intended, table.left, edges)
    line = trend((edges[:-1] + edges[1:]) / 2, due - mean_counts(table.intended, table.intended + early, edges))
    growth = line.least * (window.end - start) if line else 0.0
    return bool(growth >= max(LEAST_GROWTH * float(due.mean()), LEAST_PILED_UP))
