"""Decode steps of models whose weights are in units, their kernels run in Python: fused beside apart."""

from unittest import mock

import pytest
import torch
from bladellm_kernels import unit_schedules
from bladellm_kernels.delayed_norm import delayed_norm
from bladellm_kernels.unit_schedules import Gemv, Streamed, WarpRings
from bladellm_kernels.weight_units import UnitWeight

from bladellm_runtime.layers.parallel import RowParallelLinear
from bladellm_runtime.layers.quantized_linear import QuantizedLinear
from bladellm_runtime.models.decoder import Decoder
from bladellm_runtime.quantization.scheme import Scheme
from tests.kernels.units_in_python import run_units_in_python
from tests.models.harness import Sequences, load_tiny, random_prompt
from tests.models.quantized import Tiny, plan, round_weight
from tests.support.cases import some_pairs

pytest.importorskip("triton")

SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_hidden_layers": 2}
TOKENS = 3
FEW_TOKENS = {
    "small": Streamed(16, 16, 2, 1), "middle": Gemv(16, 4, 4),
    "wide": Streamed(16, 16, 2, 1), "long": Streamed(16, 8, 2, 2, programs_per_sm=2),
}  # fmt: skip
"""Kernels that run in Python, in place of those in CUDA C++."""
LAYER_ERROR, LINEARS = 1e-5, 8
"""Of one unit weight's float32 sums, by their largest, and how many there are one behind another."""


@pytest.fixture
def on_units(monkeypatch):
    """Weights are packed as on a Hopper, for activations of every type, and their kernels run in Python, of one row
    too."""
    monkeypatch.setitem(unit_schedules.NORM_SCHEDULES, 8, FEW_TOKENS)
    for module in ("w4a16_linear", "w8a16_linear"):
        monkeypatch.setattr(f"bladellm_kernels.{module}.runs_on_units", lambda *weight: True)
    run_units_in_python(monkeypatch, True)


def greedy(model: Decoder, prompt: list[int]) -> tuple[list[int], torch.Tensor]:
    sequences = Sequences(model)
    rows = [sequences.step([(0, prompt)])[0][-1]]
    for _ in range(TOKENS):
        rows.append(sequences.step([(0, [int(rows[-1].argmax())])])[0][-1])
    return [int(row.argmax()) for row in rows], torch.stack(rows)


SCHEMES = [Scheme(4, group_size=32), Scheme(4, group_size=64, symmetric=False), Scheme(8, group_size=32)]


@pytest.mark.parametrize(("scheme", "family"), some_pairs(SCHEMES, ["llama", "qwen2"], 1), ids=str)
def test_greedy_tokens_are_the_same_fused_and_apart(scheme, family, tmp_path, on_units):
    Tiny(tmp_path, plan("compressed-tensors", scheme), family, **SIZES)
    prompt, model = random_prompt(7), load_tiny(tmp_path)
    with mock.patch.object(model, "fuses", return_value=False):
        apart, logits = greedy(model, prompt)
    assert [model.fuses(rows) for rows in (1, 16, 17)] == [True, True, False], "but for the head"
    with mock.patch.object(model.head, "normed", wraps=model.head.normed) as steps:
        found, fused_logits = greedy(model, prompt)
    assert steps.call_count == TOKENS
    assert not torch.equal(fused_logits, logits)
    limit = LAYER_ERROR * LINEARS * logits.abs().max()
    same = next((index for index, pair in enumerate(zip(found, apart, strict=True)) if len(set(pair)) > 1), TOKENS)
    assert (fused_logits - logits)[: same + 1].abs().max() <= limit
    # Where two tokens are equally good but for this, either may come, and what follows is another text.
    assert logits[same].max() - logits[same, found[same]] <= 2 * limit


@pytest.mark.parametrize(("scheme", "rows"), some_pairs(SCHEMES, [3, 9, 16]), ids=str)
def test_each_compound_is_that_of_the_weight_it_stands_for(scheme, rows, on_units):
    check_compounds(scheme, rows)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 3, 8, 9, 16])
@pytest.mark.parametrize("scheme", SCHEMES[:2], ids=str)
def test_each_compound_on_a_gpu(scheme, rows):
    with torch.device("cuda"):
        check_compounds(scheme, rows)


def check_compounds(scheme: Scheme, rows: int) -> None:
    """In float64; of codes in an order of their own, with a bias; on the default device."""
    weight = round_weight(torch.randn(256, 128) / 8, scheme, torch.float16, torch.randperm(128))
    wide, bias = weight.dequantize().double(), torch.randn(256).bfloat16()
    layer = QuantizedLinear(weight, bias, torch.bfloat16)
    assert layer.fuses(rows)
    assert isinstance(layer.packed.weight, UnitWeight)
    norm = delayed_norm(torch.randn(rows, 128).bfloat16(), torch.randn(128).bfloat16(), 1e-5)
    expected = norm.factors().double()[:, None] * (norm.weighted.double() @ wide.t()) + bias.double()
    out = torch.empty(rows, 256)
    assert layer.normed(norm, out) is out
    assert_rounded(out, expected)
    assert_rounded(layer.normed(norm), expected)
    gate, up = expected.chunk(2, 1)
    assert_rounded(layer.normed_silu_mul(norm), gate / (1 + torch.exp(-gate)) * up)
    x, residual = torch.randn(rows, 128).bfloat16(), torch.randn(rows, 256).bfloat16()
    norm_weight, expected = torch.randn(256).bfloat16(), residual.double() + x.double() @ wide.t() + bias.double()
    stream, found = layer.add(x, residual, norm_weight, 1e-5)
    assert stream is residual
    assert_rounded(stream, expected)
    assert torch.equal(found.weighted, stream * norm_weight)


def test_few_rows_take_whole_multiprocessors(on_units, monkeypatch):
    """Where there is a kernel of warps with rings of their own; attention then leaves no room beside its programs."""
    layer = QuantizedLinear(round_weight(torch.randn(128, 256), SCHEMES[0], torch.float16), None, torch.bfloat16)
    assert all(layer.shares_sms(rows) for rows in (1, 8, 9, 16, 17))
    monkeypatch.setitem(unit_schedules.NORM_SCHEDULES, 8, dict.fromkeys(FEW_TOKENS, WarpRings(3)))
    assert layer.shares_sms(8), "on a CPU nothing is fused"
    monkeypatch.setattr("bladellm_kernels.warp_units.takes", lambda weight: True)
    assert layer.fuses(1)
    assert [layer.shares_sms(rows) for rows in (1, 8, 9, 16, 17)] == [False, False, True, True, True]
    assert not RowParallelLinear(layer, mock.Mock()).shares_sms(1)


def assert_rounded(y: torch.Tensor, expected: torch.Tensor) -> None:
    """Once, to bfloat16."""
    torch.testing.assert_close(y.double(), expected, rtol=2**-8, atol=1e-4 * float(expected.abs().max()))


def test_float16_has_no_room_for_a_delayed_norm(on_units):
    weight = round_weight(torch.randn(128, 64), SCHEMES[0], torch.float16)
    assert QuantizedLinear(weight, None, torch.bfloat16).fuses(1)
    assert not QuantizedLinear(weight, None, torch.float16).fuses(1)
    assert not QuantizedLinear(weight, None, torch.bfloat16).fuses(0)
