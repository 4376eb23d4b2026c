"""What the benchmark of a prefill's linear layers times as a step is the same step by every way."""

from pathlib import Path

import pytest
import torch
from bladellm_kernels.linear import linear_reference, linear_silu_mul_reference

pytest.importorskip("triton")
BENCHMARKS = Path(__file__).parents[2] / "kernels" / "benchmarks"
SHAPES = {"qkv": (48, 32), "o": (32, 32), "gate-up": (112, 32), "down": (32, 56)}


def by_definition(layers) -> torch.Tensor:
    """The step in float64."""

    def normed(stream: torch.Tensor) -> torch.Tensor:
        return stream / (stream.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * layers.norm.double()

    stream = layers.x.double() + layers.stream.double()
    for _, output, gate_up, down in zip(*layers.weights.values(), strict=True):
        stream = stream + linear_reference(layers.attended, output)
        stream = stream + linear_reference(linear_silu_mul_reference(normed(stream), gate_up), down)
    return normed(stream)


def launch(x, weight, out, parts) -> None:
    """In the kernel's place."""
    out.copy_((linear_silu_mul_reference if parts == 2 else linear_reference)(x, weight))


@pytest.mark.parametrize("gated", [False, True])
def test_ways_are_checked_before_they_are_timed(gated, monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    import prefill_linears as module

    monkeypatch.setattr(module, "launch_many_rows", launch)
    problem = module.problem_of(56, 40, 77, gated, "random", device="cpu")
    ways = [way for way in module.WAYS if module.applies(way, gated)]
    assert len(ways) == len(module.WAYS) - (1 if gated else 2)
    for way in ways:
        module.check(problem, way)
        right = module.WAYS[way]
        monkeypatch.setitem(module.WAYS, way, lambda *of, right=right: 1.1 * right(*of) + 0.1)
        with pytest.raises(AssertionError, match=way):
            module.check(problem, way)


def test_every_way_computes_the_step(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    import prefill_linear_step as module

    monkeypatch.setattr(module, "launch_many_rows", launch)
    layers = module.random_layers(3, 30, SHAPES, "random", device="cpu").of_rows(21)
    expected, stream = by_definition(layers), layers.stream.clone()
    for way in module.STEPS:
        layers.stream.copy_(stream)
        found = module.step(layers, way).double()
        assert (found - expected).abs().max() < 0.04 * expected.abs().max(), way
