"""Powers of two between inputs and weights: the same results bit for bit, and fewer bits that change."""

import pytest
import torch

from bladellm_runtime.layers.linear import Linear, StackedLinear
from bladellm_runtime.models import exponents
from bladellm_runtime.models.config import read_model_spec
from bladellm_runtime.models.decoder import Weights
from bladellm_runtime.models.exponents import SHIFTS, align_exponents, best_shift, changing_bits, exponent_shares
from bladellm_runtime.models.loading import load_model
from bladellm_runtime.models.lora_layout import LoraShape
from tests.models.harness import DEVICES, Sequences, load_tiny, random_prompt, save_tiny

BITS = [1 << place for place in range(7, 15)]
"""Of the exponent, in a bfloat16."""


def spread(rows: int, inputs: int) -> torch.Tensor:
    """Numbers of many sizes, zeros among them."""
    numbers = torch.randn(rows, inputs) * torch.exp(2 * torch.randn(rows, inputs))
    return (numbers * (torch.rand(rows, inputs) > 0.05)).bfloat16()


def counted_bits(numbers: torch.Tensor) -> float:
    """Bits of exponents in which random pairs of numbers differ, in the mean."""
    first, second = (numbers.flatten()[torch.randint(numbers.numel(), (200_000,))].view(torch.int16) for _ in range(2))
    changed = (first ^ second).int()
    return sum(((changed & bit) != 0).float().mean().item() for bit in BITS)


def test_changing_bits_are_those_of_numbers_that_were_multiplied():
    numbers = spread(64, 200)
    counted = [counted_bits(numbers * 2.0**shift) for shift in SHIFTS]
    assert changing_bits(exponent_shares(numbers)).tolist() == pytest.approx(counted, abs=0.04)


def test_the_best_shift_has_the_fewest_changing_bits():
    x, weight = spread(32, 96), (torch.randn(40, 96) * 0.02).bfloat16()
    costs = [2 * counted_bits(x * 2.0**shift) + counted_bits(weight * 2.0**-shift) for shift in SHIFTS]
    assert costs[best_shift(x, weight) - SHIFTS.start] <= min(costs) + 0.06


def test_numbers_of_one_exponent_stay_where_they_are():
    assert best_shift(torch.full((4, 8), 1.5).bfloat16(), torch.full((4, 8), 3.0).bfloat16()) == 0


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("llama", {}),
        ("llama", {"attention_bias": True, "mlp_bias": True}),
        ("mistral", {"sliding_window": 11, "head_dim": 16}),
        ("qwen2", {"tie_word_embeddings": True}),
        ("qwen3", {"head_dim": 24}),
    ],
    ids=str,
)
@pytest.mark.parametrize("device", DEVICES)
def test_logits_stay_the_same_bit_for_bit(device, family, options, tmp_path, monkeypatch):
    """Of prompts, of chunks behind them and of decodes, with shifts that no model would choose."""
    save_tiny(tmp_path, family, **options)
    plain, aligned = (load_tiny(tmp_path, device, torch.bfloat16) for _ in range(2))
    shifts = iter([3, -5, 8, -8, 1, 6, -2, 7, -1])
    monkeypatch.setattr(exponents, "best_shift", lambda x, weight: next(shifts))
    align_exponents(weights_of(aligned))
    assert (next(shifts, None) is None) == (not options.get("mlp_bias"))
    assert not torch.equal(plain.layers[0].mlp.gate_up.weight, aligned.layers[0].mlp.gate_up.weight)
    both, prompt = [Sequences(model) for model in (plain, aligned)], random_prompt(60)
    for tokens in (prompt[:40], prompt[40:57], prompt[57:58], prompt[58:59]):
        expected, found = (sequences.step([(1, tokens)])[0] for sequences in both)
        assert torch.equal(found, expected)


def test_fewer_bits_change_in_a_model(tmp_path):
    """Of a norm twice as large as usual, whose numbers pass from an exponent of 127 to 128."""
    save_tiny(tmp_path, "llama", hidden_size=96)
    model = load_tiny(tmp_path, dtype=torch.bfloat16)
    layer, normal = model.layers[1], torch.randn(200, 96).bfloat16()
    layer.mlp_norm.weight.mul_(2.0)

    def bits() -> float:
        return 2 * counted_bits(normal * layer.mlp_norm.weight) + counted_bits(layer.mlp.gate_up.weight)

    before = bits()
    align_exponents(weights_of(model))
    assert bits() < before - 1


@pytest.mark.parametrize("changed", ["float32", "pieces"])
def test_layers_that_are_not_plain_stay_as_they_are(changed, monkeypatch):
    """And with them the norm in front; of an MLP whose down is none of them gate and up alone are scaled."""
    monkeypatch.setattr(exponents, "best_shift", lambda x, weight: 2)
    weights = of_one_layer()
    name = "layers.4.qkv" if changed == "float32" else "layers.4.down"
    odd = weights.linears[name].weight
    weights.linears[name] = Linear(odd.float()) if changed == "float32" else StackedLinear([Linear(odd)])
    kept, rows = odd.clone(), weights.linears["layers.4.gate_up"].weight.clone()
    align_exponents(weights)
    assert torch.equal(odd, kept)
    assert (weights.tensors["layers.4.input_norm.weight"] == (1 if changed == "float32" else 4)).all()
    assert (weights.tensors["layers.4.mlp_norm.weight"] == 4).all()
    up = 4.0 if changed == "float32" else 1.0
    assert torch.equal(weights.linears["layers.4.gate_up"].weight, torch.cat((rows[:6] / 4, rows[6:] / 4 * up)))


@pytest.mark.gpu
@pytest.mark.parametrize("aligned", [True, False])
def test_weights_of_a_gpu_are_aligned_unless_adapters_may_come(aligned, tmp_path):
    reference = save_tiny(tmp_path, "llama", hidden_size=64, intermediate_size=128, num_attention_heads=4)
    lora = None if aligned else LoraShape(2, 4, torch.bfloat16)
    model = load_model(
        tmp_path, read_model_spec(tmp_path), device=torch.device("cuda"), dtype=torch.bfloat16, load_format="auto",
        seed=0, lora=lora,
    )  # fmt: skip
    changed = 0
    for layer, other in zip(model.layers, reference.model.layers, strict=True):
        norm, down = (weight.bfloat16().cuda() for weight in (other.input_layernorm.weight, other.mlp.down_proj.weight))
        changed += not torch.equal(layer.input_norm.weight, norm)
        changed += not torch.equal(layer.mlp.down.weight if aligned else down, down)
        assert torch.equal(torch.frexp(layer.input_norm.weight)[0], torch.frexp(norm)[0])
    assert bool(changed) == aligned
    if aligned:
        weights = weights_of(model)
        kept = [layer.mlp_norm.weight.clone() for layer in model.layers]
        align_exponents(weights)
        assert all(torch.equal(layer.mlp_norm.weight, one) for layer, one in zip(model.layers, kept, strict=True))


def weights_of(model) -> Weights:
    """The loaded layers under their names."""
    tensors, linears = {}, {}
    for index, layer in enumerate(model.layers):
        norms = {"input_norm": layer.input_norm, "mlp_norm": layer.mlp_norm}
        tensors |= {f"layers.{index}.{name}.weight": norm.weight for name, norm in norms.items()}
        named = {"qkv": layer.attention.qkv, "gate_up": layer.mlp.gate_up, "down": layer.mlp.down}
        linears |= {f"layers.{index}.{name}": linear for name, linear in named.items()}
    return Weights(tensors, linears)


def of_one_layer() -> Weights:
    names = {"qkv": (10, 8), "gate_up": (12, 8), "down": (8, 6)}
    linears = {f"layers.4.{name}": Linear(torch.randn(size).bfloat16()) for name, size in names.items()}
    tensors = {f"layers.4.{name}.weight": torch.ones(8).bfloat16() for name in ("input_norm", "mlp_norm")}
    return Weights(tensors, linears)
