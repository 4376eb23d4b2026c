"""Engines of several ranks answer as one rank does, whatever is asked of them."""

import os
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from bladellm_runtime import LLM, SamplingParams
from bladellm_runtime.errors import ConfigError, UserError
from bladellm_runtime.wire.messages import AddRequest, one_by_one
from tests.engine import reference
from tests.engine.test_equality import TOKENS, assert_equal, token_bytes
from tests.support.live import until
from tests.tools.command import run

GREEDY = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)
WAYS = [
    GREEDY,
    SamplingParams(temperature=1.0, seed=11, max_tokens=14, ignore_eos=True),
    SamplingParams(temperature=0.8, top_k=40, top_p=0.9, seed=5, n=2, max_tokens=14),
    SamplingParams(temperature=0.9, seed=3, repetition_penalty=1.2, frequency_penalty=0.3, logprobs=2, max_tokens=14),
    SamplingParams(temperature=0.0, prompt_logprobs=1, logit_bias={9: 1.5}, min_tokens=4, max_tokens=10),
]
OPTIONS: dict[str, dict[str, Any]] = {
    "overlap": {},
    "no overlap": {"disable_overlap": True},
    "chunks of 7": {"prefill_chunk_tokens": 7, "ragged_flash_max_batch_tokens": 32},
    "relocating": {"kv_arena": "relocating"},
    "paged": {"attn_cls": "paged"},
    "int8": {"kv_cache_quant": "int8"},
    "sums in parts": {"overlap_sums_tokens": 5},
    "swap": {"prompt_cache_enable_swap": True, "prompt_cache_swap_gib": 0.1},
}
OF_THREE = ("overlap", "chunks of 7", "paged", "sums in parts")
EVERY = [(2, name) for name in OPTIONS] + [(3, name) for name in OF_THREE] + [(6, "no overlap")]
SAMPLE = (2, "chunks of 7")


def abort_some(llm: LLM) -> None:
    """Requests that are given up in the middle of their prompts and of their answers."""
    core = llm._engine.core
    for number in range(5):
        core.add(AddRequest(10**6 + number, [7 + number] * 50, GREEDY, 0, 0.0))
    for _ in range(4):
        core.step()
    core.abort([10**6 + number for number in range(5)])
    while not core.idle:
        core.step()


def answers(folder: Path, degree: int, **options: Any) -> tuple[list[Any], list[int]]:
    """What the engine says to every way of asking, before, and after requests were aborted, from the cache; and how
    many tokens of prompts it had there."""
    asked = [(prompt, way) for way in WAYS for prompt in reference.PROMPTS[:3]]
    found, cached = [], []
    with LLM(
        str(folder), dtype="float32", device="cpu", tensor_parallel_size=degree, **({"kv_cache_gib": 0.1} | options)
    ) as llm:
        for _ in range(2):
            outputs = llm.generate([prompt for prompt, _ in asked], [way for _, way in asked])
            found += [[(one.token_ids, one.finish_reason) for one in output.outputs] for output in outputs]
            cached += [output.cached_tokens for output in outputs]
            abort_some(llm)
    return found, cached


@pytest.mark.turns("ranks")
@pytest.mark.parametrize(
    ("degree", "name"), [case if case == SAMPLE else pytest.param(*case, marks=pytest.mark.slow) for case in EVERY]
)
def test_ranks_answer_as_one_does(demo_model, degree, name):
    found, cached = answers(demo_model, degree, **OPTIONS[name])
    assert (found, cached) == answers(demo_model, 1, **OPTIONS[name])
    if "kv_cache_quant" not in OPTIONS[name]:
        assert_equal(demo_model, reference.PROMPTS[:3], [choices[0][0] for choices in found[:3]])
    if name != "relocating":
        assert sum(cached[len(cached) // 2 :]) > 0


@pytest.mark.slow
@pytest.mark.parametrize("degree", [2, 3])
def test_ranks_give_way_alike_when_the_cache_is_full(target_model, degree):
    prompts = [reference.PROMPTS[index % len(reference.PROMPTS)] for index in range(12)]
    room = 5 * (TOKENS + 40) * token_bytes(target_model) / degree / 2**30 * 1.5
    options = {"kv_cache_gib": room, "max_model_len": 160, "max_running_requests": 12}
    with LLM(
        str(target_model), dtype="float32", device="cpu", tensor_parallel_size=degree, **options
    ) as llm:  # fmt: skip
        outputs = llm.generate(prompts, GREEDY)
        assert llm.stats().preemptions > 0
    assert_equal(target_model, prompts, [output.outputs[0].token_ids for output in outputs])


@pytest.mark.slow
def test_requests_without_a_seed_get_the_same_on_all_ranks(demo_model):
    """Ranks that drew different tokens would give each other's sums nonsense: the likelihoods of the answer tell."""
    way = SamplingParams(temperature=1.0, max_tokens=40, ignore_eos=True, logprobs=0)
    model, _ = reference.load(demo_model)
    with LLM(str(demo_model), dtype="float32", device="cpu", tensor_parallel_size=2, kv_cache_gib=0.1) as llm:
        core, prompt, tokens, found = llm._engine.core, [5, 9, 300], [], []
        core.add(AddRequest(77, prompt, way, 0, 0.0))
        while not core.idle:
            for delta in one_by_one(core.step()):
                tokens += delta.tokens
                found += [one.logprobs[0] for one in delta.logprobs or []]
    with torch.inference_mode():
        logits = model(torch.tensor([prompt + tokens])).logits[0].log_softmax(-1)
    wanted = [logits[len(prompt) - 1 + place, token].item() for place, token in enumerate(tokens)]
    assert found == pytest.approx(wanted, abs=1e-3)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"tensor_parallel_size": 7}, "--tensor_parallel_size 7 is not from 1 to the model's 6 query heads"),
        ({"nnodes": 2, "tensor_parallel_size": 2}, "--dist_init_addr is missing"),
        ({"dist_init_addr": "127.0.0.1:5000"}, "--dist_init_addr is for several hosts; set --nnodes"),
        ({"node_rank": 1}, "--node_rank 1 must be below --nnodes 1"),
        (
            {"nnodes": 2, "tensor_parallel_size": 3, "dist_init_addr": "a:5", "dist_token_file": "t"},
            "--nnodes 2 hosts cannot share 3 ranks evenly",
        ),
        (
            {"nnodes": 2, "tensor_parallel_size": 2, "dist_init_addr": "127.0.0.1", "dist_token_file": "t"},
            "--dist_init_addr must be host:port",
        ),
        (
            {"nnodes": 2, "tensor_parallel_size": 2, "dist_init_addr": "127.0.0.1:5", "dist_token_file": "/nowhere"},
            "--dist_token_file /nowhere cannot be read",
        ),
    ],
)
def test_flags_that_cannot_be(demo_model, options, sentence):
    with pytest.raises(ConfigError, match=sentence):
        LLM(str(demo_model), device="cpu", **options)


@pytest.mark.slow
def test_a_split_folder_answers_as_the_model_and_knows_its_degree(demo_model, tmp_path):
    folder = tmp_path / "split"
    done = run(
        "blade_llm_split", "--model", str(demo_model), "--output_dir", str(folder), "--tensor_parallel_size", "3"
    )
    assert done.returncode == 0, done.stderr
    assert answers(folder, 3) == answers(demo_model, 1)
    for degree in (1, 2):
        with pytest.raises(ConfigError, match="is split for --tensor_parallel_size 3 --pipeline_parallel_size 1, not"):
            answers(folder, degree)


@pytest.mark.slow
def test_a_lost_rank_is_an_error_of_the_call_and_closing_goes_on(demo_model):
    llm = LLM(str(demo_model), dtype="float32", device="cpu", tensor_parallel_size=3, kv_cache_gib=0.05)
    victim = llm._engine.core._runner._ranks.process_ids[2]
    os.kill(victim, signal.SIGKILL)
    until(lambda: not psutil.pid_exists(victim) or psutil.Process(victim).status() == psutil.STATUS_ZOMBIE)
    with pytest.raises(UserError, match="the engine stopped: rank 2 was killed by signal 9"), llm:
        llm.generate([[5, 7]], GREEDY)


def test_closing_after_a_step_that_one_rank_did_not_begin_waits_for_nobody(demo_model, monkeypatch):
    """The last stage waits for its hidden states, and the first one would wait for the token of it."""

    def fail(hidden):
        raise RuntimeError("not begun")

    llm = LLM(str(demo_model), dtype="float32", device="cpu", pipeline_parallel_size=2, kv_cache_gib=0.05)
    ranked = llm._engine.core._runner
    processes = [psutil.Process(pid) for pid in ranked._ranks.process_ids.values()]
    assert llm.generate([[5, 7]], GREEDY)[0].outputs[0].token_ids
    monkeypatch.setattr(ranked._runner._stage, "send", fail)
    with pytest.raises(UserError, match="the engine stopped: RuntimeError: not begun"), llm:
        llm.generate([[5, 7, 9]], GREEDY)
    assert not psutil.wait_procs(processes, timeout=5.0)[1]
