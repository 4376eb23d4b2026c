"""Models over tensor-parallel ranks give the logits of transformers and of one rank."""

import pytest
import torch

from bladellm_runtime.models.config import read_model_spec
from bladellm_runtime.models.loading import load_model
from bladellm_runtime.quantization.scheme import Scheme
from tests.distributed.processes import run_processes
from tests.distributed.ranks import CPU, LIMIT, load_rank, plan_of, prompts, run_on_threads, run_prompts, sampled
from tests.models.harness import load_tiny, reference_logits, save_tiny
from tests.models.quantized import SCHEMES, STORED, Tiny, plan

CASES = {
    "llama": ("llama", {}),
    "llama-mha-biased": ("llama", {"num_key_value_heads": 6, "attention_bias": True, "mlp_bias": True}),
    "llama-tied": ("llama", {"tie_word_embeddings": True, "num_attention_heads": 8, "num_key_value_heads": 4}),
    "mistral-window": ("mistral", {"sliding_window": 9, "num_attention_heads": 12, "num_key_value_heads": 1}),
    "qwen2": ("qwen2", {"num_attention_heads": 12, "num_key_value_heads": 3}),
    "qwen3-tied": ("qwen3", {"head_dim": 16, "num_attention_heads": 10, "tie_word_embeddings": True}),
}
DEGREES = [2, 3, 5, 8]
EVERY = [
    (case, degree)
    for case, (_, options) in CASES.items()
    for degree in DEGREES
    if degree <= options.get("num_attention_heads", 6)
]
SAMPLE = {("llama", 2), ("llama-mha-biased", 5), ("llama-tied", 3), ("qwen2", 8), ("qwen3-tied", 3)}


@pytest.mark.parametrize(("case", "degree"), sampled(EVERY, SAMPLE))
def test_logits_are_those_of_transformers_and_of_one_rank(case, degree, tmp_path):
    reference = save_tiny(tmp_path, CASES[case][0], **CASES[case][1])
    asked = prompts()
    found = run_on_threads(tmp_path, degree, asked)
    for logits, one, prompt in zip(found, run_prompts(load_tiny(tmp_path), asked), asked, strict=True):
        assert (logits - reference_logits(reference, prompt)).abs().max() <= LIMIT
        assert (logits - one).abs().max() <= LIMIT


def on_a_rank(rank, folder, asked):
    from bladellm_runtime.distributed.communicator import make_communicator

    communicator = make_communicator([range(3)])
    assert communicator is not None
    return run_prompts(load_rank(folder, communicator), asked)


def test_processes_give_the_logits_of_transformers(tmp_path):
    """Three, unevenly."""
    model, asked = tmp_path / "model", prompts()
    reference = save_tiny(model, "qwen2", num_attention_heads=8, num_key_value_heads=4, hidden_size=64)
    assert len({len(rank.heads) for rank in plan_of(model, 3).ranks}) > 1
    for found in run_processes(3, tmp_path, on_a_rank, model, asked):
        for logits, prompt in zip(found, asked, strict=True):
            assert (logits - reference_logits(reference, prompt)).abs().max() <= LIMIT


QUANTIZED = [(method, name, degree) for method, name in STORED for degree in (2, 3, 5, 6)]
QUANTIZED_SAMPLE = {
    ("compressed-tensors", "w4 g16 asymmetric", 3),
    ("compressed-tensors", "w8a8 dynamic", 2),
    ("compressed-tensors", "fp8 static", 5),
    ("gptq", "w8 g16", 6),
    ("awq", "w4 g16 asymmetric", 5),
}


@pytest.mark.parametrize(("method", "name", "degree"), sampled(QUANTIZED, QUANTIZED_SAMPLE))
def test_quantized_layers(method, name, degree, tmp_path):
    """The head too. Groups of 16 are parted by heads of 8 and by the MLP's borders."""
    # Not 32 inner channels a rank: of those the CPU's int4 kernel computes in bfloat16.
    options = {"intermediate_size": 80 if degree == 2 else 64}
    assert_quantized(Tiny(tmp_path, plan(method, SCHEMES[name], ()), "qwen2", **options), degree)


SCRAMBLED = [(bits, symmetric, degree) for bits in (4, 8) for symmetric in (True, False) for degree in (2, 3, 5)]


@pytest.mark.parametrize(("bits", "symmetric", "degree"), sampled(SCRAMBLED, {(4, False, 3)}))
def test_scrambled_groups(bits, symmetric, degree, tmp_path):
    """Inputs in an order of their own, whose groups every rank has some of."""
    scheme = Scheme(bits, group_size=16, symmetric=symmetric)
    config = plan("gptq", scheme, scrambled=True)
    options = {"attention_bias": True, "hidden_size": 96, "intermediate_size": 128, "head_dim": 16}
    assert_quantized(Tiny(tmp_path, config, scrambled=("_proj",), **options), degree)


def assert_quantized(tiny: Tiny, degree: int) -> None:
    """Logits are transformers', or, of rounded inputs, as near those of unrounded ones as one rank's are: a rank has
    maxima of its own."""
    asked = prompts()
    found = torch.cat(run_on_threads(tiny.folder, degree, asked))
    if all(weight.scheme.activations == "none" for weight in tiny.weights.values()):
        wanted = torch.cat([reference_logits(tiny.reference, prompt) for prompt in asked])
        assert (found - wanted).abs().max() <= LIMIT
        return
    for module in tiny.reference.modules():
        module._forward_pre_hooks.clear()
    exact = torch.cat([reference_logits(tiny.reference, prompt) for prompt in asked])
    one = torch.cat(run_prompts(load_tiny(tiny.folder), asked))
    assert 0 < (found - exact).abs().mean() <= 1.3 * (one - exact).abs().mean()


DUMMY = [("float", 2), ("float", 5), *(("w4 g16 asymmetric", degree) for degree in (2, 3)), ("fp8 weights", 3)]


@pytest.mark.parametrize(("name", "degree"), DUMMY)
def test_dummy_weights_are_one_model_whatever_the_degree(name, degree, tmp_path):
    if name == "float":
        save_tiny(tmp_path, "qwen3", tie_word_embeddings=True)
    else:
        Tiny(tmp_path, plan("compressed-tensors", SCHEMES[name], ()))
    (tmp_path / "model.safetensors").unlink()
    spec, asked = read_model_spec(tmp_path), prompts()
    whole = load_model(tmp_path, spec, device=CPU, dtype=torch.float32, load_format="dummy", seed=7)
    found = run_on_threads(tmp_path, degree, asked, load_format="dummy")
    assert (torch.cat(found) - torch.cat(run_prompts(whole, asked))).abs().max() <= LIMIT
