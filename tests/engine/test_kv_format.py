"""Which KV format an engine takes, what it falls back to, and what it refuses."""

import logging

import pytest
import torch
from bladellm_kernels.kv_format import KV_FORMATS, NO_QUANT

from bladellm_runtime import LLM
from bladellm_runtime.config import EngineArgs
from bladellm_runtime.engine.kv_format import format_problem, key_rotation, pick_kv_format
from bladellm_runtime.errors import ConfigError
from bladellm_runtime.models.config import read_model_spec

CPU = torch.device("cpu")
QUANTIZED = [name for name in KV_FORMATS if name != NO_QUANT.name]


@pytest.mark.parametrize("name", KV_FORMATS)
def test_a_cpu_and_a_recent_gpu_take_every_format(name, demo_model):
    args = EngineArgs(model=str(demo_model), kv_cache_quant=name)
    assert pick_kv_format(args, read_model_spec(demo_model), CPU) is KV_FORMATS[name]
    assert format_problem(KV_FORMATS[name], 128, (9, 0)) is None


@pytest.mark.parametrize("name", QUANTIZED)
def test_what_an_older_gpu_cannot_run_it_says(name):
    problem = format_problem(KV_FORMATS[name], 128, (8, 0))
    assert (problem is not None) == name.startswith("fp8")
    if problem:
        assert "8.9" in problem
        assert "8.0" in problem


def test_an_odd_head_keeps_its_numbers_with_a_warning(demo_model, monkeypatch, caplog):
    spec = read_model_spec(demo_model)
    monkeypatch.setattr(
        "bladellm_runtime.engine.kv_format.format_problem", lambda *_: "needs heads of even size, not 5"
    )
    with caplog.at_level(logging.WARNING):
        assert pick_kv_format(EngineArgs(model="m", kv_cache_quant="int4"), spec, CPU) is NO_QUANT
    assert "--kv_cache_quant int4 needs heads of even size, not 5" in caplog.text
    assert "even size" in str(format_problem(KV_FORMATS["int4"], 5, None))


@pytest.mark.parametrize("name", ["mix_f852i4", "mix_f843i4", "mix_i8i4", "mix_i4i4"])
def test_formats_that_mix_are_refused_with_what_to_use(name):
    with pytest.raises(ConfigError, match=rf"--kv_cache_quant {name} is not supported; use .*int4"):
        EngineArgs(model="m", kv_cache_quant=name)


@pytest.mark.parametrize("name", KV_FORMATS)
@pytest.mark.parametrize("asked", ["auto", "on", "off"])
def test_keys_are_rotated_by_default_in_four_bits(name, asked):
    args = EngineArgs(model="m", kv_cache_quant=name, kv_cache_hadamard=asked)
    if name == "no_quant" and asked == "on":
        with pytest.raises(ConfigError, match="--kv_cache_quant"):
            key_rotation(args, KV_FORMATS[name], 64, torch.float32, CPU)
        return
    matrix = key_rotation(args, KV_FORMATS[name], 64, torch.float32, CPU)
    wanted = name != "no_quant" and (asked == "on" or (asked == "auto" and "int4" in name))
    assert (matrix is not None) == wanted
    if matrix is not None:
        torch.testing.assert_close(matrix @ matrix.T, 64 * torch.eye(64))


def test_a_head_without_a_matrix_is_an_error_only_if_it_was_asked_for():
    asked = EngineArgs(model="m", kv_cache_quant="int4", kv_cache_hadamard="on")
    with pytest.raises(ConfigError, match=r"--kv_cache_hadamard on.*14"):
        key_rotation(asked, KV_FORMATS["int4"], 14, torch.float32, CPU)
    auto = EngineArgs(model="m", kv_cache_quant="int4")
    assert key_rotation(auto, KV_FORMATS["int4"], 14, torch.float32, CPU) is None


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, ["no_quant;", "prompt cache"]),
        ({"kv_cache_quant": "int4"}, ["int4, rotated keys"]),
        ({"attn_cls": "paged", "disable_prompt_cache": True}, ["paged,", "no prompt cache"]),
        ({"kv_arena": "relocating"}, ["relocating,", "no prompt cache"]),
        ({"prompt_cache_enable_swap": True, "prompt_cache_swap_gib": 0.01}, ["prompt cache with swap"]),
    ],
)
def test_the_engine_says_what_its_kv_cache_is(demo_model, options, words):
    with LLM(str(demo_model), device="cpu", kv_cache_gib=0.05, **options) as llm:
        assert all(word in llm.ready.kv_cache for word in words), llm.ready.kv_cache
