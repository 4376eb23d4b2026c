"""The variant with outliers computes the same, and is what it is for: too much for int8 activations."""

import importlib
import json

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from bladellm_runtime.errors import CheckpointError, ConfigError
from tests.evaluate.texts import random_text
from tests.models.harness import CONFIGS, VOCAB, save_tiny
from tests.support.cases import some_pairs
from tests.tools.command import ROOT


@pytest.fixture
def recipe(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "recipes" / "quantize"))
    return importlib.import_module("make_outliers")


def float_model(folder):
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@torch.no_grad()
def inputs_of(model, ids, name) -> list[torch.Tensor]:
    """What the linear layers of a name read, [tokens, width] each."""
    seen = []
    hooks = [
        module.register_forward_pre_hook(lambda _, given: seen.append(given[0].flatten(0, -2)))
        for path, module in model.named_modules()
        if path.endswith(name)
    ]
    model(ids)
    for hook in hooks:
        hook.remove()
    return seen


READERS = {"norms": ("q_proj", "k_proj", "gate_proj", "up_proj"), "values": ("o_proj",), "inner": ("down_proj",)}


PLACES = [["norms"], ["values"], ["inner"], ["norms", "values", "inner"]]


@pytest.mark.parametrize(("family", "places"), some_pairs(CONFIGS, PLACES), ids=str)
def test_the_variant_computes_the_same_with_larger_inputs(recipe, family, places, tmp_path) -> None:
    save_tiny(tmp_path / "model", family, max_shard_size="20KB")
    recipe.run(
        [str(tmp_path / "model"), str(tmp_path / "out"), "--channels", "5", "--factor", "32", "--places", *places]
    )
    before, after = float_model(tmp_path / "model"), float_model(tmp_path / "out")
    ids = torch.randint(0, VOCAB, (2, 19))
    with torch.no_grad():
        torch.testing.assert_close(after(ids).logits, before(ids).logits, rtol=1e-6, atol=1e-5)
    for place, names in READERS.items():
        for name in names:
            pairs = zip(inputs_of(after, ids, name), inputs_of(before, ids, name), strict=True)
            ratios = [(one / other).median(0).values for one, other in pairs]
            raised = 5 * (3 if place == "values" else 1) if place in places else 0  # 3 query heads read a value head
            assert len(ratios) == 3
            for ratio in ratios:
                torch.testing.assert_close(ratio.sort().values[: len(ratio) - raised], torch.ones(len(ratio) - raised))
                torch.testing.assert_close(ratio.sort().values[len(ratio) - raised :], torch.full((raised,), 32.0))


def test_bf16_weights_stay_exact_and_other_files_as_they_are(recipe, demo_model, tmp_path) -> None:
    out = tmp_path / "out"
    recipe.run([str(demo_model), str(out), "--places", "norms", "values", "inner"])
    before, after = (load_file(folder / "model.safetensors") for folder in (demo_model, out))
    assert before.keys() == after.keys()
    changed = 0
    for key, tensor in before.items():
        ratio = (after[key].double() / tensor.double()).nan_to_num(1.0)
        assert set(ratio.unique().tolist()) <= {1 / 64, 1.0, 64.0}, key
        assert after[key].dtype == tensor.dtype
        changed += bool((ratio != 1).any())
    assert changed == 4 * 9, "two norms and seven matrices of four layers"
    for path in demo_model.iterdir():
        if path.suffix != ".safetensors":
            assert (out / path.name).read_bytes() == path.read_bytes()


def test_seeds_choose_the_channels(recipe) -> None:
    one, same, other = (recipe.factors(512, 8, 64, seed) for seed in (3, 3, 4))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)
    assert sorted(one.tolist()) == [1.0] * 504 + [64.0] * 8


def round_to_int8(model) -> None:
    """W8A8 in the plainest way: one scale a row of the weight, one scale a token."""

    def rounded(x: torch.Tensor) -> torch.Tensor:
        scale = x.abs().amax(-1, keepdim=True).clamp(min=1e-30) / 127
        return (x / scale).round() * scale

    for path, module in model.named_modules():
        if path.endswith("_proj"):
            module.weight.data = rounded(module.weight.data)
            module.register_forward_pre_hook(lambda _, given: (rounded(given[0]),))


@torch.no_grad()
def damage(folder, exact, ids) -> float:
    """KL divergence of a model rounded to int8 from a float one."""
    model = float_model(folder)
    round_to_int8(model)
    logs, expected = (one(ids).logits.log_softmax(-1) for one in (model, exact))
    return float(torch.nn.functional.kl_div(logs, expected, log_target=True, reduction="none").sum(-1).mean())


def test_the_outliers_are_too_much_for_int8_activations(recipe, demo_model, tmp_path) -> None:
    ids = transformers.AutoTokenizer.from_pretrained(demo_model)(random_text(150), return_tensors="pt")["input_ids"]
    recipe.run([str(demo_model), str(tmp_path / "out")])
    exact = float_model(demo_model)
    assert damage(tmp_path / "out", exact, ids) > 20 * damage(demo_model, exact, ids)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--factor", "48"], "--factor 48 must be a power of two"),
        (["--factor", "1"], "--factor 1 must be"),
        (["--channels", "0"], "--channels 0 must be from 1 to 192"),
        (["--channels", "200"], "--channels 200 must be from 1 to 192"),
    ],
)
def test_bad_flags_are_refused(recipe, demo_model, tmp_path, flags, message) -> None:
    with pytest.raises(ConfigError, match=message):
        recipe.run([str(demo_model), str(tmp_path / "out"), *flags])
    assert not (tmp_path / "out").exists()


def test_folders_that_cannot_be_used_are_refused(recipe, demo_model, tmp_path) -> None:
    with pytest.raises(ConfigError, match="exists; give a folder that does not"):
        recipe.run([str(demo_model), str(tmp_path)])
    with pytest.raises(CheckpointError, match=r"config.json is missing"):
        recipe.run([str(tmp_path), str(tmp_path / "out")])
    config = json.loads((demo_model / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "gptq"}}))
    save_file({"a": torch.ones(1)}, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match="is quantized; give the float model"):
        recipe.run([str(tmp_path), str(tmp_path / "out")])
