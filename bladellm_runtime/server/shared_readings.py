"""Metrics of several front ends: each leaves its reading in a file of a common folder, and any can add them all up."""

import logging
from collections import Counter
from pathlib import Path

import msgspec

from bladellm_runtime.server.histogram import HistogramReading
from bladellm_runtime.wire.messages import EngineStats

logger = logging.getLogger(__name__)


class MetricsReading(msgspec.Struct, array_like=True):
    """What one front end has counted, or several together, and the latest they know of the engine."""

    stats: EngineStats
    finished: dict[str, int]
    rejected: dict[str, int]
    disconnects: int
    histograms: dict[str, HistogramReading]
    running_adapters: list[str] = []
    waiting_adapters: list[str] = []
    """Names of adapters, as clients wrote them, of requests that are open now and have a token, or have none yet."""

    def __add__(self, other: "MetricsReading") -> "MetricsReading":
        """The counts of both; the engine's are in both, and are the later ones."""
        return MetricsReading(
            max(self.stats, other.stats, key=lambda stats: stats.time),
            dict(Counter(self.finished) + Counter(other.finished)),
            dict(Counter(self.rejected) + Counter(other.rejected)),
            self.disconnects + other.disconnects,
            {name: _added(counted, other.histograms[name]) for name, counted in self.histograms.items()},
            sorted({*self.running_adapters, *other.running_adapters}),
            sorted({*self.waiting_adapters, *other.waiting_adapters}),
        )


class SharedReadings:
    """One front end's file, and its view of the others'. The files outlive a front end: totals never go back.

    One that is started again goes on from what the one before it had counted.
    """

    def __init__(self, folder: Path, front_end: int, front_ends: int) -> None:
        self._paths = [folder / f"metrics-{number}" for number in range(front_ends)]
        self._own = self._paths[front_end]
        self._lost = False
        """Whether the last reading could not be left, on a full disk for example."""
        self._before = _read(self._own)
        if self._before is not None:
            # The requests of the one before have ended with it.
            self._before.running_adapters = self._before.waiting_adapters = []

    def publish(self, reading: MetricsReading) -> MetricsReading:
        """Leave this front end's reading for the others, if there is room for it; returns it with what was counted
        before its start."""
        if self._before is not None:
            reading = reading + self._before
        try:
            self._write(reading)
            self._lost = False
        except OSError as error:
            if not self._lost:
                logger.warning("other front ends do not learn what this one counts: %s: %s", self._own, error.strerror)
            self._lost = True
        return reading

    def _write(self, reading: MetricsReading) -> None:
        written = self._own.with_suffix(".new")
        written.write_bytes(msgspec.msgpack.encode(reading))
        written.replace(self._own)

    def total(self, reading: MetricsReading) -> MetricsReading:
        """`reading`, which is this front end's own and published on the way, and the others' latest."""
        total = self.publish(reading)
        for path in self._paths:
            other = _read(path) if path != self._own else None
            if other is not None:
                total = total + other
        return total


def _read(path: Path) -> MetricsReading | None:
    """A reading, or None where none has been left yet."""
    try:
        return msgspec.msgpack.decode(path.read_bytes(), type=MetricsReading)
    except FileNotFoundError:
        return None


def _added(one: HistogramReading, other: HistogramReading) -> HistogramReading:
    return HistogramReading([a + b for a, b in zip(one.counts, other.counts, strict=True)], one.sum + other.sum)
