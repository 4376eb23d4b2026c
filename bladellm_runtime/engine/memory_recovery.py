"""After a step that ran out of memory: smaller steps, or one request less; twice in vain, and the engine ends."""

import logging

from bladellm_runtime.engine.step_errors import StepMemoryError
from bladellm_runtime.scheduler.scheduler import Scheduler
from bladellm_runtime.wire.messages import RequestDelta

LEAST_TOKENS = 16
"""Steps are not made smaller than this."""

logger = logging.getLogger(__name__)


class MemoryRecovery:
    """Decides how to go on. What a step allocates grows with its tokens, KV memory apart, which is never short here.

    All that ran is recomputed: the step may have done part of its work, and later ones rest on it.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._failed_at = -1

    def recover(self, error: StepMemoryError) -> list[RequestDelta]:
        """Put what ran back into the queue; returns the terminal delta of a request that is given up.

        Nothing may run on the device. Raises the error when not one step was completed since a request was given up.
        """
        if error.tokens > LEAST_TOKENS:
            limit = max(error.tokens // 2, LEAST_TOKENS)
            self._scheduler.give_up_steps()
            self._scheduler.limit_steps(limit)
            logger.warning(
                "out of memory in a step of %d tokens: from now on steps have %d at most, and what ran is recomputed; "
                "lower --max_gpu_memory_utilization to leave steps more", error.tokens, limit,
            )  # fmt: skip
            return []
        if self._failed_at == self._scheduler.steps_completed:
            raise error
        self._failed_at = self._scheduler.steps_completed
        deltas = self._scheduler.fail_newest(error.plan)
        self._scheduler.give_up_steps()
        logger.warning("out of memory in a step of %d tokens: its newest request is given up", error.tokens)
        return deltas
