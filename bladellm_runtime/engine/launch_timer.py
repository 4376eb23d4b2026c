"""When to plan the next step: late enough for requests that still arrive, early enough to keep the device busy."""

import bisect
from collections import deque

from bladellm_runtime.scheduler.plan import StepPlan
from bladellm_runtime.scheduler.step_cost import StepCost

EARLY_SECONDS = 0.0015
"""How long before the end of the step that runs the next one is planned, unless that was found to be late."""
DECAY = 0.998
"""By this factor a step the time goes back to `EARLY_SECONDS` after the device was found waiting."""
SURE_SHARE = 0.85
"""A step with prompts is expected to take no less than this share of what its cost says."""
ROW_BUCKETS = (1, 2, 4, *range(8, 4097, 8))


class LaunchTimer:
    """Predicts the end of the step that runs.

    A prompt that arrives when the step behind the one that runs is launched already waits for both of them: half as
    long again as with a launch shortly before the end. A step of decode rows takes about as long as the last one of as
    many rows, one with prompts what `cost` says; without a cost it is followed at once.
    """

    def __init__(self, cost: StepCost | None) -> None:
        self._cost = cost
        self._early = EARLY_SECONDS
        self._decode_seconds: dict[int, float] = {}
        self._late: deque[bool] = deque()

    def launched(self, late: bool) -> None:
        """A step was launched. late: the device had nothing left to do by then."""
        self._late.append(late)
        longest = max(self._decode_seconds.values(), default=0.0)
        wanted = 2 * self._early if late else DECAY * self._early
        self._early = min(max(wanted, EARLY_SECONDS), longest + EARLY_SECONDS)

    def completed(self, plan: StepPlan, seconds: float) -> None:
        """The oldest launched step took so long. One that was launched late tells nothing."""
        late = self._late.popleft()
        if not late and plan.num_decode == len(plan.slots):
            self._decode_seconds[_bucket(plan)] = seconds

    def forget_launches(self) -> None:
        """The steps launched so far will not be completed."""
        self._late.clear()

    def spare(self, plan: StepPlan) -> float:
        """Seconds after the start of `plan` at which the step behind it is to be planned; may be negative."""
        if plan.num_decode == len(plan.slots):
            return self._decode_seconds.get(_bucket(plan), 0.0) - self._early
        if self._cost is None:
            return 0.0
        return 1e-3 * SURE_SHARE * self._cost.milliseconds(plan.load) - self._early


def _bucket(plan: StepPlan) -> int:
    """The same number for steps that are padded to the same batch size."""
    return bisect.bisect_left(ROW_BUCKETS, len(plan.slots))
