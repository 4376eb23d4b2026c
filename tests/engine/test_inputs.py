"""Which tokens' hidden states a flat plan wants of the last layer alone, and what it uploads of their sequences."""

import numpy as np
import pytest
import torch

from bladellm_runtime.engine.inputs import SlotTokens, build_inputs, flatten
from bladellm_runtime.scheduler.plan import StepPlan
from tests.models.harness import Sequences, load_tiny, random_prompt, save_tiny
from tests.support.step_plans import step_plan


@pytest.fixture(scope="module")
def arena(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    save_tiny(folder, "llama")
    return Sequences(load_tiny(folder, "cpu")).arena


def planned(rows: list[tuple[int, int, int, bool]], num_decode: int) -> StepPlan:
    """rows: slot, start, query_len, whether it samples."""
    slots, starts, query_lens, samples = (list(column) for column in zip(*rows, strict=True))
    plan = step_plan(0, slots=slots, starts=starts, query_lens=query_lens, num_decode=num_decode)
    plan.samples = samples
    return plan


def known(prompt_logprobs: int | None = None) -> list[SlotTokens | None]:
    return [SlotTokens(np.array(random_prompt(60)), 60, prompt_logprobs) for _ in range(4)]


def test_newest_tokens_of_sampling_rows_are_wanted(arena):
    """Two decode rows, a chunk with more to come, and the end of a prompt."""
    rows = [(3, 7, 1, True), (0, 50, 1, True), (2, 5, 9, False), (1, 40, 20, True)]
    batch = build_inputs(flatten(planned(rows, 2), known(), arena), torch.zeros(5, dtype=torch.int64), arena).batch
    wanted = batch.wanted
    assert wanted is not None
    assert wanted.max_kv_len == 60
    assert wanted.tokens.tolist() == batch.logit_tokens.tolist() == [0, 1, 30]
    assert wanted.slots.tolist() == [3, 0, 1]
    assert wanted.kv_lens.tolist() == [8, 51, 60]
    assert wanted.base_rows.tolist() == [arena.base_row(slot) for slot in (3, 0, 1)]
    last = wanted.base_rows + wanted.kv_lens - 1
    assert last.tolist() == batch.kv_rows[wanted.tokens].tolist()


def test_a_chunk_with_more_to_come_wants_none(arena):
    batch = build_inputs(flatten(planned([(1, 0, 31, False)], 0), known(), arena), torch.zeros(5).long(), arena).batch
    assert batch.wanted is not None
    assert len(batch.wanted.tokens) == 0
    assert batch.wanted.max_kv_len == 0


@pytest.mark.parametrize(
    ("rows", "num_decode", "logprobs"),
    [
        ([(0, 5, 1, True), (1, 9, 1, True)], 2, None),
        ([(0, 5, 1, True), (1, 9, 1, True), (2, 57, 3, True)], 2, None),
        ([(2, 0, 60, True)], 0, 0),
    ],
    ids=["decodes alone", "most are wanted", "scored prompt"],
)
def test_all_tokens_go_through_the_last_layer(arena, rows, num_decode, logprobs):
    inputs = build_inputs(flatten(planned(rows, num_decode), known(logprobs), arena), torch.zeros(5).long(), arena)
    assert inputs.batch.wanted is None
