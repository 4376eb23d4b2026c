"""`RunningStep`: a step between its launch and its result."""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch

from bladellm_runtime.engine.prompt_scores import ScoredPrompt
from bladellm_runtime.engine.sampler import SampleOutputs
from bladellm_runtime.engine.uploaded_masks import UploadedMasks
from bladellm_runtime.scheduler.plan import INVALID, Ints, StepPlan, StepResult
from bladellm_runtime.wire.messages import TokenLogprobs


@dataclass(slots=True)
class RunningStep:
    """A step handed to the device, and everything that must stay alive until its result is read.

    sample: launches what turns its logits into `outputs`, with the
    masks of its constrained rows; None once that is done, and where another stage samples.
    """

    plan: StepPlan
    sample: "Callable[[RunningStep, UploadedMasks | None], None] | None" = None
    outputs: SampleOutputs | None = None
    scored: list[ScoredPrompt] = field(default_factory=list)
    keep: list[object] = field(default_factory=list)
    done: torch.cuda.Event | None = None

    @property
    def sampling_rows(self) -> Ints:
        """Plan rows of the outputs, in order."""
        return np.flatnonzero(self.plan.samples)


def read_result(step: RunningStep) -> StepResult:
    """What a step that is done produced: nothing where another stage samples, or it was given up before that."""
    rows = len(step.plan.slots)
    if step.outputs is None:
        return StepResult(np.full(rows, INVALID, dtype=np.int64))
    # A copy: the memory is soon another step's.
    tokens: Ints = step.outputs.tokens.numpy().copy()
    if len(tokens) < rows:
        sampled, tokens = tokens, np.full(rows, INVALID, dtype=np.int64)
        tokens[step.sampling_rows] = sampled
    prompt_logprobs = {scored.row: scored.to_host() for scored in step.scored}
    return StepResult(tokens, _read_logprobs(step, step.outputs), prompt_logprobs)


def _read_logprobs(step: RunningStep, outputs: SampleOutputs) -> dict[int, TokenLogprobs]:
    if outputs.logprobs is None:
        return {}
    rows = step.sampling_rows.tolist()
    return {rows[index]: entry for index, entry in outputs.read_logprobs()}
