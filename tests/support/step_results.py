"""Step results from lists with an entry for every row."""

from collections.abc import Sequence

import numpy as np

from bladellm_runtime.scheduler.plan import INVALID, StepResult
from bladellm_runtime.wire.messages import TokenLogprobs


def step_result(
    tokens: Sequence[int | None],
    logprobs: Sequence[TokenLogprobs | None] = (),
    prompt_logprobs: Sequence[list[TokenLogprobs] | None] = (),
) -> StepResult:
    """None stands for nothing; so does a list that is left out."""
    return StepResult(
        np.array([INVALID if token is None else token for token in tokens], dtype=np.int64),
        {row: entry for row, entry in enumerate(logprobs) if entry is not None},
        {row: entries for row, entries in enumerate(prompt_logprobs) if entries is not None},
    )
