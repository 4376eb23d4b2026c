"""When the next step is planned: shortly before the one in front ends, or once an announced request has come."""

from typing import Protocol

from bladellm_runtime.engine.arrival_hold import ArrivalHold
from bladellm_runtime.engine.launch_timer import LaunchTimer
from bladellm_runtime.scheduler.plan import StepPlan

OVERDUE_SECONDS = 0.0003
"""How long after it was due a step may be planned for its launch to tell whether that was early enough."""


class Demand(Protocol):
    """What the pacer asks the scheduler."""

    @property
    def has_prompts(self) -> bool: ...

    @property
    def has_work(self) -> bool: ...


class StepPacer:
    """Follows steps from their plans to their ends by the host's clock, in seconds, and tells the timer what they took.

    `front` is the step in flight when the next one is planned, None where the device has nothing to do. A step is
    planned (`plans`), the device gets the first of it (`queued`), it is `launched`, and the one in front `completed`.
    """

    def __init__(self, timer: LaunchTimer, hold: ArrivalHold | None, demand: Demand) -> None:
        """hold: has steps wait for requests that are announced, None for none."""
        self._timer = timer
        self._hold = hold
        self._demand = demand
        self._began = 0.0
        """When the step in front began, as far as the host knows."""
        self._planned, self._in_time = 0.0, False
        """When the step behind it was planned, and whether that was when it was due: not later, as for a prompt that
        came after that."""
        self._queued: tuple[float, bool] | None = None
        """When the device got the first of that, and whether the step in front had ended."""

    def announce(self, now: float) -> None:
        """A request is to come soon."""
        if self._hold is not None:
            self._hold.announce(now)

    def arrive(self) -> None:
        """One came."""
        if self._hold is not None:
            self._hold.arrive()

    def spare(self, now: float, front: StepPlan | None) -> float:
        """Seconds for which the next step can still be left."""
        return self._held(now, front) if front is None else max(self._due(front) - now, 0.0)

    def plans(self, now: float, front: StepPlan | None) -> bool:
        """Whether the next step is planned now; else it waits for a request that was announced."""
        self._planned, self._queued = now, None
        self._in_time = front is not None and now - self._due(front) < OVERDUE_SECONDS
        return self._held(now, front) == 0

    @property
    def launching(self) -> bool:
        """Whether the device has nothing yet of the step planned last."""
        return self._queued is None

    def queued(self, now: float, ended: bool) -> None:
        """The device has something of the step to begin with. ended: the step in front has."""
        self._queued = now, ended

    def launched(self, plan: StepPlan, front: StepPlan | None) -> None:
        """All of the step is launched."""
        assert self._queued is not None
        at, late = self._queued
        self._timer.launched(plan, at - self._planned)
        if front is None:
            self._began = at
        elif self._in_time:
            self._timer.followed(front, late)

    def completed(self, plan: StepPlan, now: float, seen: bool) -> None:
        """The step in front ended, just now or, where nobody has seen it, by now; the one behind it began."""
        ended = begun = now
        if not seen and self._queued is not None:
            # When it was expected to, but before the launch of the step behind it where that was late, and else after.
            at, late = self._queued
            ended = min(max(self._began + self._timer.expected(plan), 0.0 if late else at), at if late else now)
            begun = at if late else ended
        self._timer.completed(plan, ended - self._began)
        self._began = begun

    def _due(self, front: StepPlan) -> float:
        return self._began + self._timer.spare(front, self._demand.has_prompts)

    def _held(self, now: float, front: StepPlan | None) -> float:
        """How long a step that is due waits for a request, if it is one of decodes alone."""
        if self._hold is None:
            return 0.0
        if self._demand.has_prompts or not self._demand.has_work:
            self._hold.end(now)
            return 0.0
        return self._hold.left(now, device_idle=front is None)
