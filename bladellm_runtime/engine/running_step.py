"""`RunningStep`: a step between its launch and its result."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from bladellm_runtime.engine.prompt_scores import ScoredPrompt
from bladellm_runtime.engine.sampler import SampleOutputs
from bladellm_runtime.engine.uploaded_masks import UploadedMasks
from bladellm_runtime.scheduler.plan import StepPlan, StepResult
from bladellm_runtime.wire.messages import TokenLogprobs


@dataclass(slots=True)
class RunningStep:
    """A step handed to the device, and everything that must stay alive until its result is read.

    sampling_rows: plan rows of the outputs, in order. sample: launches what turns its logits into `outputs`, with the
    masks of its constrained rows; None once that is done, and where another stage samples.
    """

    plan: StepPlan
    sampling_rows: Sequence[int]
    sample: "Callable[[RunningStep, UploadedMasks | None], None] | None" = None
    outputs: SampleOutputs | None = None
    scored: list[ScoredPrompt] = field(default_factory=list)
    keep: list[object] = field(default_factory=list)
    done: torch.cuda.Event | None = None


def read_result(step: RunningStep) -> StepResult:
    """What a step that is done produced: nothing where another stage samples, or it was given up before that."""
    rows = len(step.plan.slots)
    if step.outputs is None:
        return StepResult([None] * rows, [None] * rows, [None] * rows)
    logprobs: list[TokenLogprobs | None] = [None] * rows
    prompt_logprobs: list[list[TokenLogprobs] | None] = [None] * rows
    tokens: list[int | None] = step.outputs.tokens.tolist()
    if len(tokens) < rows:
        sampled = dict(zip(step.sampling_rows, tokens, strict=True))
        tokens = [sampled.get(row) for row in range(rows)]
    for index, entry in step.outputs.read_logprobs():
        logprobs[step.sampling_rows[index]] = entry
    for scored in step.scored:
        prompt_logprobs[scored.row] = scored.to_host()
    return StepResult(tokens, logprobs, prompt_logprobs)
