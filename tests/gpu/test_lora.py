"""On a CUDA device: one captured step serves any mix of adapters, and slots are filled beside the steps."""

import random

import pytest
import torch
from bladellm_kernels.lora_expand import lora_expand, lora_expand_reference
from bladellm_kernels.lora_shrink import lora_shrink, lora_shrink_reference
from bladellm_kernels.lora_tokens import TILE_TOKENS, AdapterTiles, TokenAdapters, fill_tiles, most_tiles

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
