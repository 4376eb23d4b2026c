"""Every scheme in every format: logits of the loaded model are those of the weights that the codes stand for."""

from dataclasses import replace

import pytest
import torch
from bladellm_kernels import int4_matmul

from bladellm_runtime.layers import quantized_linear
from bladellm_runtime.layers.quantized_linear import QuantizedLinear, packed_bytes
from tests.models.harness import DEVICES, Sequences, assert_greedy, load_tiny, random_prompt, reference_logits
from tests.models.quantized import SCHEMES, STORED, Tiny, assert_agrees, plan, round_weight
from tests.support.cases import drawn_of, some_pairs

OPTIONS = {"qwen3": {"head_dim": 16}}
EXACT = [
    (method, name)
    for method, name in STORED
    if SCHEMES[name].activations == "none" and (SCHEMES[name].bits == 8 or SCHEMES[name].group_size == 16)
]
"""Computed in float32 where activations are."""


def logits_of(folder, prompt, device="cpu", dtype=torch.float32):
    return Sequences(load_tiny(folder, device, dtype)).step([(0, prompt)])[0]


@pytest.mark.turns
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("stored", "family"), some_pairs(STORED, ["llama", "qwen2", "qwen3"]), ids=str)
def test_every_scheme_in_every_format(tmp_path, stored, family, device):
    method, name = stored
    tiny = Tiny(tmp_path, plan(method, SCHEMES[name]), family, **OPTIONS.get(family, {}))
    assert len(tiny.weights) == 3 * 7
    assert_agrees(tiny, load_tiny(tmp_path, device))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("stored", drawn_of(EXACT, 4), ids=" ".join)
def test_greedy_tokens(tmp_path, stored, device):
    method, name = stored
    tiny = Tiny(tmp_path, plan(method, SCHEMES[name]), "mistral", sliding_window=11)
    prompt = random_prompt(13)
    sequences = Sequences(load_tiny(tmp_path, device))
    tokens = [int(sequences.step([(0, prompt)])[0][-1].argmax())]
    while len(tokens) < 24:
        tokens.append(int(sequences.step([(0, tokens[-1:])])[0][-1].argmax()))
    assert_greedy(tiny.reference, prompt, tokens)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("name", "dtype"), some_pairs(SCHEMES, [torch.bfloat16, torch.float16]), ids=str)
def test_16_bit_types_stay_near_float32(tmp_path, name, dtype, device):
    """Rounding to 16 bits costs no more than it costs transformers' own model of that type (with slack)."""
    tiny = Tiny(tmp_path, plan("compressed-tensors", SCHEMES[name]), "llama")
    prompt = random_prompt(33)
    exact = reference_logits(tiny.reference, prompt)
    logits = logits_of(tmp_path, prompt, device, dtype)
    theirs = reference_logits(tiny.reference.to(dtype), prompt).float()
    assert (logits - exact).abs().mean() <= 3 * (theirs - exact).abs().mean()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", [name for name, scheme in SCHEMES.items() if scheme.activations != "none"])
def test_a_row_never_depends_on_its_neighbours(tmp_path, name, device):
    """Also not on their number: alone, and beside sequences with a hundred times its activations."""
    tiny = Tiny(tmp_path, plan("compressed-tensors", SCHEMES[name]), "llama")
    model = load_tiny(tmp_path, device)
    linear = model.layers[0].mlp.down
    assert isinstance(linear, QuantizedLinear)
    x = torch.randn(7, 64, device=device)
    x[3:] *= 100
    together = linear(x)
    for row in range(7):
        error = (linear(x[row : row + 1])[0] - together[row]).abs().max()
        assert error <= 1e-5 * together[row].abs().max()
    assert tiny.weights["model.layers.0.mlp.down_proj"].scheme == linear.scheme


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("name", "size"), some_pairs(SCHEMES, [32, 128, None]))
@pytest.mark.parametrize("kernel", [True, False], ids=["as is", "no int4 kernel"])
def test_what_a_layer_takes_is_known_before(name, size, dtype, device, kernel, monkeypatch):
    """Also on processors that have no kernel for 4 bits."""
    if not kernel:
        for module in (int4_matmul, quantized_linear):
            monkeypatch.setattr(module, "has_int4_kernel", lambda: False)
    scheme = SCHEMES[name]
    if scheme.group_size is not None:
        scheme = replace(scheme, group_size=size)
    rows, columns = 1088, 1024
    weight = round_weight(torch.randn(rows, columns), scheme, torch.float16, input_scale=0.1)
    canonical = replace(weight, **{one: getattr(weight, one).to(device) for one in ("codes", "scales")})
    if weight.zeros is not None:
        canonical = replace(canonical, zeros=weight.zeros.to(device))
    held = QuantizedLinear(canonical, None, dtype).bytes
    assert rows * columns * scheme.bits // 8 < held
    spare = 1.5 if device == "cuda" else 1.35  # A CPU keeps the scales in two types, and the estimate counts both.
    assert 0.75 * held <= packed_bytes(scheme, rows, columns, dtype, torch.device(device)) <= spare * held


def test_the_weights_of_a_model_are_counted_as_packed(tmp_path):
    Tiny(tmp_path, plan("compressed-tensors", SCHEMES["w4 g16"]), "qwen2")
    model = load_tiny(tmp_path, dtype=torch.bfloat16)
    layers = model.layers
    linears = [(layer.attention.qkv, layer.attention.output, layer.mlp.gate_up, layer.mlp.down) for layer in layers]
    held = sum(linear.bytes for layer in linears for linear in layer)
    assert model.weight_bytes == held + 2 * (2 * 104 * 48 + (2 * 3 + 1) * 48)
