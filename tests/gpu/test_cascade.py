"""Captured decode steps that read shared beginnings once, on the device: logits and tokens of those that do not."""

import random

import pytest

from bladellm_runtime import LLM, SamplingParams
from bladellm_runtime.engine import cascade
from tests.engine.cascade_support import BothReads

pytestmark = pytest.mark.gpu

WAYS = {
    "ragged": {},
    "paged": {"attn_cls": "paged"},
    "no overlap": {"disable_overlap": True, "attn_cls": "paged"},
    "int8, paged": {"kv_cache_quant": "int8", "attn_cls": "paged"},
    "int4 affine, paged": {"kv_cache_quant": "int4_affine", "attn_cls": "paged"},
    "fp8 e4m3, paged": {"kv_cache_quant": "fp8_e4m3", "attn_cls": "paged"},
}
SIZES = {"cuda_graph_batch_sizes": [1, 4, 8, 13], "max_running_requests": 16}


@pytest.fixture
def always(monkeypatch):
    """Whatever is shared is read once."""
    for name, value in {"LEAST_ROWS": 2, "SIZE_STEP": 1, "STEP_BYTES": 1, "GROUP_BYTES": 1}.items():
        monkeypatch.setattr(cascade, name, value)


def prompts(shared: int) -> list[list[int]]:
    """Two system prompts of `shared` tokens and more, and prompts of their own."""
    systems = [[random.randrange(3, 500) for _ in range(length)] for length in (shared, shared + shared // 2, 0)]
    return [
        systems[index % 3] + [random.randrange(3, 500) for _ in range(random.randint(1, 90))] for index in range(13)
    ]


def run(model, texts, dtype, **options):
    """Tokens, and the two readings' logits where there are some. Twice, the second time with all of it cached."""
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    with LLM(str(model), device="cuda", dtype=dtype, kv_cache_gib=1.0, **options) as llm:
        both = None if "disable_cuda_graph" in options else BothReads.watch(llm._engine)
        outputs = llm.generate(texts, params) + llm.generate(texts, params)
        return [output.outputs[0].token_ids for output in outputs], both


@pytest.mark.parametrize("way", WAYS)
def test_shared_reads_change_no_token(demo_model, always, way, caplog):
    """In float32; of quantized KV a code may be rounded the other way, and with it a token change later on."""
    options = WAYS[way]
    # A mapped granule of so small a model is 1,024 tokens in float32.
    texts = prompts(128 if "attn_cls" in options else 1100)
    found, both = run(demo_model, texts, "float32", **SIZES, **options)
    assert "cannot be captured" not in caplog.text
    differences = both.differences()
    quantized = "kv_cache_quant" in options
    assert differences[:: max(1, len(differences) // 10**6)].quantile(0.9 if quantized else 1.0) < 1e-4
    expected, _ = run(demo_model, texts, "float32", disable_cuda_graph=True, max_running_requests=16, **options)
    same = sum(one == other for one, other in zip(found, expected, strict=True))
    assert same >= (0.6 if quantized else 1.0) * len(found)


@pytest.mark.parametrize("format", ["no_quant", "int8"])
def test_logits_in_bf16_are_close(demo_model, always, format):
    _, both = run(demo_model, prompts(256), "bfloat16", **SIZES, attn_cls="paged", kv_cache_quant=format)
    assert len(both.logits) > 20
    assert both.differences().mean() < 0.005
    assert both.differences().max() < 0.1


def test_default_sizes_are_captured_beside_the_others(demo_model):
    """Eight of them, as few rows are left alone."""
    with LLM(str(demo_model), device="cuda", dtype="bfloat16", kv_cache_gib=0.5, max_running_requests=256,
             cuda_graph_max_batch_size=256) as llm:  # fmt: skip
        graphs = llm._engine.core._runner._graphs
        assert sorted(graphs._cascades) == list(range(32, 257, 32))
        assert graphs.shared_rows == 256
