"""Whether the client kept up with its own schedule: processor share, event-loop lag, lateness."""

import time

import numpy as np
from numpy.typing import NDArray

from bladellm_tools.bench.pacing import DeadlineTimer, clock
from bladellm_tools.bench.records import ClientHealth, Load, RequestRecord

PROBE_SECONDS = 0.02
LATE_SECONDS = 0.001
LATE_GAP_SHARE = 0.01
LIMIT_LATE_SHARE = 0.01
LIMIT_CPU_SHARE = 0.9
LEAST_SENDING_SECONDS = 1.0


class HealthProbe:
    """Watches the process while a level runs: how late a timer comes that should come every 20 ms, and the CPU used."""

    def __init__(self) -> None:
        self._lags: list[float] = []
        self._marks: list[tuple[float, float]] = []
        self._began = clock()
        self._cpu_began = time.process_time()
        self._due = self._began + PROBE_SECONDS
        self._timer = DeadlineTimer(self._tick)
        self._timer.arm(self._due)

    def _tick(self) -> None:
        now = clock()
        self._lags.append(now - self._due)
        self._marks.append((now - self._began, time.process_time() - self._cpu_began))
        self._due = max(self._due + PROBE_SECONDS, now)
        self._timer.arm(self._due)

    def stop(self) -> None:
        """The level is over; what is done from here on does not count."""
        self._timer.close()
        self._wall = clock() - self._began
        self._cpu = time.process_time() - self._cpu_began

    def health(self, records: list[RequestRecord], load: Load, zero: float) -> ClientHealth:
        """The verdict. `records` are read already: their times, from the `clock()` time `zero` on, count as chunks."""
        lateness = np.array([record.sent - record.intended for record in records if record.sent is not None])
        chunks = sum(len(record.times) for record in records)
        last_sent = max((record.sent for record in records if record.sent is not None), default=0.0)
        cpu_share = busiest_share([*self._marks, (self._wall, self._cpu)], zero - self._began + last_sent)
        late_share = float(np.mean(lateness > tolerance(records, load))) if lateness.size else 0.0
        return ClientHealth(
            cpu_share=cpu_share,
            loop_lag_p99=percentile(np.array(self._lags), 99),
            schedule_lag_p50=percentile(lateness, 50),
            schedule_lag_p99=percentile(lateness, 99),
            late_share=late_share,
            chunk_cost=self._cpu / chunks if chunks else 0.0,
            headroom=LIMIT_CPU_SHARE / cpu_share if cpu_share else 0.0,
            limited=late_share > LIMIT_LATE_SHARE or cpu_share > LIMIT_CPU_SHARE,
        )


def busiest_share(marks: list[tuple[float, float]], last_sent: float) -> float:
    """Share of a core, of (seconds, processor seconds) rising to the end: of all, or to the last send if more.

    Waiting for the last answers is idle time, in which a client that was at its limit before would seem to have room.
    """
    shares = [used / seconds for seconds, used in marks[-1:] if seconds > 0]
    sending = [(seconds, used) for seconds, used in marks if LEAST_SENDING_SECONDS <= seconds <= last_sent]
    shares += [used / seconds for seconds, used in sending[-1:]]
    return max(shares, default=0.0)


def tolerance(records: list[RequestRecord], load: Load) -> float:
    """How late a request may leave: 1 ms, or 1 % of the mean gap between requests if that is more."""
    if load.qps is not None:
        return max(LATE_SECONDS, LATE_GAP_SHARE / load.qps)
    intended = [record.intended for record in records]
    span = max(intended, default=0.0) - min(intended, default=0.0)
    return max(LATE_SECONDS, LATE_GAP_SHARE * span / max(len(intended), 1))


def percentile(values: NDArray[np.float64], share: float) -> float:
    """A percentile, 0 where there is nothing."""
    return float(np.percentile(values, share)) if values.size else 0.0
