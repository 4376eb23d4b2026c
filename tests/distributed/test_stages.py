"""Stages of a pipeline, captured or not, give the tokens of a model in one piece."""

import random
import time

import pytest
import torch

from bladellm_runtime.config import EngineArgs
from bladellm_runtime.engine.build import build_engine
from bladellm_runtime.models.config import read_model_spec
from bladellm_runtime.models.decoder import Decoder
from bladellm_runtime.models.parallel import TensorParallel, make_plan
from bladellm_runtime.models.weights import weight_table
from bladellm_runtime.request import SamplingParams
from bladellm_runtime.wire.messages import AddRequest, one_by_one
from tests.distributed.stages import build_stages, run_requests
from tests.engine.captured import Again
from tests.engine.ties import assert_alike
from tests.models.harness import VOCAB, random_prompt, save_tiny
from tests.models.quantized import SCHEMES, Tiny, plan
from tests.support.cases import sample_of

CASES = {
    "llama": ("llama", {"num_hidden_layers": 5}),
    "llama-tied": ("llama", {"tie_word_embeddings": True, "num_hidden_layers": 4}),
    "qwen2-windows": ("qwen2", {"num_hidden_layers": 5, "use_sliding_window": True, "sliding_window": 9,
                                "max_window_layers": 2}),
    "qwen3-tied": ("qwen3", {"head_dim": 16, "tie_word_embeddings": True}),
}  # fmt: skip
GRAPHS = {"cuda_graph_batch_sizes": [4, 9, 24], "cuda_graph_prefill_tokens": [8, 32, 64]}
EAGER = {"disable_cuda_graph": True}
EVERY = [(case, stages, graphs) for case in CASES for stages in (2, 3) for graphs in (True, False)]
SAMPLE = {("llama-tied", 2, False), *sample_of([("llama", 3, True), ("qwen2-windows", 2, True)], 1)}


def ways(count: int) -> list[SamplingParams]:
    """Greedy, random and penalised, in turn."""
    some = [
        {"temperature": 0.0},
        {"temperature": 1.0, "seed": random.getrandbits(40), "top_k": 20},
        {"temperature": 0.7, "seed": random.getrandbits(40), "repetition_penalty": 1.3, "min_tokens": 3},
    ]
    lengths = [random.randint(3, 20) for _ in range(count)]
    return [SamplingParams(max_tokens=most, ignore_eos=True, **some[at % 3]) for at, most in enumerate(lengths)]


def one_engine(folder, **options):
    options = {"dtype": "float32", "device": "cpu", "kv_cache_gib": 0.05, "max_running_requests": 24} | options
    return build_engine(EngineArgs(model=str(folder), **options))


def assert_same(folder, model, stages, graphs=False, **options):
    """model: transformers' own."""
    prompts = [random_prompt(length) for length in (1, 30, 7, 19, 64, 2, 11, 23)]
    prompts += [prompts[4][:40] + random_prompt(5), prompts[1]]
    asked = ways(len(prompts))
    engine = build_stages(folder, stages, Again if graphs else None, **(GRAPHS if graphs else EAGER), **options)
    found = [run_requests(engine, prompts, asked) for _ in range(2)]
    most = engine.core._runner.most
    engine.core.close()
    alone = one_engine(folder)
    for tokens in found:
        assert_all_alike(model, prompts, asked, tokens, run_requests(alone, prompts, asked))
    alone.core.close()
    return most


def assert_all_alike(model, prompts, asked, found, expected):
    for prompt, params, one, other in zip(prompts, asked, found, expected, strict=True):
        assert len(one) == len(other) == params.max_tokens
        assert_alike(model, prompt, params, one, other)


@pytest.mark.parametrize(
    ("case", "stages", "graphs"),
    [case if case in SAMPLE else pytest.param(*case, marks=pytest.mark.slow) for case in EVERY],
)
def test_tokens_are_those_of_one_stage(case, stages, graphs, tmp_path):
    model = save_tiny(tmp_path, CASES[case][0], **CASES[case][1])
    assert assert_same(tmp_path, model, stages, graphs, ragged_flash_max_batch_tokens=48) == stages + 1


@pytest.mark.parametrize(
    ("options", "most"),
    [
        pytest.param({"disable_overlap": True}, 2, marks=pytest.mark.slow),
        pytest.param({"pipeline_micro_batch": 1}, 2, marks=pytest.mark.slow),
        ({"pipeline_micro_batch": 5, "prefill_chunk_tokens": 5}, 6),
    ],
)
def test_micro_batches(options, most, tmp_path):
    model = save_tiny(tmp_path, "llama")
    assert assert_same(tmp_path, model, 2, **options) == most


@pytest.mark.parametrize("graphs", [pytest.param(True, marks=pytest.mark.slow), False])
def test_quantized_layers(graphs, tmp_path):
    tiny = Tiny(tmp_path, plan("compressed-tensors", SCHEMES["w4 g16 asymmetric"], ()), "qwen2", num_hidden_layers=4)
    assert_same(tmp_path, tiny.reference, 2, graphs)


@pytest.mark.parametrize("graphs", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_the_first_stage_looks_its_first_layer_up(graphs, tmp_path):
    model = save_tiny(tmp_path, "qwen2", num_hidden_layers=3)
    assert_same(tmp_path, model, 2, graphs, precompute_first_layer=True)


def test_stages_give_way_alike_when_the_cache_is_full(tmp_path):
    """Uneven stages have room for the same tokens, whatever their layers take."""
    model = save_tiny(tmp_path, "llama", num_hidden_layers=5)
    prompts = [random_prompt(20) for _ in range(7)]
    asked = [SamplingParams(max_tokens=110, ignore_eos=True, temperature=0.0)] * 7
    engine = build_stages(tmp_path, 3, **EAGER, kv_cache_gib=1e-4, max_model_len=140)
    found = run_requests(engine, prompts, asked)
    assert engine.core.stats(0.0).preemptions > 0
    engine.core.close()
    alone = one_engine(tmp_path)
    assert_all_alike(model, prompts, asked, found, run_requests(alone, prompts, asked))
    alone.core.close()


def test_stages_hold_the_model_between_them(tmp_path):
    """Every parameter once, but for a tied embedding, which first and last stage both need."""
    for tied in (False, True):
        save_tiny(tmp_path / str(tied), "llama", tie_word_embeddings=tied, num_hidden_layers=7)
        spec = read_model_spec(tmp_path / str(tied))
        made = make_plan(tmp_path / str(tied), 1, 3)
        tables = [TensorParallel(made, None, stage).table(spec) for stage in range(3)]
        held = sorted(part.key for table in tables for parts in table.values() for part in parts)
        whole = [part.key for parts in weight_table(spec).values() for part in parts]
        assert held == sorted(whole + ["model.embed_tokens.weight"] * tied)
        layers = [len({name.split(".")[1] for name in table if name.startswith("layers")}) for table in tables]
        assert layers == [len(stage) for stage in made.stages]
        assert sum(layers) == 7


def test_logits_that_are_not_finite_end_one_request(tmp_path):
    save_tiny(tmp_path, "llama")
    engine = build_stages(tmp_path, 2, **EAGER)
    first = engine.core._runner._runners[0]._model.embedding
    assert first is not None
    first.weight[VOCAB - 1] = torch.nan
    # A random model may answer with any token, and with this one the other request's logits would be no numbers either.
    never = {VOCAB - 1: -100.0}
    greedy = SamplingParams(max_tokens=9, ignore_eos=True, temperature=0.0, logit_bias=never)
    engine.core.add(AddRequest(1, [5, VOCAB - 1], greedy, 0, 0.0))
    engine.core.add(AddRequest(2, [5, 6], greedy, 0, 0.0))
    errors, tokens = {}, []
    while not engine.core.idle:
        for delta in one_by_one(engine.core.step()):
            errors[delta.request_id] = delta.error
            tokens += delta.tokens if delta.request_id == 2 else []
    assert errors == {1: "invalid_logits", 2: None}
    assert len(tokens) == 9
    engine.core.close()


def test_all_stages_work_at_a_time(tmp_path, monkeypatch):
    """Steps of different micro-batches side by side; of one, one stage after the other."""
    save_tiny(tmp_path, "llama")
    prompts, way = [random_prompt(5) for _ in range(6)], SamplingParams(max_tokens=12, ignore_eos=True, temperature=0.0)
    working: list[int] = []
    found: list[int] = []
    decode = Decoder.decode

    def slow(self, batch, out=None):
        working.append(0)
        found.append(len(working))
        time.sleep(0.004)
        working.pop()
        return decode(self, batch, out)

    most = []
    for groups in (3, 1):
        engine = build_stages(tmp_path, 3, pipeline_micro_batch=groups, **EAGER)
        found.clear()
        with monkeypatch.context() as patch:
            patch.setattr(Decoder, "decode", slow)
            run_requests(engine, prompts, [way] * 6)
        engine.core.close()
        most.append(max(found))
    assert most == [3, 1]
