"""Engines of two GPUs: the tokens of one in float32, captured or not, and close logits in bf16."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.engine.test_equality import assert_equal
from tests.gpu.tensor_parallel_answers import PROMPTS, SIZES, answers
from tests.kernels.rank_processes import run_ranks

pytestmark = [
    pytest.mark.gpu(count=2),
    pytest.mark.timeout(600),
]
WAYS: dict[str, dict[str, Any]] = {
    "captured": {},
    "eager": {"disable_cuda_graph": True},
    "chunks": {"prefill_chunk_tokens": 7, "disable_overlap": True},
    "parts": {"overlap_sums_tokens": 2, "cuda_graph_prefill_tokens": [0]},
    "parts, eager": {"overlap_sums_tokens": 1, "disable_cuda_graph": True},
    "whole sums": {"overlap_sums_tokens": 0},
}


@pytest.fixture(scope="module")
def one_rank(demo_model):
    return answers(str(demo_model), dtype="float32")


def of_two(folder: Path, model: Path, **options: Any) -> dict[str, Any]:
    """Of a new process with an engine of two ranks, which are to write to each other's memory."""
    file = folder / "answers.json"
    asked = json.dumps({"tensor_parallel_size": 2, **options})
    run_ranks("tests.gpu.tensor_parallel_answers", "write_answers", 1, str(file), str(model), asked, seconds=240)
    found = json.loads(file.read_text())
    assert found["fast_rows"] > found["fast_gathered_rows"] == SIZES["max_running_requests"]
    assert found["memory"]["sums over ranks"] > 0
    return found


@pytest.mark.parametrize("way", WAYS)
def test_two_ranks_give_the_tokens_of_one(way, demo_model, one_rank, tmp_path):
    found = of_two(tmp_path, demo_model, dtype="float32", **WAYS[way])
    assert (found["captured"][0] == 0) == ("disable_cuda_graph" in WAYS[way])
    if "overlap_sums_tokens" in WAYS[way]:
        assert (found["copied_sums"] > 100) == way.startswith("parts")
    assert found["tokens"] == one_rank["tokens"]
    assert found["scored"] == one_rank["scored"]
    assert_equal(demo_model, PROMPTS * 2, found["tokens"])
    for mine, one in zip(found["logprobs"], one_rank["logprobs"], strict=True):
        assert mine == pytest.approx(one, abs=1e-3)


def test_logits_in_bf16_are_close(demo_model, tmp_path):
    """Log-probabilities of the same tokens, up to the first that differs, where two are nearly equal."""
    found, one_rank = of_two(tmp_path, demo_model, dtype="bfloat16"), answers(str(demo_model), dtype="bfloat16")
    compared = 0
    for index, (mine, one) in enumerate(zip(found["scored"], one_rank["scored"], strict=True)):
        same = next((place for place, pair in enumerate(zip(mine, one, strict=True)) if len(set(pair)) > 1), len(one))
        expected = one_rank["logprobs"][index][:same]
        assert found["logprobs"][index][:same] == pytest.approx(expected, abs=0.1)
        compared += same
    assert compared > 24 * len(PROMPTS)
