"""What a benchmark shows while it runs: a picture on a terminal, a line a level in a pipe, nothing with --quiet.

The picture is drawn by a process of its own (`live_screen`): drawing in this one would make time stamps late.
"""

import contextlib
import json
import subprocess
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from bladellm_tools.bench.client import LiveEvent
from bladellm_tools.bench.metrics import LevelSummary
from bladellm_tools.bench.records import Load, Outcome
from bladellm_tools.console import is_terminal

REFRESH_SECONDS = 0.5
ROLLING = 200
"""Finished requests that rolling percentiles look back on."""


class View(Protocol):
    """Who is told how a benchmark goes on."""

    def say(self, text: str) -> None:
        """Something worth a line."""

    def level_begins(self, endpoint: str, load: Load, run: str, planned: int) -> None:
        """A repeat of a level starts; `run` says which, `planned` how many requests it has."""

    def on_event(self, event: LiveEvent) -> None:
        """A request left, had its first token, or ended."""

    def level_ends(self, summary: LevelSummary, run: str) -> None:
        """The repeat is over."""

    def close(self) -> None:
        """The benchmark is over."""


def make_view(quiet: bool) -> View:
    """The view for where standard error leads."""
    if quiet:
        return QuietView()
    return TerminalView() if is_terminal(sys.stderr) else PlainView()


class QuietView:
    """Shows nothing."""

    def say(self, text: str) -> None:
        """Nothing."""

    def level_begins(self, endpoint: str, load: Load, run: str, planned: int) -> None:
        """Nothing."""

    def on_event(self, event: LiveEvent) -> None:
        """Nothing."""

    def level_ends(self, summary: LevelSummary, run: str) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""


class PlainView(QuietView):
    """One line a level on standard error; standard output is for the result."""

    def say(self, text: str) -> None:
        """The text as a line."""
        print(text, file=sys.stderr, flush=True)

    def level_ends(self, summary: LevelSummary, run: str) -> None:
        """The level's line."""
        self.say(level_line(summary, run))


def level_line(summary: LevelSummary, run: str) -> str:
    """`ours    4 QPS  run 1/3  TTFT p50 41 ms p99 66 ms  TBT p50 ...`."""
    parts = [f"{summary.endpoint:<10} {summary.load.label:>11}  {run}"]
    for metric in ("ttft", "tbt"):
        median, tail = (milliseconds(summary.values[f"{metric}_{name}"]) for name in ("p50", "p99"))
        parts.append(f"{metric.upper()} p50 {median:>8} p99 {tail:>8}")
    rate = summary.values["output_tokens_per_s"]
    parts.append(f"{rate:,.0f} tokens/s" if rate is not None else "- tokens/s")
    parts.append(f"{summary.completed} of {summary.requests} ok")
    if summary.oversaturated:
        parts.append("over-saturated")
    return "  ".join([*parts, *(note for note in (summary.aborted, client_note(summary)) if note)])


def client_note(summary: LevelSummary) -> str:
    """What to know about the client: that it was the limit, or nothing."""
    return "CLIENT-LIMITED: not the server's figures" if summary.client_limited else ""


def milliseconds(seconds: float | None) -> str:
    """A time in a table, - where there is none."""
    return "-" if seconds is None else f"{seconds * 1e3:,.4g} ms"


@dataclass
class Counts:
    """What has happened in a level so far. Updated on the event loop, so it only counts."""

    endpoint: str
    level: str
    run: str
    planned: int
    began: float = field(default_factory=time.monotonic)
    sent: int = 0
    ended: int = 0
    failed: int = 0
    ttft: deque[float] = field(default_factory=lambda: deque(maxlen=ROLLING))
    tbt: deque[float] = field(default_factory=lambda: deque(maxlen=ROLLING))

    def count(self, event: LiveEvent) -> None:
        """Take one event in."""
        record = event.record
        if event.kind == "sent":
            self.sent += 1
        elif event.kind == "first_token":
            self.ttft.append(record.times[0] - record.intended)
        else:
            self.ended += 1
            if record.outcome is not Outcome.OK:
                self.failed += 1
            elif record.times and record.ended is not None and record.asked_tokens > 1:
                self.tbt.append((record.ended - record.times[0]) / (record.asked_tokens - 1))

    def snapshot(self) -> dict[str, Any]:
        """The figures to draw."""
        return {
            "endpoint": self.endpoint,
            "level": self.level,
            "run": self.run,
            "planned": self.planned,
            "seconds": time.monotonic() - self.began,
            "sent": self.sent,
            "ended": self.ended,
            "failed": self.failed,
            "ttft": percentiles(self.ttft),
            "tbt": percentiles(self.tbt),
        }


def percentiles(values: Sequence[float]) -> list[float]:
    """p50 and p99, or nothing."""
    ordered = sorted(values)
    return [ordered[int(share * (len(ordered) - 1))] for share in (0.5, 0.99)] if ordered else []


class TerminalView:
    """Sends figures to the process that draws them, twice a second at most and only when something happens."""

    def __init__(self) -> None:
        # A session of its own keeps Ctrl-C from ending the picture before the benchmark.
        self._screen = subprocess.Popen(
            [sys.executable, "-m", "bladellm_tools.bench.live_screen"], stdin=subprocess.PIPE, start_new_session=True
        )
        self._counts: Counts | None = None
        self._due = 0.0
        self._cpu = (time.monotonic(), time.process_time())

    def say(self, text: str) -> None:
        """A line above the picture."""
        self._send({"line": text})

    def level_begins(self, endpoint: str, load: Load, run: str, planned: int) -> None:
        """Start counting anew."""
        self._counts = Counts(endpoint, load.label, run, planned)
        self._send(self._counts.snapshot())

    def on_event(self, event: LiveEvent) -> None:
        """Count, and draw when it is time."""
        if self._counts is None:
            return
        self._counts.count(event)
        now = time.monotonic()
        if now >= self._due:
            self._due = now + REFRESH_SECONDS
            self._send(self._counts.snapshot() | {"client": self._client_share(now)})

    def _client_share(self, now: float) -> float:
        """Share of one processor this process used since it was last asked."""
        used, (since, before) = time.process_time(), self._cpu
        self._cpu = (now, used)
        return (used - before) / max(now - since, 1e-6)

    def level_ends(self, summary: LevelSummary, run: str) -> None:
        """The level's line above the picture."""
        self.say(level_line(summary, run))

    def close(self) -> None:
        """Remove the picture; the lines stay."""
        if self._screen.stdin is not None and not self._screen.stdin.closed:
            with contextlib.suppress(BrokenPipeError):
                self._screen.stdin.close()
        self._screen.wait()

    def _send(self, message: dict[str, Any]) -> None:
        stdin = self._screen.stdin
        if stdin is None or stdin.closed:
            return
        try:
            stdin.write(json.dumps(message).encode() + b"\n")
            stdin.flush()
        except BrokenPipeError:
            # A picture that died must not end the measurement.
            return
