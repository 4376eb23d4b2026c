"""`CostDrift`: how much longer tokens take now than when the cost of steps was measured."""

from dataclasses import dataclass, replace

from bladellm_runtime.scheduler.step_cost import StepCost, StepLoad

GAIN = 0.005
LEAST, MOST = 0.8, 1.6
LEAST_TOKENS = 256
"""Shorter prompts say little: steps with them are mostly something else."""


@dataclass(slots=True)
class CostDrift:
    """Times what tokens of a step with prompts, and their attention, take.

    A GPU that was idle before the start runs at a lower clock under a load that lasts: the 17 µs that a token took then
    become 20. Each step moves the factor by `GAIN` towards what it took, so it comes to the median: an end that the
    host notes late counts like any other.
    """

    factor: float = 1.0

    def applied(self, cost: StepCost) -> StepCost:
        """What steps cost now; cost: as measured."""
        return replace(cost, token=cost.token * self.factor, prefill_pair=cost.prefill_pair * self.factor)

    def note(self, cost: StepCost, load: StepLoad, milliseconds: float) -> bool:
        """A step with prompts took so long, begun as the one in front of it ended. Whether that changes the factor."""
        whole = load.decode_rows + load.prefill_tokens
        if load.prefill_tokens < LEAST_TOKENS or (cost.sizes and whole > cost.sizes[-1]):
            # Above the largest captured size it takes what the host takes to launch it.
            return False
        longer = milliseconds > self.applied(cost).milliseconds(load)
        before = self.factor
        self.factor = min(max(before * (1 + GAIN if longer else 1 / (1 + GAIN)), LEAST), MOST)
        return self.factor != before
