"""The groups that rounding hurts most, back in floating point: which, and that they still compute the same."""

import json

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st

from bladellm_tools.quantize.algorithms.layer import DOWN, GATE_UP, GROUPS, OUTPUT, QKV
from bladellm_tools.quantize.job import Progress
from bladellm_tools.quantize.pipeline.fallback import choose_fallback, fallen_modules
from bladellm_tools.quantize.pipeline.run import quantize_model
from tests.models.harness import random_prompt, reference_logits
from tests.quantize.jobs import W4, W4_ASYMMETRIC, W8A8, job_of, save_model, tensors_of
from tests.support.cases import some_pairs


def errors_of(table):
    return {
        f"model.layers.{layer}.{member}": error for (layer, group), error in table.items() for member in group.members
    }


def test_the_largest_errors_fall():
    table = {(0, QKV): 0.1, (0, DOWN): 0.9, (1, QKV): 0.2, (1, OUTPUT): 0.3, (2, GATE_UP): 0.25}
    groups = [(QKV, DOWN), (QKV, OUTPUT), (GATE_UP,)]
    choice = choose_fallback(groups, errors_of(table), 0.4)
    assert choice == {0: (DOWN,), 1: (OUTPUT,)}
    assert fallen_modules(choice) == ["model.layers.0.mlp.down_proj", "model.layers.1.self_attn.o_proj"]


def test_a_groups_error_is_the_mean_of_its_members():
    errors = {
        "model.layers.0.mlp.gate_proj": 0.9,
        "model.layers.0.mlp.up_proj": 0.1,
        "model.layers.0.mlp.down_proj": 0.6,
    }
    assert choose_fallback([(GATE_UP, DOWN)], errors, 0.5) == {0: (DOWN,)}


@given(st.lists(st.sampled_from([0.0, 0.25, 0.5, 1.0]), min_size=12, max_size=12), st.floats(0, 1))
def test_count_and_order(values, ratio):
    table = dict(zip([(layer, group) for layer in range(3) for group in GROUPS], values, strict=True))
    choice = choose_fallback([GROUPS] * 3, errors_of(table), ratio)
    chosen = [(layer, group) for layer, groups in choice.items() for group in groups]
    kept = [key for key in table if key not in chosen]
    assert abs(len(chosen) - ratio * 12) <= 0.5
    assert all(table[one] >= table[other] for one in chosen for other in kept)
    assert chosen == sorted(chosen, key=lambda one: (one[0], GROUPS.index(one[1])))


WAYS = [("awq", W4_ASYMMETRIC), ("smoothquant", W8A8), ("smoothquant+", W4)]


@pytest.mark.parametrize(("way", "family"), some_pairs(WAYS, ["llama", "qwen2"]), ids=str)
def test_everything_fallen_computes_what_the_float_model_does(way, family, tmp_path):
    """With all groups back, folded as they are, norms and weights must still belong together."""
    (algorithm, scheme), reference = way, save_model(tmp_path / "model", family)
    job = job_of(tmp_path / "model", tmp_path / "out", algorithm, scheme=scheme, fallback_ratio=1.0)
    result = quantize_model(job, Progress())
    assert all(report.fallback and report.error is not None for report in result.modules)
    state, tensors = reference.state_dict(), tensors_of(tmp_path / "out")
    assert tensors.keys() == state.keys()
    norms = [name for name in state if name.endswith("layernorm.weight")]
    assert any(not torch.equal(tensors[name], state[name]) for name in norms), "something was folded"
    loaded = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(tmp_path / "model"))
    loaded.load_state_dict(tensors)
    prompt = random_prompt(29)
    exact = reference_logits(reference, prompt)
    assert (reference_logits(loaded.eval(), prompt) - exact).abs().max() <= 1e-4 * exact.abs().max()


@pytest.mark.parametrize("algorithm", ["gptq", "awq"])
def test_a_share_falls_and_the_rest_stays(algorithm, tmp_path):
    reference = save_model(tmp_path / "model")
    job = {"scheme": W4, "windows": torch.randint(0, 97, (6, 21))}
    before = quantize_model(job_of(tmp_path / "model", tmp_path / "all", algorithm, **job), Progress())
    result = quantize_model(
        job_of(tmp_path / "model", tmp_path / "out", algorithm, fallback_ratio=0.34, **job), Progress()
    )
    assert [report.error for report in result.modules] == [report.error for report in before.modules]
    fallen = {report.module for report in result.modules if report.fallback}
    assert 4 <= len(fallen) < 12
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert set(config["quantization_config"]["ignore"]) == {"lm_head", *fallen}
    left, right = tensors_of(tmp_path / "all"), tensors_of(tmp_path / "out")
    for key, tensor in left.items():
        if key.rpartition(".")[0] not in fallen:
            assert torch.equal(tensor, right[key])
    assert all(f"{module}.weight" in right and f"{module}.weight_packed" not in right for module in fallen)
    prompt = random_prompt(29)
    exact = reference_logits(reference, prompt)
    loaded = [
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / name, dtype=torch.float32).eval()
        for name in ("all", "out")
    ]
    worse, better = ((reference_logits(one, prompt) - exact).norm() for one in loaded)
    assert better < worse
    report = json.loads((tmp_path / "out" / "quantize_report.json").read_text())
    assert {one["module"] for one in report["modules"] if one["fallback"]} == fallen
