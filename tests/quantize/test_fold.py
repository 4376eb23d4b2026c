"""Folding leaves what a decoder layer computes as it was; compared with transformers' layers in float32."""

import pytest
import torch

from bladellm_tools.quantize.algorithms.fold import Heads, can_fold, fold, share_heads
from bladellm_tools.quantize.algorithms.layer import DOWN, GATE_UP, GROUPS, OUTPUT, QKV, LinearGroup
from tests.quantize.decoders import FAMILIES, decoder

HEADS = (Heads(4, 2, 12), Heads(6, 1, 8), Heads(3, 3, 10))


def random_scale(size: int) -> torch.Tensor:
    """Positive, over three decades."""
    return 10 ** torch.empty(size).uniform_(-1.5, 1.5)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("heads", HEADS)
def test_the_layer_computes_the_same(family: str, heads: Heads) -> None:
    made = decoder(family, heads)
    weights, hidden = made.weights(), torch.randn(2, 13, 48)
    expected = made.forward(0, weights, hidden)
    folded = weights
    for group in GROUPS:
        assert can_fold(folded, group, heads)
        before = folded
        columns = folded[f"{group.members[0]}.weight"].shape[1]
        folded, _ = fold(folded, group, random_scale(columns), heads)
        changed = {name for name in folded if not torch.equal(folded[name], before[name])}
        bias = {f"{group.producer}.bias"} & set(folded)
        assert changed == {f"{module}.weight" for module in (*group.members, group.producer)} | bias
    torch.testing.assert_close(made.forward(0, folded, hidden), expected, rtol=1e-5, atol=1e-5 * expected.abs().max())


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("group", GROUPS, ids=lambda group: group.name)
def test_inputs_are_divided_by_the_scale_returned(family: str, group: LinearGroup) -> None:
    heads = HEADS[0]
    made = decoder(family, heads)
    weights, hidden = made.weights(), torch.randn(1, 9, 48)
    before = made.inputs(0, weights, hidden)[group.name]
    folded, exact = fold(weights, group, random_scale(before.shape[1]), heads)
    torch.testing.assert_close(made.inputs(0, folded, hidden)[group.name] * exact, before, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("group", [QKV, GATE_UP], ids=lambda group: group.name)
def test_a_stored_norm_loses_nothing(dtype: torch.dtype, group: LinearGroup) -> None:
    weights = {name: tensor.to(dtype) for name, tensor in decoder("llama", HEADS[0]).weights().items()}
    old, scale = weights[f"{group.producer}.weight"], random_scale(48)
    folded, exact = fold(weights, group, scale, HEADS[0])
    new = folded[f"{group.producer}.weight"]
    assert new.dtype == dtype
    torch.testing.assert_close(new.float() * exact, old.float(), rtol=2e-7, atol=0)
    torch.testing.assert_close(exact, scale, rtol=torch.finfo(dtype).eps, atol=0)
    for member in group.members:
        expected = weights[f"{member}.weight"].double() * (old.double() / new.double())
        torch.testing.assert_close(folded[f"{member}.weight"].double(), expected, rtol=3e-7, atol=0)


def test_channels_a_norm_cannot_store_keep_their_scale() -> None:
    weights = decoder("llama", HEADS[0]).weights()
    norm = torch.full((48,), 0.5, dtype=torch.float16)
    norm[0], norm[1] = 0, -0.25
    weights["input_layernorm.weight"] = norm
    scale = torch.full((48,), 4.0)
    scale[2], scale[3] = 1e20, 1e-20
    folded, exact = fold(weights, QKV, scale, HEADS[0])
    assert exact[:5].tolist() == [1, 4, 1, 1, 4]
    assert folded["input_layernorm.weight"][:5].tolist() == [0, -0.0625, 0.5, 0.5, 0.125]


def test_linear_producers_become_float32_and_the_layer_is_left_alone() -> None:
    weights = {name: tensor.bfloat16() for name, tensor in decoder("qwen2", HEADS[0]).weights().items()}
    kept = {name: tensor.clone() for name, tensor in weights.items()}
    folded, exact = fold(weights, DOWN, random_scale(80), HEADS[0])
    product = folded["mlp.up_proj.weight"] * exact.unsqueeze(1)
    torch.testing.assert_close(product, kept["mlp.up_proj.weight"].float(), rtol=3e-7, atol=0)
    folded, _ = fold(weights, OUTPUT, random_scale(48), HEADS[0])
    assert folded["self_attn.v_proj.weight"].dtype == folded["self_attn.v_proj.bias"].dtype == torch.float32
    assert all(torch.equal(weights[name], kept[name]) for name in kept)


def test_query_heads_share_the_largest_scale() -> None:
    heads = Heads(query=6, kv=2, dim=5)
    scale = random_scale(30)
    shared = share_heads(scale, heads).tolist()
    for query in range(6):
        for channel in range(5):
            first = query // 3 * 3
            expected = max(float(scale[head * 5 + channel]) for head in range(first, first + 3))
            assert shared[query * 5 + channel] == expected
    assert torch.equal(share_heads(scale, Heads(6, 6, 5)), scale)


def test_groups_that_cannot_fold() -> None:
    heads = HEADS[0]
    weights = decoder("llama", heads).weights()
    assert not can_fold({name: tensor for name, tensor in weights.items() if "layernorm" not in name}, QKV, heads)
    assert not can_fold({name: tensor for name, tensor in weights.items() if "down" not in name}, DOWN, heads)
    assert not can_fold(weights | {"mlp.up_proj.weight": torch.ones(81, 48)}, DOWN, heads)
    assert not can_fold(weights, OUTPUT, Heads(4, 4, 12))
    assert not can_fold(weights, OUTPUT, Heads(8, 2, 12))
