"""CUDA graphs on the device: the tokens of eager steps, close logits in bf16, and nothing launched in between."""

import logging
from dataclasses import replace
from functools import partial

import pytest
import torch
from bladellm_kernels import decode_schedule

from bladellm_runtime import LLM, SamplingParams
from bladellm_runtime.engine import build_runner
from bladellm_runtime.models.decoder import Decoder
from tests.engine import reference
from tests.engine.test_equality import assert_equal, greedy_params
from tests.models.harness import random_prompt, save_tiny

pytestmark = pytest.mark.gpu

PROMPTS = [reference.PROMPTS[i % len(reference.PROMPTS)] for i in range(13)]
GREEDY = greedy_params()
SIZES = {"cuda_graph_batch_sizes": [1, 2, 5, 9], "max_running_requests": 11}
WAYS = {
    "ragged": {},
    "no overlap": {"disable_overlap": True},
    "relocating": {"kv_arena": "relocating"},
    "paged": {"attn_cls": "paged"},
    "int8": {"kv_cache_quant": "int8"},
    "int4": {"kv_cache_quant": "int4"},
    "int8 affine, paged": {"kv_cache_quant": "int8_affine", "attn_cls": "paged"},
    "int4 affine, chunks": {"kv_cache_quant": "int4_affine", "prefill_chunk_tokens": 7},
    "fp8 e4m3": {"kv_cache_quant": "fp8_e4m3"},
    "fp8 e5m2": {"kv_cache_quant": "fp8_e5m2"},
    "fp12 e4m7": {"kv_cache_quant": "fp12_e4m7"},
    "first layer known": {"precompute_first_layer": True},
}


def tokens_of(model, **options) -> list[list[int]]:
    """Twice, the second time with prompts from the cache."""
    with LLM(str(model), device="cuda", dtype="float32", kv_cache_gib=0.5, **options) as llm:
        graphs = llm._engine.core._runner._graphs
        assert (graphs is None) == ("disable_cuda_graph" in options)
        outputs = llm.generate(PROMPTS, GREEDY) + llm.generate(PROMPTS, GREEDY)
        return [output.outputs[0].token_ids for output in outputs]


@pytest.mark.parametrize("way", WAYS)
def test_graphs_change_no_token(demo_model, way, caplog):
    options = WAYS[way]
    with caplog.at_level(logging.WARNING):
        found = tokens_of(demo_model, **SIZES, **options)
    assert "cannot be captured" not in caplog.text
    assert found == tokens_of(demo_model, disable_cuda_graph=True, max_running_requests=11, **options)
    if "kv_cache_quant" not in options:
        assert_equal(demo_model, PROMPTS * 2, found)


@pytest.mark.parametrize("names", [["greedy"], ["random"], ["greedy", "random", "penalised", "biased", "scored"]])
def test_captured_and_eager_sampling_mix(demo_model, names):
    kinds = {
        "greedy": GREEDY,
        "random": SamplingParams(temperature=0.8, top_p=0.9, seed=3, max_tokens=40, ignore_eos=True),
        "penalised": SamplingParams(temperature=0.0, repetition_penalty=1.2, max_tokens=30, ignore_eos=True),
        "biased": SamplingParams(temperature=0.0, logit_bias={7: 4.0}, max_tokens=20, min_tokens=9),
        "scored": SamplingParams(temperature=0.0, logprobs=3, max_tokens=50, ignore_eos=True),
    }
    params = [kinds[names[index % len(names)]] for index in range(len(PROMPTS))]
    found = []
    for options in (SIZES, {"disable_cuda_graph": True, "max_running_requests": 11}):
        with LLM(str(demo_model), device="cuda", dtype="float32", kv_cache_gib=0.5, **options) as llm:
            found.append([output.outputs[0].token_ids for output in llm.generate(PROMPTS, params)])
    assert found[0] == found[1]


@pytest.mark.parametrize("fused", [True, False])
def test_logits_in_bf16_are_close(demo_model, fused, monkeypatch):
    """Captured steps, fused where the GPU has kernels for it or never, are as near to float32 as eager ones of
    operators apart.

    Log-probabilities of the same tokens, up to the first that differs, where two are nearly equal.
    """
    hopper = torch.cuda.get_device_capability()[0] == 9
    params = SamplingParams(temperature=0.0, logprobs=1, max_tokens=48, ignore_eos=True)
    captured = SIZES | {"packed_weights": "off"}  # with packed weights norms are apart
    apart = {"disable_cuda_graph": True, "max_running_requests": 11}
    found = []
    for dtype, options in (("bfloat16", captured), ("bfloat16", apart), ("float32", apart)):
        if options is apart or not fused:
            monkeypatch.setattr(Decoder, "fuses", lambda *_: False)
        with LLM(str(demo_model), device="cuda", dtype=dtype, kv_cache_gib=0.5, **options) as llm:
            assert llm._engine.core._runner._model.fuses(9) == (hopper and fused and options is captured)
            found.append([output.outputs[0] for output in llm.generate(PROMPTS, params)])
    graphs, eager = (differences(outputs, found[2]) for outputs in found[:2])
    assert graphs.square().mean() < 1.5 * eager.square().mean()
    assert graphs.max() < 2 * eager.max()


def differences(outputs, expected) -> torch.Tensor:
    """How far the log-probabilities of tokens are apart, up to the first token of each sequence that differs."""
    found = []
    for one, other in zip(outputs, expected, strict=True):
        for place, (entry, wanted) in enumerate(zip(one.logprobs, other.logprobs, strict=True)):
            if one.token_ids[place] != other.token_ids[place]:
                break
            found.append(abs(entry.logprobs[0] - wanted.logprobs[0]))
    assert len(found) > 24 * len(outputs)
    return torch.tensor(found)


@pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability()[0] != 9, reason="only Hoppers have such kernels"
)
@pytest.mark.timeout(400)  # compiles the kernels of a shape of its own
@pytest.mark.parametrize("name", ["int8", "fp8_e4m3"])
def test_steps_of_long_contexts_have_a_graph_of_their_own(demo_model, name, monkeypatch, tmp_path):
    """Steps count as long from few tokens on here: where programs take two KV heads they give what one each gives."""
    sizes = {"hidden_size": 1024, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64}
    save_tiny(tmp_path, "llama", **sizes, vocab_size=8192, max_position_embeddings=4096)
    prompts = [random_prompt(length) for length in (700, 41, 333)]
    params = SamplingParams(temperature=0.0, logprobs=1, max_tokens=6, ignore_eos=True)
    options = {"dtype": "bfloat16", "kv_cache_quant": name, "kv_cache_gib": 0.5, "tokenizer_dir": str(demo_model)}
    found, replayed = [], []
    monkeypatch.setattr(decode_schedule, "_LONG_EACH", 0)
    for most in (200, 1 << 17):
        monkeypatch.setattr(build_runner, "short_tokens", lambda kv_heads, ranks, most=most: most)
        with LLM(str(tmp_path), device="cuda", cuda_graph_batch_sizes=[1, 4], **options) as llm:
            graphs = llm._engine.core._runner._graphs._graphs
            assert graphs[4].long is not graphs[4].forward
            for size, graph in graphs.items():
                count = partial(replayed.append, (size, most))
                graphs[size] = replace(graph, long=partial(both, count, graph.long))
            found.append([output.outputs[0] for output in llm.generate(prompts, params)])
    assert set(replayed) == {(4, 200)}
    for one, other in zip(*found, strict=True):
        assert one.logprobs[0].logprobs == pytest.approx(other.logprobs[0].logprobs, abs=1e-5), "of the prompt"
        if one.token_ids[0] == other.token_ids[0]:
            assert one.logprobs[1].logprobs == pytest.approx(other.logprobs[1].logprobs, abs=0.3), "of the step"


def both(first, second) -> None:
    first()
    second()


@pytest.mark.whole_gpu
def test_default_graphs_share_their_memory(demo_model):
    """36 batch sizes, captured before ready, take little more than the largest one's logits, by what the whole GPU has
    in use."""
    options = {"device": "cuda", "dtype": "bfloat16", "kv_cache_gib": 0.5}
    used = []
    for disabled in (True, False):
        with LLM(str(demo_model), disable_cuda_graph=disabled, **options) as llm:
            torch.cuda.empty_cache()
            free, total = torch.cuda.mem_get_info()
            used.append(total - free)
            assert [name for name, _ in llm.ready.phases if "graphs" in name]
    assert used[1] - used[0] < 1 << 30
