"""How a quantization goes on: a bar with the time left on a terminal, a line a layer in a pipe, on standard error."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from bladellm_tools.console import gib, is_terminal, table
from bladellm_tools.quantize.job import Progress

STAGES = {
    "read": "reading",
    "calibrate": "calibrating",
    "round": "rounding",
    "write": "writing",
    "replay": "replaying",
}


@contextmanager
def watching() -> Iterator[Progress]:
    """The progress for where standard error leads; what is drawn is gone afterwards."""
    if not is_terminal(sys.stderr):
        yield PlainProgress()
        return
    with BarProgress() as progress:
        yield progress


def duration(seconds: float) -> str:
    """`4.2 s`, `3 min 10 s` or `2 h 5 min`."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60} h {minutes % 60} min"


class PlainProgress(Progress):
    """A line for the plan and one for every finished layer."""

    def __init__(self) -> None:
        self._layers = 0
        self._began = time.monotonic()
        self._first = -1

    def plan(self, layers: int, peak_bytes: dict[str, int]) -> None:
        self._layers, self._began = layers, time.monotonic()
        say_peak(peak_bytes)

    def layer(self, index: int, stage: str) -> None:
        if self._first < 0:
            self._first = index

    def done(self, index: int) -> None:
        finished = index + 1 - max(self._first, 0)
        passed = time.monotonic() - self._began
        left = passed / finished * (self._layers - index - 1)
        after = f", about {duration(left)} left" if left else ""
        print(f"layer {index + 1} of {self._layers} done after {duration(passed)}{after}", file=sys.stderr, flush=True)


def say_peak(peak_bytes: dict[str, int]) -> None:
    """The most memory of each kind that is going to be used."""
    names = {kind: f"{kind} at most" if kind == "disk" else f"{kind} memory at most" for kind in peak_bytes}
    rows = [(names[kind], gib(size)) for kind, size in peak_bytes.items()]
    print("\n".join(table(rows)), file=sys.stderr, flush=True)


class BarProgress(Progress):
    """A bar over the layers, the stage of the present one, and the time left."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
        from rich.progress import Progress as Bar

        self._bar = Bar(
            TextColumn("layer"), MofNCompleteColumn(), BarColumn(), TextColumn("{task.description:<11}"),
            TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn(),
            console=Console(stderr=True, highlight=False), transient=True,
        )  # fmt: skip
        self._task: Any = None

    def __enter__(self) -> "BarProgress":
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.stop()

    def plan(self, layers: int, peak_bytes: dict[str, int]) -> None:
        say_peak(peak_bytes)
        self._bar.start()
        self._task = self._bar.add_task("", total=layers)

    def layer(self, index: int, stage: str) -> None:
        if self._task is not None:
            self._bar.update(self._task, completed=index, description=STAGES.get(stage, stage))

    def done(self, index: int) -> None:
        if self._task is not None:
            self._bar.update(self._task, completed=index + 1)
