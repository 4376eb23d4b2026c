"""When to plan the next step: late enough for requests that still arrive, early enough to keep the device busy."""

import bisect

from bladellm_runtime.scheduler.plan import StepPlan
from bladellm_runtime.scheduler.step_cost import StepCost

HOST_SECONDS = {False: 0.0005, True: 0.002}
"""What planning a step and launching the first of it takes the host, without and with prompts, before the first one
was seen."""
FALL = 0.2
"""By this share of the difference that time falls to a shorter one; it rises at once."""
MARGIN_SECONDS = 0.0003
"""How long before the end of the step that runs the next one is launched, unless that was found to be late."""
GROWTH, DECAY = 1.5, 0.98
"""The margin is multiplied by these when a launch was late, and when it was not."""
SURE_SHARE = 0.85
"""A step with prompts of a size not seen yet is expected to take no less than this share of what its cost says."""
SIZES = (1, 2, 4, *range(8, 4097, 8))
"""Token counts: steps between two of them are padded to the same one, or take about as long."""


class LaunchTimer:
    """Predicts the end of the step that runs, and how long the host needs for the next one.

    A prompt that arrives when the step behind the one that runs is launched already waits for both of them: half as
    long again as with a launch shortly before the end. A step takes about as long as the last one of as many decode
    rows, or as many tokens; one with prompts that has no such step before it what `cost` says. Without a cost it is
    followed at once. What steps with prompts take scatters, what others take does not: each kind has its own margin.
    """

    def __init__(self, cost: StepCost | None) -> None:
        self._cost = cost
        self._margins = dict.fromkeys((False, True), MARGIN_SECONDS)
        self._host = dict(HOST_SECONDS)
        self._seconds: dict[tuple[bool, bool, int], float] = {}

    def launched(self, plan: StepPlan, seconds: float) -> None:
        """A step was planned, and launched so far that the device has something to begin with, which took the host
        `seconds`."""
        prompts = plan.has_prompts
        self._host[prompts] = max(seconds, self._host[prompts] + FALL * (seconds - self._host[prompts]))

    def followed(self, plan: StepPlan, late: bool) -> None:
        """The step behind `plan` was planned when `spare` said so, and launched before `plan` ended, or too late."""
        longest = max(self._seconds.values(), default=0.0)
        wanted = self._margins[plan.has_prompts] * (GROWTH if late else DECAY)
        self._margins[plan.has_prompts] = min(max(wanted, MARGIN_SECONDS), longest + MARGIN_SECONDS)

    def completed(self, plan: StepPlan, seconds: float) -> None:
        """A step took so long."""
        self._seconds[_kind(plan)] = seconds

    def spare(self, plan: StepPlan, prompts: bool) -> float:
        """Seconds after the start of `plan` at which the step behind it is to be planned, one with prompts or not; may
        be negative."""
        return self.expected(plan) - self._host[prompts] - self._margins[plan.has_prompts]

    def expected(self, plan: StepPlan) -> float:
        """Seconds that a step takes, 0 where nothing is known of it."""
        seconds = self._seconds.get(_kind(plan))
        if seconds is None and plan.has_prompts and self._cost is not None:
            return 1e-3 * SURE_SHARE * self._cost.milliseconds(plan.load)
        return seconds or 0.0


def _kind(plan: StepPlan) -> tuple[bool, bool, int]:
    """The same for steps that take about as long."""
    return plan.has_prompts, bool(plan.prefixes), bisect.bisect_left(SIZES, plan.tokens)
