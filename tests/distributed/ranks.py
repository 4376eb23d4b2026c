"""Tiny models over ranks, and what their steps give."""

from pathlib import Path

import pytest
import torch

from bladellm_runtime.distributed.communicator import Communicator
from bladellm_runtime.distributed.plan import ParallelPlan
from bladellm_runtime.models.config import read_model_spec
from bladellm_runtime.models.decoder import Decoder
from bladellm_runtime.models.loading import load_model
from bladellm_runtime.models.parallel import TensorParallel, make_plan
from tests.distributed.threads import run_ranks
from tests.models.harness import Sequences, random_prompt

CPU = torch.device("cpu")
LIMIT = 1e-4
"""Of a logit, in float32."""


def plan_of(folder: Path, degree: int) -> ParallelPlan:
    return make_plan(folder, degree)


def load_rank(
    folder: Path, communicator: Communicator, dtype: torch.dtype = torch.float32, load_format: str = "auto"
) -> Decoder:
    spec, plan = read_model_spec(folder), plan_of(folder, communicator.size)
    parallel = TensorParallel(plan, communicator)
    return load_model(folder, spec, device=CPU, dtype=dtype, load_format=load_format, seed=7, parallel=parallel)


def run_prompts(model: Decoder, prompts: list[list[int]]) -> list[torch.Tensor]:
    """Logits [tokens, vocab] of prompts that are prefilled in one step but for their last tokens, which are decoded."""
    sequences = Sequences(model, slots=len(prompts))
    starts = sequences.step([(slot, prompt[:-3]) for slot, prompt in enumerate(prompts)])
    rows = [sequences.step([(slot, [prompt[at]]) for slot, prompt in enumerate(prompts)]) for at in (-3, -2, -1)]
    return [torch.cat((start, *(row[slot] for row in rows))) for slot, start in enumerate(starts)]


def run_on_threads(folder: Path, degree: int, prompts: list[list[int]], **options) -> list[torch.Tensor]:
    """The same of a model over `degree` ranks, all of which must give the same bits."""
    first, *others = run_ranks(degree, lambda group: run_prompts(load_rank(folder, group, **options), prompts))
    for other in others:
        assert all(torch.equal(mine, one) for mine, one in zip(first, other, strict=True))
    return first


def sampled(cases: list, sample: set) -> list:
    """The cases, all but the sample marked as slow."""
    return [case if case in sample else pytest.param(*case, marks=pytest.mark.slow) for case in cases]


def prompts() -> list[list[int]]:
    return [random_prompt(length) for length in (19, 7, 12)]
