"""Linear layers with what follows them in one operator, as on a GPU for many tokens, against transformers."""

from unittest import mock

import pytest
import torch

from bladellm_runtime.layers import linear
from bladellm_runtime.layers.linear import Linear, StackedLinear
from tests.models.harness import Sequences, load_tiny, random_prompt, reference_logits, save_tiny

CASES = {
    "llama": ("llama", {}),
    "llama-biased": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-one-layer": ("llama", {"num_hidden_layers": 1}),
    "qwen3": ("qwen3", {"head_dim": 24}),
}


@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_transformers(case, tmp_path, monkeypatch):
    """A prompt in two chunks and its last token: rows of each step that a GPU would leave to cuBLAS, and that not."""
    family, options = CASES[case]
    reference = save_tiny(tmp_path, family, **options)
    adds = []
    monkeypatch.setattr(linear, "by_cublas", lambda x: adds.append(len(x)) or len(x) > 1)
    prompt = random_prompt(38)
    sequences = Sequences(load_tiny(tmp_path, "cpu"))
    found = torch.cat([sequences.step([(2, part)])[0] for part in (prompt[:23], prompt[23:37], prompt[37:])])
    expected = reference_logits(reference, prompt)
    assert (found - expected).abs().max() < 1e-4 * expected.abs().max()
    biased = "biased" in case
    layers = sequences.model.spec.layers
    assert adds == ([] if biased else [rows for rows in (23, 14, 1) for _ in range(2 * layers)])


@pytest.mark.parametrize("case", CASES)
def test_gates_are_part_of_layers_of_many_rows(case, tmp_path, monkeypatch):
    """Of chunks of 21 and 11 tokens those of the first; a bias comes before the gate, and is left to another kernel."""
    family, options = CASES[case]
    reference = save_tiny(tmp_path, family, **options)
    monkeypatch.setattr(linear, "gate_is_part", lambda x, weight: len(x) >= 21)
    prompt = random_prompt(32)
    sequences = Sequences(load_tiny(tmp_path, "cpu"))
    with mock.patch.object(linear, "linear_silu_mul", wraps=linear.linear_silu_mul) as gated:
        found = torch.cat([sequences.step([(0, part)])[0] for part in (prompt[:21], prompt[21:])])
    expected = reference_logits(reference, prompt)
    assert (found - expected).abs().max() < 1e-4 * expected.abs().max()
    assert gated.call_count == (0 if "biased" in case else sequences.model.spec.layers)


@pytest.mark.parametrize("many", [False, True])
def test_added_or_left(many, monkeypatch):
    monkeypatch.setattr(linear, "by_cublas", lambda x: many)
    x, weight, stream = torch.randn(7, 5), torch.randn(9, 5), torch.randn(7, 9)
    kept, layer = stream.clone(), Linear(weight)
    assert not StackedLinear([layer]).add_to(stream, x)
    assert not Linear(weight, torch.ones(9)).add_to(stream, x)
    assert torch.equal(stream, kept)
    assert layer.add_to(stream, x) == many
    expected = kept.double() + many * (x.double() @ weight.double().t())
    torch.testing.assert_close(stream.double(), expected, atol=1e-5, rtol=1e-5)
