"""Captured decode steps: padding, static arrays and per-slot feedback change no token and touch nobody's memory."""

import random
import time
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch

from bladellm_runtime.config import GIB, EngineArgs
from bladellm_runtime.engine import build_runner
from bladellm_runtime.engine.build import Engine, build_engine
from bladellm_runtime.engine.captured_sampling import GreedySampling, KernelSampling
from bladellm_runtime.engine.runner import ModelRunner
from bladellm_runtime.engine.sampling_state import SamplingState
from bladellm_runtime.engine.step_graphs import StepGraph, StepGraphs
from bladellm_runtime.request import SamplingParams
from bladellm_runtime.wire.messages import AddRequest, one_by_one
from tests.engine import reference
from tests.engine.captured import Again, captured_llm
from tests.engine.test_equality import WAYS, assert_equal, greedy_params, token_bytes
from tests.engine.ties import assert_alike
from tests.models.harness import Sequences, load_tiny, random_prompt, save_tiny
from tests.support.cases import drawn_of, some_pairs
from tests.support.step_plans import step_plan

FORMATS = ["no_quant", "int8", "int4", "int8_affine", "int4_affine", "fp8_e4m3", "fp8_e5m2", "fp12_e4m7"]
FAMILIES = {
    "llama": {},
    "mistral": {"sliding_window": 9},
    "qwen2": {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1},
    "qwen3": {"head_dim": 16},
}
PROMPTS = [reference.PROMPTS[i % len(reference.PROMPTS)] for i in range(16)]


SLOW = [pytest.param(way, marks=pytest.mark.slow) for way in ("no overlap", "relocating", "chunks of 7")]


@pytest.mark.parametrize("way", ["overlap", "paged", *SLOW])
def test_tokens_are_those_of_transformers(demo_model, way):
    """16 requests in 11 slots, ending one by one: batches of every size from 11 down, some above the largest graph."""
    capture = Again()
    options = {"max_running_requests": 11, "cuda_graph_batch_sizes": [1, 4, 9], "kv_cache_gib": 0.25, **WAYS[way]}
    with captured_llm(str(demo_model), capture, dtype="float32", device="cpu", **options) as llm:
        params = [greedy_params() for _ in PROMPTS]
        inputs = llm._engine.core._runner._graphs.inputs
        with mock.patch.object(inputs, "_upload", wraps=inputs._upload) as upload:
            found = [output.outputs[0].token_ids for output in llm.generate(PROMPTS, params)]
        assert 0 < capture.replays < 2 * llm.stats().steps
        # Steps of the same rows need none, but where places are not consecutive.
        assert (upload.call_count > capture.replays / 3) == (way in ("paged", "relocating"))
        assert upload.call_count > 0
    assert_equal(demo_model, PROMPTS, found)


@pytest.mark.parametrize("format", drawn_of(FORMATS, 1))
def test_every_kv_format_gives_the_tokens_of_eager_steps(demo_model, format):
    params = SamplingParams(temperature=0.0, max_tokens=14, ignore_eos=True)
    options = {"dtype": "float32", "device": "cpu", "kv_cache_quant": format, "kv_cache_gib": 0.1}
    found = []
    for sizes in ({"disable_cuda_graph": True}, {"cuda_graph_batch_sizes": [3, 16]}):
        with captured_llm(str(demo_model), capture := Again(), **options, **sizes) as llm:
            # The second time prompts are found in the cache.
            for _ in range(2):
                found.append([output.outputs[0].token_ids for output in llm.generate(PROMPTS[:7], params)])
        assert (capture.replays > 0) == ("cuda_graph_batch_sizes" in sizes)
    assert found[0] == found[1] == found[2] == found[3]


def test_fused_and_other_steps_take_turns(demo_model, monkeypatch):
    """Decode steps of up to 6 rows fuse, captured with padding or eager; tokens are those of transformers all along."""
    monkeypatch.setattr("bladellm_runtime.models.decoder.Decoder.fuses", lambda _, rows: rows <= 6)
    options = {"max_running_requests": 11, "kv_cache_gib": 0.25, "dtype": "float32", "device": "cpu"}
    for sizes in ({"cuda_graph_batch_sizes": [1, 6, 9]}, {"disable_cuda_graph": True}):
        with captured_llm(str(demo_model), capture := Again(), **options, **sizes) as llm:
            model = llm._engine.core._runner._model
            with mock.patch.object(model.head, "normed", wraps=model.head.normed) as fused:
                found = [output.outputs[0].token_ids for output in llm.generate(PROMPTS, greedy_params())]
            assert 0 < fused.call_count < llm.stats().steps
            assert (capture.replays > 0) == ("cuda_graph_batch_sizes" in sizes)
        assert_equal(demo_model, PROMPTS, found)


@pytest.mark.parametrize(("tokens", "replayed"), [(5000, "short"), (5002, "long")])
def test_steps_that_read_many_tokens_have_a_graph_of_their_own(tokens, replayed):
    graphs, ran = object.__new__(StepGraphs), []
    graphs.inputs, graphs._left = SimpleNamespace(adapted=False), lambda rows: rows
    graphs._workspace = SimpleNamespace(is_long=lambda sequences, tokens: sequences == 3 and tokens > 5000)
    graphs._graphs = {4: StepGraph(lambda: ran.append("short"), lambda: ran.append("long"), [])}
    plan = SimpleNamespace(prefixes=[], starts=np.array([tokens // 2, 0, tokens // 2]), slots=[3, 1, 2])
    assert graphs.forward(plan, 4) == 3
    assert ran == [replayed]


@pytest.mark.parametrize(("family", "fused_rows"), some_pairs(FAMILIES, [0, 2, 5]))
def test_padding_touches_no_memory_and_reads_nothing(tmp_path: Path, family, fused_rows):
    """Logits equal the eager ones although the memory around is NaN, and only the rows' own places are written."""
    save_tiny(tmp_path, family, **FAMILIES[family])
    model = load_tiny(tmp_path)
    model.fuses = lambda rows: rows <= fused_rows
    eager, captured = Sequences(model, slots=6), Sequences(model, slots=6)
    prompts = {slot: random_prompt(length) for slot, length in ((4, 23), (0, 1), (2, 12))}
    for sequences in (eager, captured):
        sequences.step(list(prompts.items()))
    state = SamplingState(6, model.spec.vocab_size, [], torch.device("cpu"))
    last_token = torch.zeros(7, dtype=torch.int64)
    sampling = GreedySampling(state, last_token, 5)
    graphs = StepGraphs([2, 5], model, captured.arena, sampling, last_token, None, None)
    capture = Again()
    assert graphs.capture_all(capture)
    capture.before = lambda: graphs.sampling.logits.fill_(torch.nan)
    for step in range(12):
        slots = random.sample([4, 0, 2], 3 if step % 2 else 2)
        tokens = [random_prompt(1) for _ in slots]
        expected = torch.cat(eager.step(list(zip(slots, tokens, strict=True))))
        before, starts = captured.arena.rows.clone(), [captured.lengths[slot] for slot in slots]
        last_token[slots] = torch.tensor(tokens).flatten()
        last_token[6] = random_prompt(1)[0]
        plan = step_plan(step, slots=slots, starts=starts, query_lens=[1] * len(slots), num_decode=len(slots))
        size = graphs.size_for(plan)
        assert size == (5 if len(slots) == 3 else 2)
        with torch.inference_mode():
            graphs.inputs._static.fill_(2**40)
            graphs.inputs.send(plan, size)
            found = graphs.forward(plan, size)
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
        written = torch.tensor([captured.arena.base_row(s) + p for s, p in zip(slots, starts, strict=True)])
        before[written] = captured.arena.rows[written]
        assert torch.equal(captured.arena.rows.view(torch.int32), before.view(torch.int32))
        for slot in slots:
            captured.lengths[slot] += 1


class KernelState(SamplingState):
    """Keeps what kernels read, which PyTorch's operators then read on a CPU."""

    def __init__(self, *arguments) -> None:
        super().__init__(*arguments)
        self.use_kernels()


SPARED = 4
"""Requests, the last ones, that `drive` never aborts: of those that ask for much, so that somebody has to give way."""


def random_requests(rng: random.Random, count: int, vocab: int) -> list[AddRequest]:
    """Greedy ones, and ones that the captured sampling does not cover; beginnings are shared.

    The last six share nothing and ask for much, any two of them for more than the 170 tokens there are: beside each
    other some have to give way, also where chance aborts all that it may.
    """
    shared = [rng.randrange(vocab) for _ in range(40)]
    ways = [{"temperature": 0.0}] * 4 + [
        {"temperature": 0.9, "top_p": 0.9},
        {"temperature": 0.0, "repetition_penalty": 1.2, "presence_penalty": 0.3},
        {"temperature": 0.0, "logit_bias": {7: 2.0}, "min_tokens": 5},
        {"temperature": 0.0, "logprobs": 2},
    ]
    requests = []
    for index in range(count):
        large = index >= count - 6
        beginning = shared[: 0 if large else rng.choice((0, 20, 40))]
        prompt = beginning + [rng.randrange(vocab) for _ in range(rng.randrange(16 if large else 1, 30))]
        answer = 70 if large else rng.choice((5, 12, 70))
        params = SamplingParams(max_tokens=answer, seed=index, ignore_eos=True, **rng.choice(ways))
        requests.append(AddRequest(index, prompt, params, 0, time.monotonic()))
    return requests


def drive(engine: Engine, requests: list[AddRequest], rng: random.Random) -> tuple[dict[int, list[int]], set[int]]:
    """Tokens by request, and which were aborted: arrivals and aborts come as chance has it."""
    core, waiting, aborted = engine.core, list(requests), set()
    tokens: dict[int, list[int]] = {request.request_id: [] for request in requests}
    while waiting or not core.idle:
        deltas = []
        while waiting and rng.random() < 0.7:
            deltas += core.add(waiting.pop(0))
        if rng.random() < 0.05:
            arrived = len(requests) - len(waiting)
            aborted.add(victim := rng.randrange(min(arrived + 1, len(requests) - SPARED)))
            deltas += core.abort([victim])
        for delta in one_by_one(deltas + core.step()):
            tokens[delta.request_id] += delta.tokens
    core.check()
    return tokens, aborted


@pytest.mark.turns("captured traffic")
@pytest.mark.parametrize(
    ("options", "all_kinds"),
    [
        ({"prompt_cache_enable_swap": True, "prompt_cache_swap_gib": 0.01}, True),
        pytest.param({"attn_cls": "paged"}, False, marks=pytest.mark.slow),  # test_mixed_graphs.py has it
        pytest.param({"kv_arena": "relocating", "disable_overlap": True}, False, marks=pytest.mark.slow),
        pytest.param({"prefill_chunk_tokens": 7}, True, marks=pytest.mark.slow),
    ],
)
def test_random_traffic_gives_the_tokens_of_eager_steps(demo_model, monkeypatch, options, all_kinds):
    """Arrivals, aborts, preemption, prefix hits; what padding could leave behind is poisoned before every replay.

    Not with quantized KV: what gave way is computed again in other batches, and a rounding there may flip a code.
    all_kinds: captured steps sample as on a GPU, by what a kernel would read of the slots' state.
    """
    rng = random.Random()
    sizes = {"cuda_graph_batch_sizes": [2, 3, 6], "cuda_graph_prefill_tokens": [0]}
    shape = {"dtype": "float32", "device": "cpu", "max_model_len": 152, "max_running_requests": 8}
    gib = 170 * token_bytes(demo_model) / GIB
    requests, found, preemptions = None, [], 0
    for way in (sizes, {"disable_cuda_graph": True, "kv_cache_gib": 0.1}):
        capture = Again()
        captures_all = all_kinds and way is sizes
        monkeypatch.setattr(build_runner, "SamplingState", KernelState if captures_all else SamplingState)
        args = {"kv_cache_gib": gib} | shape | options | way
        engine = build_engine(EngineArgs(model=str(demo_model), **args), capture)
        requests = requests or random_requests(rng, 16, engine.ready.vocab_size)
        graphs = engine.core._runner._graphs
        assert (graphs is not None) == (way is sizes)
        if graphs is not None:
            poison(capture, graphs)
            assert isinstance(graphs.sampling, KernelSampling if all_kinds else GreedySampling)
        found.append(drive(engine, requests, rng))
        preemptions += engine.core.stats(time.monotonic()).preemptions
        assert (capture.replays > 50) == (graphs is not None)
        engine.core.close()
    assert preemptions > 0
    assert_same(reference.load(demo_model)[0], requests, *found)


def assert_same(model, requests: list[AddRequest], *found: tuple[dict[int, list[int]], set[int]]) -> None:
    """Of aborted requests, which end somewhere, as far as both go. model: transformers' own."""
    (tokens, aborted), (expected, missing) = found
    for request in requests:
        one, other = tokens[request.request_id], expected[request.request_id]
        assert_alike(model, request.prompt, request.params, one, other)
        assert len(one) == len(other) or request.request_id in aborted | missing


def poison(capture: Again, graphs: StepGraphs) -> None:
    """Before a replay the padding slot holds any token, and the sampled tokens of the last step none; before a forward
    pass, the logits are NaN, and the arrays were far outside of everything until they were sent or else advanced."""
    send, upload = graphs.inputs.send, graphs.inputs._upload

    def before() -> None:
        graphs._last_token[-1] = random.randrange(graphs.sampling.logits.shape[1])
        graphs.sampling.tokens.fill_(-7)

    def poisoned_send(plan, size, adapters=None) -> None:
        graphs.sampling.logits.fill_(torch.nan)
        send(plan, size, adapters)

    def poisoned_upload(plan, size, adapters) -> None:
        graphs.inputs._static.fill_(2**40)
        upload(plan, size, adapters)

    capture.before, graphs.inputs.send, graphs.inputs._upload = before, poisoned_send, poisoned_upload


def test_captured_and_eager_steps_take_turns(demo_model):
    """Few slots and short steps: mixed steps are eager, and hand their tokens to captured ones and back."""
    options = {"max_running_requests": 3, "ragged_flash_max_batch_tokens": 16, "cuda_graph_batch_sizes": [2]}
    with captured_llm(
        str(demo_model), capture := Again(), dtype="float32", device="cpu", kv_cache_gib=0.1, **options
    ) as llm:
        places = sampled_from(llm._engine.core._runner)
        outputs = llm.generate(PROMPTS[:7], greedy_params())
        assert 0 < capture.replays < 2 * llm.stats().steps
        memory = llm._engine.core._runner._graphs.sampling.logits
    assert places
    assert set(places) == {(memory.data_ptr(), memory.dtype)}, "an eager step has logits of its own"
    assert_equal(demo_model, PROMPTS[:7], [output.outputs[0].token_ids for output in outputs])


def sampled_from(runner: ModelRunner) -> list[tuple[int, torch.dtype]]:
    """Where the logits of eager steps lie, one by one."""
    places: list[tuple[int, torch.dtype]] = []
    sample = runner._sample

    def note(logits, step, masks) -> None:
        if len(logits):
            places.append((logits.data_ptr(), logits.dtype))
        sample(logits, step, masks)

    runner._sample = note
    return places
