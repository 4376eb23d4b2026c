"""The algorithms by name: what each is made of, and that it rounds a whole layer."""

import pytest
import torch

from bladellm_runtime.errors import ConfigError
from bladellm_runtime.quantization.scheme import Scheme
from bladellm_tools.quantize.algorithms.awq import AwqSmoother
from bladellm_tools.quantize.algorithms.clip import ClipRounder
from bladellm_tools.quantize.algorithms.fold import Heads, fold
from bladellm_tools.quantize.algorithms.gptq import Gptq
from bladellm_tools.quantize.algorithms.grid import Grid
from bladellm_tools.quantize.algorithms.layer import GROUPS
from bladellm_tools.quantize.algorithms.minmax import MinMax
from bladellm_tools.quantize.algorithms.registry import NAMES, make_algorithm
from bladellm_tools.quantize.algorithms.smoothquant import SmoothQuant
from bladellm_tools.quantize.algorithms.smoothquant_plus import SmoothQuantPlus
from tests.quantize.decoders import decoder

GRID = Grid(Scheme(4, group_size=16), torch.bfloat16)
HEADS = Heads(4, 2, 12)
EVERYWHERE = {"qkv", "output", "gate_up", "down"}
PARTS = {
    "minmax": (MinMax, type(None), set()),
    "gptq": (Gptq, type(None), set()),
    "awq": (ClipRounder, AwqSmoother, EVERYWHERE),
    "smoothquant": (MinMax, SmoothQuant, EVERYWHERE),
    "smoothquant+": (ClipRounder, SmoothQuantPlus, EVERYWHERE),
    "smoothquant_gptq": (Gptq, SmoothQuant, EVERYWHERE),
}


@pytest.mark.parametrize("name", NAMES)
def test_parts(name: str) -> None:
    made = make_algorithm(name, GRID, alpha=0.3, damp=0.02, desc_act=False, static_groups=False, heads=HEADS)
    rounder, smoother, smoothed = PARTS[name]
    assert (made.name, type(made.rounder), type(made.smoother)) == (name, rounder, smoother)
    assert made.smoothed == smoothed
    assert made.needs_statistics == (name != "minmax")
    assert getattr(made.smoother, "alpha", 0.3) == 0.3
    assert getattr(made.smoother, "heads", HEADS) == HEADS
    if isinstance(made.rounder, Gptq):
        assert made.rounder == Gptq(GRID, damp=0.02, desc_act=False, static_groups=False)


def test_alpha_where_none_is_given() -> None:
    assert make_algorithm("smoothquant", GRID).smoother == SmoothQuant(0.5)
    assert make_algorithm("smoothquant+", GRID).smoother == SmoothQuantPlus(None)


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"--quant_algo awk .*smoothquant\+"):
        make_algorithm("awk", GRID)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("scheme", "limit"), [(GRID.scheme, 0.3), (Scheme(8), 0.01)])
def test_a_layer_survives(name: str, scheme: Scheme, limit: float) -> None:
    """Smoothed and rounded, with an outlier in its input, its output is close to the float layer's."""
    made, hidden = decoder("qwen2", HEADS), torch.randn(3, 31, 48)
    weights = made.weights()
    weights["input_layernorm.weight"][5] *= 20
    algorithm = make_algorithm(name, Grid(scheme, torch.bfloat16), alpha=0.5, heads=HEADS)
    seen, layer = made.collect(0, weights, hidden), dict(weights)
    for group in GROUPS:
        if group.name in algorithm.smoothed and algorithm.smoother is not None:
            members = [layer[f"{member}.weight"] for member in group.members]
            layer, scale = fold(layer, group, algorithm.smoother(group.name, members, seen[group.name]), HEADS)
            seen[group.name] = seen[group.name].divided(scale)
    for group in GROUPS:
        members = [layer[f"{member}.weight"] for member in group.members]
        results = algorithm.rounder(group.members, members, seen[group.name] if algorithm.needs_statistics else None)
        for member, result in zip(group.members, results, strict=True):
            layer[f"{member}.weight"] = result.weight.dequantize()
    expected, actual = made.forward(0, weights, hidden) - hidden, made.forward(0, layer, hidden) - hidden
    assert 0 < float((actual - expected).square().sum() / expected.square().sum()) < limit
