"""Scales of an fp8 KV cache against the cache transformers fills."""

import json
from pathlib import Path

import pytest
import torch
import transformers

from bladellm_tools.quantize.job import Progress
from bladellm_tools.quantize.pipeline.forward import KEYS, VALUES
from bladellm_tools.quantize.pipeline.kv_scales import KvRange, kv_scale_tensors
from bladellm_tools.quantize.pipeline.run import quantize_model
from tests.quantize.jobs import CPU, W4, job_of, save_model, tensors_of
from tests.support.cases import some_pairs


def test_the_largest_of_all_ranges_counts():
    one, other = KvRange(), KvRange()
    one(KEYS, torch.tensor([[1.0, -7.0]]))
    one(KEYS, torch.tensor([[3.0, 2.0]]))
    other(KEYS, torch.tensor([[-8.96, 0.0]]))
    for each in (one, other):
        each(VALUES, torch.zeros(2, 2))
        each("qkv", torch.full((2, 2), 1e9))
    scales = kv_scale_tensors([one, other])
    assert {name: scale.tolist() for name, scale in scales.items()} == {
        "self_attn.k_scale": [pytest.approx(0.02)],
        "self_attn.v_scale": [1.0],
    }


@pytest.mark.parametrize(("algorithm", "devices"), some_pairs(["minmax", "awq"], [1, 2]))
def test_scales_are_of_what_the_quantized_model_caches(algorithm, devices, tmp_path):
    """AWQ's smoothing divides the values: the scales are those after it."""
    save_model(tmp_path / "model", "qwen3")
    job = job_of(tmp_path / "model", tmp_path / "out", algorithm, kv_scales=True, scheme=W4, devices=(CPU,) * devices)
    quantize_model(job, Progress())
    keep_cache_in_floating_point(tmp_path / "out" / "config.json")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
    with torch.no_grad():
        cache = loaded(job.windows, use_cache=True).past_key_values
    tensors = tensors_of(tmp_path / "out")
    for index, layer in enumerate(cache.layers):
        for name, states in (("k", layer.keys), ("v", layer.values)):
            scale = tensors[f"model.layers.{index}.self_attn.{name}_scale"]
            assert scale.shape == (1,)
            assert float(scale) * 448 == pytest.approx(float(states.abs().max()), rel=1e-3)


def keep_cache_in_floating_point(path: Path) -> None:
    """transformers would round what it caches to fp8: by 1/14 at the largest, and later layers see it."""
    config = json.loads(path.read_text())
    assert config["quantization_config"].pop("kv_cache_scheme")["num_bits"] == 8
    path.write_text(json.dumps(config))


def test_no_scales_unless_asked_for(tmp_path):
    save_model(tmp_path / "model")
    quantize_model(job_of(tmp_path / "model", tmp_path / "out"), Progress())
    assert not [key for key in tensors_of(tmp_path / "out") if "_scale" in key.removesuffix("weight_scale")]
