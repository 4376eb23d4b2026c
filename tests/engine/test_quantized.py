"""Greedy output of quantized models, whatever the engine does to get there."""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from bladellm_kernels.int4_matmul import has_int4_kernel
from safetensors.torch import load_file, save_file

from bladellm_runtime import LLM, SamplingParams
from bladellm_runtime.quantization.registry import FORMATS
from bladellm_runtime.quantization.scheme import Scheme
from tests.engine import reference
from tests.models.quantized import round_weight
from tests.support.cases import drawn_of, some_pairs

TOKENS = 16
FILE = "model.safetensors"
STATIC_SCALE = 0.05
SCHEMES = {
    "w4a16": Scheme(4, group_size=16),
    "w4a16 asymmetric": Scheme(4, group_size=16, symmetric=False),
    "w4a16 in bfloat16": Scheme(4, group_size=64),
    "w8a16": Scheme(8),
    "fp8 weights": Scheme(8, "fp8"),
    "w8a8": Scheme(8, activations="dynamic"),
    "w8a8 static": Scheme(8, activations="static"),
    "fp8": Scheme(8, "fp8", activations="dynamic"),
}
WEIGHT_ONLY = [
    (method, name)
    for method, kind in FORMATS.items()
    for name, scheme in SCHEMES.items()
    if scheme.activations == "none" and kind.refusal(scheme) is None and "bfloat16" not in name
]
"""Computed in float32; the CPU's int4 kernel, which knows groups of 32 and more, computes in bfloat16."""
WAYS = {
    "overlap": {},
    "no overlap": {"disable_overlap": True},
    "chunks of 7": {"prefill_chunk_tokens": 7},
    "steps of 32 tokens": {"ragged_flash_max_batch_tokens": 32},
}


@dataclass(frozen=True)
class Pair:
    """A quantized model and the float model of the weights it stands for, as folders."""

    quantized: Path
    plain: Path


def make_pair(source: Path, folder: Path, method: str, scheme: Scheme) -> Pair:
    """Quantize the linear layers of a model's decoder layers by plain rounding."""
    pair = Pair(folder / "quantized", folder / "plain")
    form = FORMATS[method].plan(scheme, ("lm_head",))
    tensors = {key: tensor.float() for key, tensor in load_file(source / FILE).items()}
    stored = dict(tensors)
    for key in [key for key in tensors if key.endswith("_proj.weight")]:
        module = key.removesuffix(".weight")
        static = STATIC_SCALE if scheme.activations == "static" else None
        weight = round_weight(tensors[key], scheme, form.scale_dtype(torch.float32), input_scale=static)
        tensors[key] = weight.dequantize()
        del stored[key]
        stored |= {f"{module}.{suffix}": tensor.contiguous() for suffix, tensor in form.pack(weight).items()}
    for target, values in ((pair.plain, tensors), (pair.quantized, stored)):
        shutil.copytree(source, target, ignore=shutil.ignore_patterns("*.safetensors"))
        save_file(values, target / FILE, metadata={"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    (pair.quantized / "config.json").write_text(json.dumps({**config, "quantization_config": form.config()}))
    return pair


def run(folder: Path, prompts: list[str], device: str, **options) -> list[list[int]]:
    params = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)
    with LLM(str(folder), **({"dtype": "float32", "device": device, "kv_cache_gib": 0.25} | options)) as llm:
        return [output.outputs[0].token_ids for output in llm.generate(prompts, params)]


# What each format stores is tested with the formats, and the logits of each with the models.


@pytest.fixture(scope="module", params=drawn_of(WEIGHT_ONLY, 1), ids=" ".join)
def weight_only(request, demo_model, tmp_path_factory):
    method, name = request.param
    return make_pair(demo_model, tmp_path_factory.mktemp("pair"), method, SCHEMES[name])


def test_a_batch_equals_transformers_with_the_dequantized_weights(weight_only, device):
    """And so does our own float model of those weights."""
    _, tokenizer = reference.load(weight_only.plain)
    prompts = [tokenizer.encode(prompt) for prompt in reference.PROMPTS[:5]]
    wanted = reference.greedy_all(weight_only.plain, prompts, TOKENS)
    assert run(weight_only.quantized, list(reference.PROMPTS[:5]), device) == wanted
    assert run(weight_only.plain, list(reference.PROMPTS[:5]), device) == wanted


@pytest.fixture(scope="module", params=drawn_of(["w4a16", "w8a8", "w8a8 static", "fp8"], 1))
def served(request, demo_model, tmp_path_factory):
    return make_pair(demo_model, tmp_path_factory.mktemp("pair"), "compressed-tensors", SCHEMES[request.param])


@pytest.mark.turns
def test_batches_chunks_and_overlap_do_not_change_tokens(served, device):
    """Alone, together, in pieces: activation scales are a row's own, so that nobody notices the neighbours."""
    alone = [run(served.quantized, [prompt], device)[0] for prompt in reference.PROMPTS[:4]]
    for way, options in WAYS.items():
        prompts = [reference.PROMPTS[index % 4] for index in range(9)]
        assert run(served.quantized, prompts, device, **options) == [alone[index % 4] for index in range(9)], way


@pytest.mark.parametrize(("name", "limit"), [("w8a8", 0.1), ("fp8", 0.1), ("w4a16 in bfloat16", 0.02)])
def test_rounded_activations_cost_little(demo_model, tmp_path, name, limit, device):
    """Log-probabilities of a prompt against the float model of the same weights."""
    if name == "w4a16 in bfloat16" and (device == "cuda" or not has_int4_kernel()):
        pytest.skip("computed in float32 there")
    pair = make_pair(demo_model, tmp_path, "compressed-tensors", SCHEMES[name])
    params = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True, logprobs=0, prompt_logprobs=0)
    scores = []
    for folder in (pair.plain, pair.quantized):
        with LLM(str(folder), dtype="float32", device=device, kv_cache_gib=0.1) as llm:
            output = llm.generate([reference.PROMPTS[0]], params)[0]
        scores.append(torch.tensor([entry.logprobs[0] for entry in output.prompt_logprobs]))
    assert 0 < (scores[0] - scores[1]).abs().mean() < limit


@pytest.mark.parametrize(("name", "dtype"), some_pairs(SCHEMES, ["bfloat16", "float32"], 2))
def test_dummy_weights_serve(demo_model, tmp_path, name, dtype, device):
    pair = make_pair(demo_model, tmp_path, "compressed-tensors", SCHEMES[name])
    (pair.quantized / FILE).unlink()
    tokens = run(pair.quantized, ["The"], device, dtype=dtype, load_format="dummy")[0]
    assert len(tokens) == TOKENS
    assert len(set(tokens)) > 1


def test_quantized_weights_take_less_memory(demo_model, tmp_path, device):
    pair = make_pair(demo_model, tmp_path, "compressed-tensors", SCHEMES["w4a16 in bfloat16"])
    rows = []
    for folder in (pair.plain, pair.quantized):
        with LLM(str(folder), dtype="bfloat16", device=device, kv_cache_gib=0.1) as llm:
            rows.append(dict(llm.ready.memory)["weights"])
    shapes = {key: tuple(tensor.shape) for key, tensor in load_file(pair.plain / FILE).items() if "_proj" in key}
    linears = sum(rows * columns for rows, columns in shapes.values())
    held = 0.6 * linears if device == "cpu" else 1.01 * bytes_in_units(shapes)
    assert rows[0] - rows[1] > 2 * linears - held, "4 bits and a scale a group of 64, in place of 16 bits"


def bytes_in_units(shapes: dict[str, tuple[int, int]]) -> float:
    """Of fused layers on a Hopper: tiles of 128 outputs and inputs, of 4 bits and a float32 scale for 64 inputs.

    Shapes of real models are whole tiles; those of the demo model are not.
    """
    outputs: dict[tuple[str, int], int] = {}
    for key, (rows, columns) in shapes.items():
        layer, name = key.split(".")[2], key.split(".")[-2]
        fused = {"q_proj": "qkv", "k_proj": "qkv", "v_proj": "qkv", "gate_proj": "gate_up", "up_proj": "gate_up"}
        of = f"{layer} {fused.get(name, name)}", columns
        outputs[of] = outputs.get(of, 0) + rows
    padded = [-(-rows // 128) * -(-columns // 128) for (_, columns), rows in outputs.items()]
    return sum(padded) * 128 * 128 * (1 / 2 + 4 / 64)
