"""On a CUDA device: one captured step serves any mix of adapters, and slots are filled beside the steps."""

import random

import pytest
import torch
from bladellm_kernels.delayed_norm import delayed_norm
from bladellm_kernels.linear import linear
from bladellm_kernels.lora_expand import lora_expand, lora_expand_reference
from bladellm_kernels.lora_shrink import lora_shrink, lora_shrink_reference
from bladellm_kernels.lora_stacked import (
    StackedOutputs,
    stacked_expand,
    stacked_expand_add,
    stacked_expand_silu_mul,
)
from bladellm_kernels.lora_tokens import TILE_TOKENS, AdapterTiles, TokenAdapters, fill_tiles, most_tiles

from bladellm_runtime.engine.cuda_capture import CudaCapture

pytestmark = pytest.mark.gpu
SLOTS, INPUTS, ROWS, RANKS = 5, 1000, (640, 128, 128), 16


def weights():
    a = torch.randn(SLOTS, len(ROWS) * RANKS, INPUTS) / INPUTS**0.5
    b = torch.randn(SLOTS, sum(ROWS), RANKS) / RANKS**0.5
    return a.bfloat16().cuda(), b.bfloat16().cuda(), torch.rand(SLOTS, len(ROWS)).cuda() + 0.5


@pytest.mark.parametrize(("tokens", "tiled"), [(1, False), (33, False), (5 * TILE_TOKENS + 7, True)])
def test_a_captured_step_serves_any_mix(tokens, tiled):
    a, b, scales = weights()
    x = torch.randn(tokens, INPUTS).bfloat16().cuda()
    y = torch.empty(tokens, sum(ROWS)).bfloat16().cuda()
    slots = torch.full((tokens,), -1).cuda()
    order = torch.zeros(tokens, dtype=torch.int64).cuda()
    tiles = torch.zeros(most_tiles(tokens, SLOTS), 3, dtype=torch.int64).cuda()
    adapters = TokenAdapters(slots, AdapterTiles(order, tiles) if tiled else None)

    def step():
        lora_expand(lora_shrink(x, a, scales, adapters), b, ROWS, adapters, y)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for most in (0, 1, SLOTS):
        mix = torch.tensor(random.choices(range(-1, most), k=tokens))
        listed, filled = torch.empty(tokens, dtype=torch.int64), torch.empty(tiles.shape, dtype=torch.int64)
        fill_tiles(mix.numpy(), listed.numpy(), filled.numpy())
        for static, values in ((slots, mix), (order, listed), (tiles, filled)):
            static.copy_(values)
        x.copy_(torch.randn(tokens, INPUTS))
        before = torch.randn(tokens, sum(ROWS)).bfloat16()
        y.copy_(before)
        graph.replay()
        shrunk = lora_shrink_reference(x.cpu(), a.cpu(), scales.cpu(), mix.tolist())
        expected = lora_expand_reference(shrunk, b.cpu(), ROWS, mix.tolist(), before)
        torch.testing.assert_close(y.cpu().double(), expected, atol=4e-2, rtol=4e-2)
        idle = mix < 0
        assert torch.equal(y.cpu()[idle], before[idle])


KINDS = {"qkv": (640, 128, 128), "gate_up": (1280, 1280), "down": (1024,)}
"""Outputs of each slice of a layer, by what follows it."""


def expected_of(kind, linear_of, shrunk_of, b, slots, residual, eps):
    """In float64: what a captured step gives, of the layer's outputs and of h."""
    total = lora_expand_reference(shrunk_of, b.cpu(), KINDS[kind], slots, linear_of)
    if kind == "gate_up":
        gate, up = total.chunk(2, 1)
        return torch.nn.functional.silu(gate) * up
    if kind == "down":
        stream = residual.cpu().double() + total
        return stream * torch.rsqrt(stream.square().mean(1, keepdim=True) + eps)
    return total


@pytest.mark.parametrize("tokens", [1, 7, 33, 200])
@pytest.mark.parametrize("kind", KINDS)
def test_a_captured_step_with_stacked_a_serves_any_mix(kind, tokens):
    """With the norm in front delayed, but for the layer that adds to the stream. Many rows of gate and up read B once,
    few rows each by itself."""
    rows, eps, inputs = KINDS[kind], 1e-5, 1024
    outputs, ranks = sum(rows), len(rows) * RANKS
    weight = (torch.randn(-(-(outputs + SLOTS * ranks) // 16) * 16, inputs) / inputs**0.5).bfloat16().cuda()
    a = weight[outputs : outputs + SLOTS * ranks].view(SLOTS, ranks, inputs)
    b = (torch.randn(SLOTS, outputs, RANKS) / RANKS**0.5).bfloat16().cuda()
    scales, ones = torch.rand(SLOTS, len(rows)).cuda() + 0.5, torch.ones(max(inputs, outputs)).bfloat16().cuda()
    x, residual = (torch.randn(tokens, width).bfloat16().cuda() for width in (inputs, outputs))
    slots = torch.full((tokens,), -1).cuda()

    def step():
        front = None if kind == "down" else delayed_norm(x, ones[:inputs], eps)
        y = linear(x if front is None else front.weighted, weight, measured=outputs)
        given = StackedOutputs(y, b, scales, rows, TokenAdapters(slots), None, front)
        if kind == "down":
            return stacked_expand_add(given, residual, ones[:outputs], eps).normed()
        return stacked_expand_silu_mul(given) if kind == "gate_up" else stacked_expand(given)

    out = torch.empty_like(step())
    # Memory of linear layers belongs to a stream, which must be the one of the capture.
    replay = CudaCapture(torch.device("cuda"))(lambda: out.copy_(step()))
    for most in (0, 1, SLOTS):
        mix = random.choices(range(-1, most), k=tokens)
        slots.copy_(torch.tensor(mix))
        a[most:] = torch.nan
        x.copy_(torch.randn(tokens, inputs))
        residual.copy_(torch.randn(tokens, outputs))
        before = residual.clone()
        replay()
        given = x.cpu().double()
        if kind != "down":
            given = given * torch.rsqrt(given.square().mean(1, keepdim=True) + eps)
        shrunk = lora_shrink_reference(given, a.cpu(), scales.cpu(), mix)
        layer = given @ weight[:outputs].cpu().double().t()
        expected = expected_of(kind, layer, shrunk, b, mix, before, eps)
        torch.testing.assert_close(out.cpu().double(), expected, atol=8e-2, rtol=8e-2)
        a.copy_(torch.randn(a.shape) / inputs**0.5)
