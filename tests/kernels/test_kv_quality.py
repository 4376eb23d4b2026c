"""The recipe that measures KV formats: what its cache does to attention, and its table on the small model."""

import importlib
import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from bladellm_kernels.kv_format import KV_FORMATS
from transformers import LlamaConfig, LlamaForCausalLM

from bladellm_runtime.errors import ConfigError
from tests.evaluate.texts import random_text
from tests.support.warm import ROOT, run_script

NO_QUANT = KV_FORMATS["no_quant"]


@pytest.fixture
def recipe(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "recipes"))
    return importlib.import_module("kv_quality")


@pytest.fixture
def model() -> LlamaForCausalLM:
    """Random, its scores large enough for attention to be uneven."""
    config = LlamaConfig(
        vocab_size=300, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, initializer_range=0.2,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def test_nothing_changes_where_nothing_is_rounded(recipe, model):
    """Rotated there and back, raised and lowered, the cache holds the keys it was given."""
    ids = torch.randint(0, 300, (40,))
    with torch.inference_mode():
        expected = model(ids[None], use_cache=False).logits[0].log_softmax(-1)
    channels = recipe.outlier_channels(32, 3, 16.0, 0)
    for options in ({}, {"rotate": True}, {"channels": channels}, {"rotate": True, "channels": channels}):
        actual = recipe.log_probabilities(model, ids, recipe.Variant(NO_QUANT, **options))
        torch.testing.assert_close(actual, expected, atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("name", ["int8", "int4", "fp8_e4m3"])
def test_a_window_at_once_is_its_tokens_one_by_one(recipe, model, name):
    """Every token sees the rounded keys and values of those before it and its own, as when decoding.

    In float64, so that what is rounded is the same in both.
    """
    model = model.double()
    ids = torch.randint(0, 300, (12,))
    variant = recipe.Variant(KV_FORMATS[name])
    at_once = recipe.log_probabilities(model, ids, variant)
    cache = recipe.RoundedCache(model.config, variant)
    with torch.inference_mode():
        single = [model(token.view(1, 1), past_key_values=cache, use_cache=True).logits[0, 0] for token in ids]
    torch.testing.assert_close(torch.stack(single).float().log_softmax(-1), at_once, atol=1e-4, rtol=1e-4)
    plain = recipe.log_probabilities(model, ids, recipe.Variant(NO_QUANT))
    assert (plain - at_once).abs().max() > 1e-3


def test_fewer_bits_cost_more_and_rotation_helps_outliers(recipe, model):
    channels = recipe.outlier_channels(32, 2, 32.0, 0)
    variants = [recipe.Variant(KV_FORMATS[name]) for name in ("no_quant", "int8", "int4")]
    variants += [replace(variants[2], channels=channels), replace(variants[2], channels=channels, rotate=True)]
    scores = recipe.measure(model, torch.randint(0, 300, (3, 50)), variants)
    same, int8, int4, raised, rotated = (float(score.pair.kl.mean()) for score in scores)
    assert same < 1e-9
    assert 0 < int8 < int4 / 4
    assert rotated < raised
    assert all(torch.equal(score.pair.losses, scores[0].losses) for score in scores)
    assert scores[2].losses.shape == (3,)
    assert scores[2].pair.kl.shape == (3, 49)


def test_losses_are_those_of_transformers(recipe, model):
    windows = torch.randint(0, 300, (2, 20))
    (scores,) = recipe.measure(model, windows, [recipe.Variant(NO_QUANT)])
    with torch.inference_mode():
        expected = [model(window[None], labels=window[None]).loss.double() for window in windows]
    torch.testing.assert_close(scores.losses, torch.stack(expected), atol=1e-4, rtol=1e-4)


def test_too_many_outliers_are_refused(recipe):
    with pytest.raises(ConfigError, match="--outliers 17 must be from 1 to 16"):
        recipe.outlier_channels(32, 17, 16.0, 0)


@pytest.mark.turns("recipes")
def test_the_table_of_a_model_folder(demo_model, tmp_path, device):
    text = tmp_path / "text.txt"
    text.write_text(random_text(400))
    flags = ["--data", text, "--window", "48", "--max_windows", "2", "--format", "int8", "int4"]
    flags += ["--device", device, "--json", tmp_path / "kv.json"]
    done = run_script(ROOT / "recipes" / "kv_quality.py", demo_model, *flags)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [row.split(" | ")[0] for row in lines[2:]] == ["| no_quant", "| int8", "| int4", "| int4 rotated"]
    found = json.loads((tmp_path / "kv.json").read_text())
    assert [row["format"] for row in found["rows"]] == ["int8", "int4", "int4 rotated"]
    assert all(row["targets"] == 96 for row in found["rows"])
    int8, int4, _ = (row["baseline"]["kl_mean"]["value"] for row in found["rows"])
    assert 0 < int8 < int4
