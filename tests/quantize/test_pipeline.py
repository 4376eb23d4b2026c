"""Whole runs: what comes out loads elsewhere, computes what it must, and is measured rightly."""

import itertools
import json
from dataclasses import replace
from functools import partial

import pytest
import torch
import transformers
from transformers.utils.quantization_config import CompressedTensorsConfig

from bladellm_runtime.errors import CheckpointError, ConfigError
from bladellm_runtime.fields import Fields
from bladellm_runtime.quantization.awq import Awq
from bladellm_runtime.quantization.gptq import Gptq
from bladellm_runtime.quantization.registry import read_quantization
from bladellm_runtime.quantization.scheme import Scheme
from bladellm_tools.quantize.algorithms.layer import GROUPS
from bladellm_tools.quantize.algorithms.registry import make_algorithm
from bladellm_tools.quantize.job import Progress
from bladellm_tools.quantize.pipeline.parts import unpack_layer
from bladellm_tools.quantize.pipeline.run import quantize_model
from bladellm_tools.quantize.pipeline.source import open_float_model
from tests.models.harness import random_prompt, reference_logits
from tests.quantize.jobs import FP8, W4, W4_ASYMMETRIC, W8A8, Steps, digests, job_of, save_model, tensors_of
from tests.quantize.test_forward import run
from tests.support.cases import some_pairs

MEMBERS = [member for group in GROUPS for member in group.members]


def dequantized(folder, model_folder):
    """Layers of an output as plain float32 weights, its outer tensors and the float model's spec."""
    config = json.loads((folder / "config.json").read_text())
    form = read_quantization(Fields(folder / "config.json", config["quantization_config"]))
    tensors = tensors_of(folder)
    with open_float_model(model_folder) as model:
        spec = replace(model.spec, intermediate_size=config["intermediate_size"])
    layers = [unpack_layer(tensors, form, spec, index).forward_weights(torch.float32) for index in range(spec.layers)]
    return spec, layers, {key: one.float() for key, one in tensors.items() if not key.startswith("model.layers.")}


def logits_of(folder, model_folder, prompt):
    return run(*dequantized(folder, model_folder), torch.tensor([prompt]), "cpu")[0]


def load_elsewhere(folder, scheme):
    """By compressed-tensors in transformers, which reads packed zero points only to dequantize them."""
    config = {} if scheme.symmetric else {"quantization_config": CompressedTensorsConfig(dequantize=True)}
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **config).eval()


ALGORITHMS = {
    "minmax": W4,
    "gptq": W4_ASYMMETRIC,
    "awq": W4_ASYMMETRIC,
    "smoothquant+": W4,
    "smoothquant": W8A8,
    "smoothquant_gptq": W8A8,
}


@pytest.mark.turns
@pytest.mark.parametrize(("algorithm", "family"), some_pairs(ALGORITHMS, ["llama", "qwen3"]))
def test_outputs_compute_what_transformers_makes_of_them(algorithm, family, tmp_path):
    """compressed-tensors loads the folder; its logits are those of the dequantized weights, near the float model's."""
    reference = save_model(tmp_path / "model", family)
    before = digests(tmp_path / "model")
    scheme = ALGORITHMS[algorithm]
    data = {"windows": None} if algorithm == "minmax" else {}
    quantize_model(job_of(tmp_path / "model", tmp_path / "out", algorithm, scheme=scheme, **data), Progress())
    assert digests(tmp_path / "model") == before
    prompt = random_prompt(23)
    ours = logits_of(tmp_path / "out", tmp_path / "model", prompt)
    theirs = reference_logits(load_elsewhere(tmp_path / "out", scheme), prompt)
    exact = reference_logits(reference, prompt)
    # An activation's code may round either way, and single logits then differ by much: of all together, by little.
    rounding = 1e-3 if scheme.activations == "none" else 0.15
    assert (ours - theirs).norm() <= rounding * exact.norm()
    assert (ours - exact).norm() <= 0.8 * exact.norm()
    assert (ours - exact).norm() > 0


@pytest.mark.parametrize("form", [Gptq, Awq])
def test_other_formats(form, tmp_path):
    reference = save_model(tmp_path / "model", "qwen2")
    quantize_model(job_of(tmp_path / "model", tmp_path / "out", scheme=W4_ASYMMETRIC, format=form), Progress())
    prompt = random_prompt(23)
    exact = reference_logits(reference, prompt)
    assert 0 < (logits_of(tmp_path / "out", tmp_path / "model", prompt) - exact).norm() <= 0.8 * exact.norm()


def test_scrambled_columns(tmp_path):
    reference = save_model(tmp_path / "model")
    make = partial(make_algorithm, "gptq", static_groups=False)
    job = replace(job_of(tmp_path / "model", tmp_path / "out", format=Gptq, scrambled=True), algorithm=make)
    quantize_model(job, Progress())
    g_idx = tensors_of(tmp_path / "out")["model.layers.1.mlp.down_proj.g_idx"]
    assert not torch.equal(g_idx, g_idx.sort().values)
    prompt = random_prompt(23)
    exact = reference_logits(reference, prompt)
    assert 0 < (logits_of(tmp_path / "out", tmp_path / "model", prompt) - exact).norm() <= 0.8 * exact.norm()


@pytest.mark.parametrize(("scheme", "algorithm"), [(W4, "awq"), (W8A8, "smoothquant"), (FP8, "minmax")])
def test_errors_are_those_of_the_layers_outputs(scheme, algorithm, tmp_path):
    """Of the first layer, whose inputs are the float model's: hooks on transformers' float model and the output's
    weights with its folded norms give the same figures."""
    reference = save_model(tmp_path / "model")
    job = job_of(tmp_path / "model", tmp_path / "out", algorithm, scheme=scheme)
    result = quantize_model(job, Progress())
    errors = {report.module: report.error for report in result.modules}
    inputs = first_inputs(reference, job.windows[: job.batch] if scheme.activations == "dynamic" else job.windows)
    _, layers, _ = dequantized(tmp_path / "out", tmp_path / "model")
    norms = {"self_attn.q_proj": "input_layernorm", "mlp.gate_proj": "post_attention_layernorm"}
    for member, norm in norms.items():
        float_layer = reference.model.layers[0]
        exact = inputs[member] @ float_layer.get_submodule(member).weight.T.detach()
        folded = inputs[member] * layers[0][f"{norm}.weight"] / float_layer.get_submodule(norm).weight.detach()
        possible = roundings(folded, scheme) if scheme.activations == "dynamic" else [folded]
        outputs = [inputs @ layers[0][f"{member}.weight"].T for inputs in possible]
        expected = [float((ours - exact).square().sum() / exact.square().sum()) for ours in outputs]
        assert any(errors[f"model.layers.0.{member}"] == pytest.approx(each, rel=1e-3) for each in expected), expected
    assert all(0 < error < 1 for error in errors.values())


@torch.no_grad()
def first_inputs(reference, tokens):
    seen = {}
    for member in ("self_attn.q_proj", "mlp.gate_proj"):

        def keep(_, inputs, member=member):
            seen[member] = inputs[0].flatten(0, 1)

        reference.model.layers[0].get_submodule(member).register_forward_pre_hook(keep)
    reference(tokens)
    return seen


def roundings(x, scheme, last_bits=1e-6):
    """The rows of x rounded to codes: all ways, where values lie so near half-way between two that the last bits, which
    differ with the order of operations, decide. One code is up to 0.3 % of a small layer's error."""
    scale = x.abs().amax(1, keepdim=True) / (448 if scheme.kind == "fp8" else 127)
    below, near, above = (rounded(x / scale * (1 + part), scheme) for part in (-last_bits, 0.0, last_bits))
    ties = (below != above).nonzero().tolist()
    for choice in itertools.product((below, above), repeat=len(ties)):
        codes = near.clone()
        for place, chosen in zip(ties, choice, strict=True):
            codes[tuple(place)] = chosen[tuple(place)]
        yield codes * scale


def rounded(x, scheme):
    return x.clamp(-448, 448).to(torch.float8_e4m3fn).float() if scheme.kind == "fp8" else x.round()


def test_layers_are_calibrated_with_what_the_quantized_layers_before_make(tmp_path):
    """A rounder that sees layer 1's statistics must see those of layer 0 rounded."""
    save_model(tmp_path / "model")
    seen = {}

    def spying(grid):
        algorithm = make_algorithm("gptq", grid)

        def rounder(modules, weights, statistics):
            if modules[0] == "self_attn.q_proj":
                seen[len(seen)] = statistics.gram.clone()
            return algorithm.rounder(modules, weights, statistics)

        return replace(algorithm, rounder=rounder)

    job = replace(job_of(tmp_path / "model", tmp_path / "out"), algorithm=spying)
    quantize_model(job, Progress())
    spec, layers, outer = dequantized(tmp_path / "out", tmp_path / "model")
    grams = []

    def observe(index):
        return lambda name, x: grams.append(x.T @ x / len(x)) if name == "qkv" else None

    run(spec, layers, outer, job.windows, "cpu", observe)
    for index in (0, 1, 2):
        torch.testing.assert_close(seen[index], grams[index], rtol=1e-4, atol=1e-4)


def test_static_activations_get_the_largest_input(tmp_path):
    save_model(tmp_path / "model")
    scheme = Scheme(8, "int", activations="static")
    job = job_of(tmp_path / "model", tmp_path / "out", "minmax", scheme=scheme)
    quantize_model(job, Progress())
    largest = {}
    spec, _, outer = dequantized(tmp_path / "out", tmp_path / "model")

    def observe(index):
        return lambda name, x: largest.__setitem__(name, float(x.abs().max())) if index == 0 else None

    with open_float_model(tmp_path / "model") as model:
        float_layers = [weights for _, weights in model.layers()]
    run(spec, float_layers, outer, job.windows, "cpu", observe)
    for group in GROUPS:
        for member in group.members:
            scale = tensors_of(tmp_path / "out")[f"model.layers.0.{member}.input_scale"]
            assert float(scale) == pytest.approx(largest[group.name] / 127, rel=1e-5)


def test_nothing_is_calibrated_where_nothing_needs_data(tmp_path):
    save_model(tmp_path / "model")
    steps = Steps()
    result = quantize_model(job_of(tmp_path / "model", tmp_path / "out", "minmax", windows=None), steps)
    assert {step for step, _ in steps.seen} == {"plan", "read", "round", "write", "done"}
    assert result.tokens == 0
    assert {report.error for report in result.modules} == {None}


def test_reports_stages_and_progress(tmp_path):
    save_model(tmp_path / "model")
    steps = Steps()
    job = job_of(tmp_path / "model", tmp_path / "out")
    result = quantize_model(job, steps)
    assert [report.module for report in result.modules] == [f"model.layers.{i}.{m}" for i in range(3) for m in MEMBERS]
    assert {report.damp for report in result.modules} == {0.01}
    layer = ["read", "calibrate", "round", "write", "done"]
    assert steps.seen == [("plan", 3)] + [(stage, index) for index in range(3) for stage in layer]
    assert set(result.stages) == {"read", "calibrate", "smooth", "round", "write"}
    assert 0 < sum(result.stages.values()) <= result.seconds
    assert result.tokens == job.windows.numel()
    assert result.bytes_before == (tmp_path / "model" / "model.safetensors").stat().st_size
    assert result.bytes_after == sum(path.stat().st_size for path in (tmp_path / "out").glob("*.safetensors"))
    assert steps.peak["disk"] == pytest.approx(result.bytes_after, rel=0.2)
    assert steps.peak["host"] > job.windows.numel() * 64 * 4


def test_padding_and_small_files(tmp_path):
    """96 inner channels become 128, so that groups of 64 fit."""
    reference = save_model(tmp_path / "model")
    job = job_of(tmp_path / "model", tmp_path / "out", scheme=Scheme(4, "int", 64), pad_multiple=64)
    quantize_model(job, Progress())
    out = tmp_path / "out"
    config = json.loads((out / "config.json").read_text())
    original = json.loads((tmp_path / "model" / "config.json").read_text())
    added = {key: value for key, value in config.items() if original.get(key) != value}
    assert set(added) == {"intermediate_size", "quantization_config"}
    assert added["intermediate_size"] == 128
    assert (out / "tokenizer_config.json").read_bytes() == (tmp_path / "model" / "tokenizer_config.json").read_bytes()
    assert {path.name for path in out.iterdir()} == {
        "config.json",
        "generation_config.json",
        "tokenizer_config.json",
        "quantize_report.json",
        "model.safetensors.index.json",
        *(f"model-0000{index}-of-00004.safetensors" for index in (1, 2, 3, 4)),
    }
    prompt = random_prompt(23)
    exact = reference_logits(reference, prompt)
    assert (logits_of(out, tmp_path / "model", prompt) - exact).norm() <= 0.7 * exact.norm()


def test_groups_that_do_not_fit_are_refused_before_any_work(tmp_path):
    save_model(tmp_path / "model")
    steps = Steps()
    with pytest.raises(CheckpointError, match="96"):
        quantize_model(job_of(tmp_path / "model", tmp_path / "out", scheme=Scheme(4, "int", 64)), steps)
    assert steps.seen == []
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize(
    "options", [{}, {"fallback_ratio": 0.1, "algorithm": "minmax"}, {"kv_scales": True, "algorithm": "minmax"}]
)
def test_missing_data_is_refused(options, tmp_path):
    save_model(tmp_path / "model")
    with pytest.raises(ConfigError, match="calibration data"):
        quantize_model(job_of(tmp_path / "model", tmp_path / "out", windows=None, **options), Progress())


def test_ignored_groups_stay_as_they_are(tmp_path):
    """Naming k_proj leaves q and v too; naming a layer's MLP leaves it."""
    reference = save_model(tmp_path / "model")
    ignore = ("lm_head", "*.0.self_attn.k_proj", "model.layers.2.mlp.*")
    job = job_of(tmp_path / "model", tmp_path / "out", "awq", ignore=ignore)
    result = quantize_model(job, Progress())
    left = {f"model.layers.0.self_attn.{name}_proj" for name in "qkv"}
    left |= {f"model.layers.2.mlp.{name}_proj" for name in ("gate", "up", "down")}
    assert {report.module for report in result.modules} == {
        f"model.layers.{index}.{member}" for index in range(3) for member in MEMBERS
    } - left
    out = tmp_path / "out"
    state, tensors = reference.state_dict(), tensors_of(out)
    assert all(torch.equal(tensors[f"{module}.weight"], state[f"{module}.weight"]) for module in left)
    assert set(json.loads((out / "config.json").read_text())["quantization_config"]["ignore"]) == {"lm_head", *left}
    ignored = json.loads((out / "quantize_report.json").read_text())["ignored"]
    assert set(ignored) == left
    assert "k_proj" in ignored["model.layers.0.self_attn.q_proj"]
    prompt = random_prompt(23)
    exact = reference_logits(reference, prompt)
    assert 0 < (logits_of(out, tmp_path / "model", prompt) - exact).norm() <= 0.8 * exact.norm()


@pytest.mark.parametrize(
    ("pattern", "problem"), [("*.q_prj", "names no module"), ("model.layers.*", "leaves no linear")]
)
def test_patterns_without_sense_are_refused(pattern, problem, tmp_path):
    save_model(tmp_path / "model")
    with pytest.raises(ConfigError, match=problem):
        quantize_model(job_of(tmp_path / "model", tmp_path / "out", ignore=("lm_head", pattern)), Progress())


def test_dead_channels_and_bfloat16(tmp_path):
    """Columns that are all zero, inputs that are always zero, a bfloat16 model calibrated in bfloat16."""
    reference = save_model(tmp_path / "first")
    with torch.no_grad():
        for layer in reference.model.layers:
            layer.mlp.down_proj.weight[:, 3] = 0
            layer.mlp.up_proj.weight[5] = 0
            layer.input_layernorm.weight[7] = 0
    reference.to(torch.bfloat16).save_pretrained(tmp_path / "model")
    for algorithm, scheme in {"gptq": W4, "awq": W4_ASYMMETRIC, "smoothquant": W8A8}.items():
        out = tmp_path / algorithm
        quantize_model(job_of(tmp_path / "model", out, algorithm, scheme=scheme, dtype=torch.bfloat16), Progress())
        tensors = tensors_of(out)
        assert tensors["model.layers.1.input_layernorm.weight"].dtype == torch.bfloat16
        assert all(torch.isfinite(tensor).all() for tensor in tensors.values() if tensor.is_floating_point())
        prompt = random_prompt(23)
        exact = reference_logits(reference, prompt).float()
        assert (logits_of(out, tmp_path / "model", prompt) - exact).norm() <= 0.8 * exact.norm()
