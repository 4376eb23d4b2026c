"""Engines of several pipeline stages answer as one rank does, whatever is asked of them."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from bladellm_runtime import LLM, SamplingParams
from bladellm_runtime.errors import ConfigError, UserError
from tests.engine import reference
from tests.engine.test_equality import assert_equal
from tests.engine.test_ranks import GREEDY, OPTIONS, answers
from tests.models.harness import random_prompt, save_tiny
from tests.models.quantized import SCHEMES, Tiny, plan
from tests.tools.command import run

DEGREES: dict[str, dict[str, Any]] = {
    "2 stages": {"pipeline_parallel_size": 2},
    "3 stages": {"pipeline_parallel_size": 3},
    "2 stages of 2": {"pipeline_parallel_size": 2, "tensor_parallel_size": 2},
    "2 stages, 5 micro-batches": {"pipeline_parallel_size": 2, "pipeline_micro_batch": 5},
    "3 stages, 1 micro-batch": {"pipeline_parallel_size": 3, "pipeline_micro_batch": 1},
}
EVERY = [("2 stages", name) for name in OPTIONS]
EVERY += [(degrees, name) for degrees in list(DEGREES)[1:] for name in ("overlap", "no overlap", "chunks of 7")]
SAMPLE = ("2 stages", "chunks of 7")


def of_stages(folder: Path, degrees: dict[str, Any], **options: Any) -> tuple[list[Any], list[int]]:
    tensor = degrees.get("tensor_parallel_size", 1)
    stages = {name: value for name, value in degrees.items() if name != "tensor_parallel_size"}
    return answers(folder, tensor, **stages, **options)


@pytest.mark.turns("ranks")
@pytest.mark.parametrize(
    ("degrees", "name"), [case if case == SAMPLE else pytest.param(*case, marks=pytest.mark.slow) for case in EVERY]
)
def test_stages_answer_as_one_rank_does(demo_model, degrees, name):
    found, cached = of_stages(demo_model, DEGREES[degrees], **OPTIONS[name])
    assert (found, cached) == answers(demo_model, 1, **OPTIONS[name])
    if "kv_cache_quant" not in OPTIONS[name]:
        assert_equal(demo_model, reference.PROMPTS[:3], [choices[0][0] for choices in found[:3]])
    if name != "relocating":
        assert sum(cached[len(cached) // 2 :]) > 0


@pytest.mark.slow
@pytest.mark.parametrize("degrees", ["2 stages", "2 stages of 2"])
def test_split_folders(demo_model, degrees, tmp_path):
    """Each rank has its own folder's files alone: nothing of the others is there."""
    sizes = [f"--{name}={value}" for name, value in DEGREES[degrees].items()]
    folder = tmp_path / "split"
    done = run("blade_llm_split", "--model", str(demo_model), "--output_dir", str(folder), *sizes)
    assert done.returncode == 0, done.stderr
    assert of_stages(folder, DEGREES[degrees]) == answers(demo_model, 1)


@pytest.mark.slow
@pytest.mark.parametrize("degrees", ["3 stages", "2 stages of 2"])
@pytest.mark.parametrize("name", [None, "w4 g16 asymmetric"])
def test_random_models(degrees, name, demo_model, tmp_path):
    options = {"num_hidden_layers": 5, "vocab_size": 8192, "max_position_embeddings": 512}
    if name is None:
        save_tiny(tmp_path, "qwen3", head_dim=16, **options)
    else:
        Tiny(tmp_path, plan("compressed-tensors", SCHEMES[name], ()), "qwen2", **options)
    prompts = [random_prompt(length) for length in (3, 40, 17, 8, 30)]
    ways = [GREEDY, SamplingParams(temperature=1.0, seed=3, max_tokens=30, ignore_eos=True)]
    shared = {"dtype": "float32", "device": "cpu", "kv_cache_gib": 0.05, "tokenizer_dir": str(demo_model)}
    found = []
    for degree in (DEGREES[degrees], {}):
        with LLM(str(tmp_path), **shared, **degree) as llm:
            outputs = llm.generate(prompts * 2, [ways[0]] * 5 + [ways[1]] * 5)
            found.append([output.outputs[0].token_ids for output in outputs])
    assert found[0] == found[1]


@pytest.mark.slow
def test_log_probabilities(demo_model):
    way = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=3, prompt_logprobs=2)
    found = []
    for stages in (1, 3):
        with LLM(
            str(demo_model), dtype="float32", device="cpu", kv_cache_gib=0.05, pipeline_parallel_size=stages,
            prefill_chunk_tokens=5,
        ) as llm:  # fmt: skip
            found.append(llm.generate(reference.PROMPTS[:4], way))
    for one, other in zip(*found, strict=True):
        assert one.outputs[0].token_ids == other.outputs[0].token_ids
        pairs = [(one.prompt_logprobs, other.prompt_logprobs), (one.outputs[0].logprobs, other.outputs[0].logprobs)]
        for mine, theirs in pairs:
            assert mine is not None
            assert theirs is not None
            assert [each.token_ids for each in mine] == [each.token_ids for each in theirs]
            for each, its in zip(mine, theirs, strict=True):
                assert each.logprobs == pytest.approx(its.logprobs, abs=1e-3)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"pipeline_parallel_size": 5}, "--pipeline_parallel_size 5 is not from 1 to the model's 4 layers"),
        ({"pipeline_micro_batch": 2}, "--pipeline_micro_batch is for --pipeline_parallel_size 2 or more; leave it out"),
        ({"pipeline_parallel_size": 2, "pipeline_micro_batch": 65}, "--pipeline_micro_batch must be between 1 and 64"),
        ({"pipeline_parallel_size": 3, "nnodes": 2}, "--nnodes 2 hosts cannot share 3 ranks evenly"),
    ],
)
def test_flags_that_cannot_be(demo_model, options, sentence):
    with pytest.raises(ConfigError, match=sentence):
        LLM(str(demo_model), device="cpu", **options)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 2])
def test_a_lost_stage_is_an_error_of_the_call(demo_model, stage):
    llm = LLM(str(demo_model), dtype="float32", device="cpu", pipeline_parallel_size=3, kv_cache_gib=0.05)
    assert len(llm.generate([[5, 7]], GREEDY)[0].outputs[0].token_ids) == GREEDY.max_tokens
    os.kill(llm._engine.core._runner._ranks.process_ids[stage], signal.SIGKILL)
    with pytest.raises(UserError, match=f"the engine stopped: rank {stage} was killed by signal 9"), llm:
        llm.generate([[5, 7]], GREEDY)
