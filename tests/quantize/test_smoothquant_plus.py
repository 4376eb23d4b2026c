"""The search for alpha against one pass over the whole model for each candidate."""

from collections.abc import Iterator

import pytest
import torch

from bladellm_runtime.quantization.scheme import Scheme
from bladellm_tools.quantize.algorithms.fold import Heads, can_fold, fold
from bladellm_tools.quantize.algorithms.grid import Grid
from bladellm_tools.quantize.algorithms.layer import GATE_UP, GROUPS, QKV, LayerWeights
from bladellm_tools.quantize.algorithms.smoothquant_plus import ALPHAS, SmoothQuantPlus, divergence, search_alpha
from tests.quantize.decoders import Decoder, decoder, statistics

HEADS = Heads(4, 2, 12)
GRIDS = [
    Grid(Scheme(4, group_size=16), torch.bfloat16),
    Grid(Scheme(4, group_size=16, symmetric=False), torch.bfloat16),
]


def model_with_outliers(layers: int = 3) -> Decoder:
    """Both norms of a layer make four channels 16 times larger, of which the weights read 16 times less.

    So the model computes what it did without, but smaller columns are not rounded in smaller steps: the others of their
    groups make the steps, and the errors count 16 times. That is what smoothing is for: whatever alpha is, the
    formula's s is 16 times larger in those channels, and undoes them.
    """
    made = decoder("qwen2", HEADS, layers)
    for layer in made.model.layers:
        for group in (QKV, GATE_UP):
            outliers = torch.randperm(48)[:4]
            layer.get_submodule(group.producer).weight.data[outliers] *= 16
            for member in group.members:
                layer.get_submodule(member).weight.data[:, outliers] /= 16
    return made


def quantized(made: Decoder, hidden: torch.Tensor, alpha: float | None, grid: Grid) -> list[torch.Tensor]:
    """Hidden states after each layer of a model smoothed with the float model's statistics, then rounded."""
    exact, found = hidden, [hidden]
    for index in range(len(made.model.layers)):
        layer = made.weights(index)
        seen = {name: statistics(x) for name, x in made.inputs(index, layer, exact).items()}
        exact = made.forward(index, layer, exact)
        for group in GROUPS:
            if alpha is not None:
                weights = [layer[f"{member}.weight"] for member in group.members]
                largest = torch.cat(weights).abs().amax(0)
                layer, _ = fold(layer, group, seen[group.name].absmax ** alpha / largest ** (1 - alpha), HEADS)
        for name in [f"{member}.weight" for group in GROUPS for member in group.members]:
            layer[name] = grid.quantize(layer[name]).dequantize()
        found.append(made.forward(index, layer, found[-1]))
    return found[1:]


def floats(made: Decoder, hidden: torch.Tensor) -> list[torch.Tensor]:
    found = [hidden]
    for index in range(len(made.model.layers)):
        found.append(made.forward(index, made.weights(index), found[-1]))
    return found[1:]


def once(made: Decoder) -> Iterator[tuple[int, LayerWeights]]:
    """The layers, which can be read only once."""
    for index in range(len(made.model.layers)):
        yield index, made.weights(index)


@pytest.mark.parametrize("grid", GRIDS, ids=["symmetric", "asymmetric"])
def test_losses_are_those_of_whole_models(grid: Grid) -> None:
    made, hidden = model_with_outliers(), torch.randn(3, 17, 48)
    found = search_alpha(once(made), hidden, made.forward, made.collect, grid, HEADS)
    assert list(found.losses) == [None, *ALPHAS]
    assert found.losses[None] == pytest.approx(3)
    exact, plain = floats(made, hidden), quantized(made, hidden, None, grid)
    for alpha in (0.0, 0.45, 1.0):
        layers = zip(quantized(made, hidden, alpha, grid), plain, exact, strict=True)
        expected = sum(float((one - e).square().sum() / (p - e).square().sum()) for one, p, e in layers)
        assert found.losses[alpha] == pytest.approx(expected, rel=2e-2)
    assert found.losses[found.best] == min(found.losses.values())
    assert found.best is not None


def test_losses_of_logits() -> None:
    made, hidden, head = model_with_outliers(2), torch.randn(2, 11, 48), torch.nn.Linear(48, 32).requires_grad_(False)
    found = search_alpha(once(made), hidden, made.forward, made.collect, GRIDS[0], HEADS, head, alphas=(0.5,))
    expected = head(floats(made, hidden)[-1]).log_softmax(-1).flatten(0, 1)
    for alpha in (None, 0.5):
        logs = head(quantized(made, hidden, alpha, GRIDS[0])[-1]).log_softmax(-1).flatten(0, 1)
        loss = torch.nn.functional.kl_div(logs, expected, log_target=True, reduction="batchmean")
        assert found.losses[alpha] == pytest.approx(float(loss), rel=2e-2)


def test_nothing_to_smooth_is_left_alone() -> None:
    """Weights on their grid: rounding alone loses nothing, so no candidate is better."""
    made, grid = decoder("llama", HEADS, 2), GRIDS[1]
    codes = {name: torch.randint(-8, 8, tensor.shape) for name, tensor in made.weights().items() if "proj" in name}
    for layer in made.model.layers:
        for name, parameter in layer.named_parameters():
            if name in codes:
                groups = codes[name].view(len(codes[name]), -1, 16)
                groups[:, :, 0], groups[:, :, 1] = -8, 7
                parameter.data.copy_(codes[name] / 64)
    found = search_alpha(once(made), torch.randn(2, 9, 48), made.forward, made.collect, grid, HEADS)
    assert found.best is None
    assert found.losses[None] == 0
    assert min(found.losses[alpha] for alpha in ALPHAS) > 0


def test_groups_that_cannot_fold_are_only_rounded() -> None:
    """Attention whose values are laid out as no fold understands."""
    made, wrong = decoder("llama", HEADS), Heads(8, 2, 6)
    layer, hidden = made.weights(), torch.randn(2, 9, 48)
    assert [can_fold(layer, group, wrong) for group in GROUPS] == [True, False, True, True]
    found = search_alpha(once(made), hidden, made.forward, made.collect, GRIDS[0], wrong, alphas=(0.5,))
    assert 0 < found.losses[0.5] < 10


def test_the_smoother() -> None:
    x, weights = torch.randn(20, 6), [torch.randn(4, 6)]
    assert torch.equal(SmoothQuantPlus(None)("down", weights, statistics(x)), torch.ones(6))
    expected = x.abs().amax(0) ** 0.3 / weights[0].abs().amax(0) ** 0.7
    torch.testing.assert_close(SmoothQuantPlus(0.3)("down", weights, statistics(x)), expected)


def test_divergence_of_equal_models_is_nothing() -> None:
    hidden, head = torch.randn(2, 5, 8), torch.nn.Linear(8, 12).requires_grad_(False)
    assert divergence(hidden, hidden.clone(), head) == 0 < divergence(hidden + 0.1, hidden, head)
