"""What `LLM` makes of its options."""

import json
import random
import shutil

import pytest
import torch

from bladellm_runtime import LLM, SamplingParams
from bladellm_runtime import llm as llm_module
from bladellm_runtime.config import EngineArgs
from bladellm_runtime.engine.build import TARGET_TBT_MS, target_tbt
from bladellm_runtime.engine.step_graphs import graph_sizes
from bladellm_runtime.errors import CheckpointError, ParameterError
from bladellm_runtime.llm import OFFLINE_REQUESTS, offline_args


def test_nobody_waits_for_tokens_of_a_file_of_prompts(demo_model):
    """On a GPU too steps are as long as they come, unless they are to be bounded."""
    gpu = torch.device("cuda")
    assert target_tbt(EngineArgs(model="m"), gpu) == TARGET_TBT_MS
    with LLM(str(demo_model), device="cpu", kv_cache_gib=0.05) as llm:
        assert target_tbt(llm.args, gpu) == 0
    with LLM(str(demo_model), device="cpu", kv_cache_gib=0.05, target_tbt_ms=5.0) as llm:
        assert target_tbt(llm.args, gpu) == 5.0
        assert llm._engine.core._scheduler._planner.bound.milliseconds == 5.0


def test_a_tokenizer_that_does_not_fit_is_refused_before_an_engine_is_built(demo_model, tmp_path, monkeypatch):
    shutil.copytree(demo_model, tmp_path, dirs_exist_ok=True)
    config = json.loads((demo_model / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"vocab_size": 8191}))
    monkeypatch.setattr(llm_module, "build_engine", lambda args: pytest.fail("an engine was built"))
    with pytest.raises(CheckpointError, match="has 8192 tokens, above the vocab_size 8191"):
        LLM(str(tmp_path), device="cpu")


@pytest.mark.parametrize(("options", "slots", "captured"), [
    ({}, OFFLINE_REQUESTS, OFFLINE_REQUESTS),
    ({"cuda_graph_max_batch_size": 64}, OFFLINE_REQUESTS, 64),
    ({"cuda_graph_batch_sizes": [1, 8]}, OFFLINE_REQUESTS, 8),
    ({"disable_cuda_graph": True}, OFFLINE_REQUESTS, 0),
    ({"max_running_requests": 300}, 300, 256),
    ({"device": "cpu"}, 256, 256),
])  # fmt: skip
def test_a_gpu_runs_more_of_a_file_at_once_and_has_such_steps_captured(options, slots, captured):
    args = offline_args("m", {"device": "cuda"} | options)
    assert args.slots == slots
    assert max(graph_sizes(args), default=0) == captured


@pytest.mark.parametrize("bad", ["\ud800", [5, 3.5], [5, "6"], None, 7])
def test_a_prompt_that_is_none_leaves_nothing_of_its_call_behind(demo_model, bad):
    greedy = SamplingParams(temperature=0.0, max_tokens=4)
    with LLM(str(demo_model), device="cpu", kv_cache_gib=0.05) as llm:
        before = llm.generate(["The"], greedy)[0].outputs[0].token_ids
        with pytest.raises(ParameterError, match="prompt"):
            llm.generate(["The", bad, "It"], greedy)
        assert (llm.stats().waiting, llm.stats().running) == (0, 0)
        assert llm.generate(["The"], greedy)[0].outputs[0].token_ids == before


def test_a_call_that_was_interrupted_leaves_nothing_behind(demo_model, monkeypatch):
    with LLM(str(demo_model), device="cpu", kv_cache_gib=0.05) as llm:
        steps, step = 0, llm._engine.core.step

        def interrupted():
            nonlocal steps
            steps += 1
            if steps == 3:
                raise KeyboardInterrupt
            return step()

        monkeypatch.setattr(llm._engine.core, "step", interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(["The", "It"], SamplingParams(max_tokens=100, ignore_eos=True))
        assert (llm.stats().waiting, llm.stats().running) == (0, 0)
        assert len(llm.generate(["The"], SamplingParams(max_tokens=4, ignore_eos=True))[0].outputs[0].token_ids) == 4
        assert llm.stats().kv_granules_used == 0


SMALL = {"device": "cpu", "dtype": "float32", "kv_cache_gib": 0.05, "max_running_requests": 3}


def test_requests_are_made_as_the_queue_gets_short(demo_model, monkeypatch):
    """And have the answers that they have when all are there at once; prompts of which nothing comes do not count."""
    prompts = [[5 + (7 * number + place) % 200 for place in range(random.randint(1, 9))] for number in range(20)]
    prompts[3], prompts[10] = [], [10**9]
    each = [SamplingParams(temperature=0.0, max_tokens=random.randint(1, 9), n=random.choice([1, 2])) for _ in prompts]
    with LLM(str(demo_model), **SMALL) as llm:
        expected = llm.generate(prompts, each)
        monkeypatch.setattr("bladellm_runtime.llm.QUEUED_TOKENS", 20)
        most, add = 0, llm._engine.core.add

        def watched(request):
            nonlocal most
            most = max(most, llm.stats().waiting)
            return add(request)

        monkeypatch.setattr(llm._engine.core, "add", watched)
        found = llm.generate(prompts, each)
    assert 0 < most <= 20
    assert [output.outputs[0].error for output in found] == [output.outputs[0].error for output in expected]
    assert [[one.token_ids for one in output.outputs] for output in found] == [
        [one.token_ids for one in output.outputs] for output in expected
    ]


def test_outputs_come_in_order_while_others_run(demo_model):
    lengths = [1, 3, 40, 2, 20]
    each = [SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True) for length in lengths]
    with LLM(str(demo_model), **SMALL) as llm:
        found, running = [], []
        for output in llm.generate_each(["The"] * len(lengths), each):
            found.append(len(output.outputs[0].token_ids))
            running.append(llm.stats().running)
        assert found == lengths
        assert running[0] > 0
        assert running[-1] == 0


def test_calls_may_take_turns_and_be_left(demo_model):
    greedy = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    with LLM(str(demo_model), **SMALL) as llm:
        expected = {text: llm.generate([text], greedy)[0].outputs[0].token_ids for text in ("The", "It", "A")}
        first, second, third = (llm.generate_each([text] * 4, greedy) for text in expected)
        found = [next(first), next(second), next(third), next(first)]
        third.close()
        found += [*second, *first]
        assert [output.outputs[0].token_ids for output in found] == [expected[output.prompt] for output in found]
        assert sorted(output.prompt for output in found) == ["A"] + ["It"] * 4 + ["The"] * 4
        assert (llm.stats().waiting, llm.stats().running, llm.stats().kv_granules_used) == (0, 0, 0)
        with pytest.raises(ParameterError, match="prompt"):
            llm.generate_each(["The", None], greedy)


def test_prompts_late_for_a_target_are_answered_all_the_same(demo_model):
    """With a target that one prompt can meet, of many that come at once most stand aside."""
    greedy = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    prompts = [[5 + (7 * number + place) % 200 for place in range(30 + number)] for number in range(24)]
    small = {"device": "cpu", "kv_cache_gib": 0.05, "ragged_flash_max_batch_tokens": 64, "disable_prompt_cache": True}
    found, late = {}, 0
    for target in (0.0, 5.0):
        with LLM(str(demo_model), target_ttft_ms=target, **small) as llm:
            core = llm._engine.core
            assert (core._scheduler._planner.target is None) == (target == 0.0)
            step = core.step

            def watched(step=step, llm=llm):
                nonlocal late
                late = max(late, llm.stats().late)
                return step()

            core.step = watched
            found[target] = [answer.outputs[0].token_ids for answer in llm.generate(prompts, greedy)]
    assert found[5.0] == found[0.0]
    assert 0 < late < len(prompts)
