"""LoRA's two operators against their references, and their CUDA kernels interpreted and compiled on the CPU."""

import random

import pytest
import torch
from bladellm_kernels.lora_expand import lora_expand, lora_expand_reference, lora_expand_silu_mul
from bladellm_kernels.lora_shrink import lora_shrink, lora_shrink_reference
from bladellm_kernels.lora_tokens import TILE_TOKENS, TokenAdapters, token_adapters

from tests.kernels.conditions import DEVICES, DTYPES, TOLERANCE
from tests.kernels.hopper import compiled_launches, spilled, waits_before_it_writes
from tests.kernels.interpreted import run_interpreted

SHAPES = [(1, 7, (5,), 3), (6, 300, (40, 9, 9), 8), (2 * TILE_TOKENS + 3, 130, (33, 70), 16)]
"""Tokens, inputs, outputs of each slice, ranks."""
SLOTS = 4


class Problem:
    """A random layer's adapters, in memory whose first stride is not that of its matrices, and tokens that mix them."""

    def __init__(self, tokens, inputs, rows, ranks, dtype, adapter_dtype=None, device="cpu"):
        held = adapter_dtype or dtype
        self.rows, self.dtype = rows, dtype
        self.slots = random.choices(range(-1, SLOTS), k=tokens)
        self.x = torch.randn(tokens, inputs + 2).to(dtype)[:, :inputs]
        width = len(rows) * ranks * inputs
        self.a = (torch.randn(SLOTS, width + 8) / inputs**0.5).to(held)[:, :width].view(SLOTS, -1, inputs)
        size = sum(rows) * ranks
        self.b = (torch.randn(SLOTS, size + 8) / ranks**0.5).to(held)[:, :size].view(SLOTS, -1, ranks)
        self.scales = torch.rand(SLOTS, len(rows)) + 0.5
        self.y = torch.randn(tokens, sum(rows)).to(dtype)
        shrunk = lora_shrink_reference(self.x, self.a, self.scales, self.slots)
        self.expected = lora_expand_reference(shrunk, self.b, rows, self.slots, self.y)
        self.shrunk = shrunk
        for name in ("x", "a", "b", "scales", "y"):
            setattr(self, name, getattr(self, name).to(device))
        self.device = torch.device(device)

    def adapters(self, tiled):
        return token_adapters(self.slots, SLOTS, self.device, tiled)

    def check(self, shrink, expand, adapters, limit=1.0):
        y = torch.full((len(self.y), self.y.shape[1] + 3), torch.nan, dtype=self.dtype, device=self.device)
        out = y[:, : self.y.shape[1]].copy_(self.y)
        h = shrink(self.x, self.a, self.scales, adapters)
        assert h.dtype == torch.float32
        used = [token for token, slot in enumerate(self.slots) if slot >= 0]
        tolerance = 1e-5 if self.dtype == torch.float32 else 2e-3
        torch.testing.assert_close(h.sum(0)[used].cpu().double(), self.shrunk[used], atol=tolerance, rtol=tolerance)
        expand(h, self.b, self.rows, adapters, out)
        tolerance = TOLERANCE[self.dtype] * limit
        torch.testing.assert_close(out.cpu().double(), self.expected, atol=tolerance, rtol=tolerance)
        idle = [token for token, slot in enumerate(self.slots) if slot < 0]
        assert torch.equal(out[idle], self.y[idle]), "tokens without adapter keep their bits"
        assert y[:, self.y.shape[1] :].isnan().all()


@pytest.mark.parametrize("tiled", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("device", DEVICES)
def test_tokens_of_any_adapters(device, dtype, tiled):
    for shape in SHAPES:
        problem = Problem(*shape, dtype, device=device)
        problem.check(lora_shrink, lora_expand, problem.adapters(tiled))


def check_gated(problem, expand_silu_mul, adapters):
    """With the gate's function in float64, of the sums that are not rounded."""
    h = torch.full((3, len(problem.slots), problem.shrunk.shape[1]), torch.nan, device=problem.device)
    used = adapters.slots >= 0
    h[:, used] = (problem.shrunk.float().to(problem.device) / 3)[used]
    gate, up = problem.expected.chunk(2, 1)
    out = expand_silu_mul(h, problem.b, adapters, problem.y.clone())
    assert out.dtype == problem.dtype
    expected = torch.nn.functional.silu(gate) * up
    tolerance = 3 * TOLERANCE[problem.dtype]
    torch.testing.assert_close(out.cpu().double(), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("tiled", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("device", DEVICES)
def test_gated_outputs(device, dtype, tiled):
    for tokens, inputs, rows, ranks in ((1, 9, (5, 5), 3), (TILE_TOKENS + 7, 40, (300, 300), 16)):
        problem = Problem(tokens, inputs, rows, ranks, dtype, device=device)

        def gated(h, b, adapters, y, rows=rows):
            return lora_expand_silu_mul(h, b, rows, adapters, y)

        check_gated(problem, gated, problem.adapters(tiled))


def test_rows_of_tokens_without_adapter_may_hold_anything():
    problem = Problem(9, 20, (6, 4), 3, torch.float32)
    adapters = problem.adapters(False)
    h = lora_shrink(problem.x, problem.a, problem.scales, adapters)
    h[:, adapters.slots < 0] = torch.nan
    lora_expand(h, problem.b, problem.rows, adapters, problem.y)
    torch.testing.assert_close(problem.y.double(), problem.expected, atol=1e-5, rtol=1e-5)


def test_selected_tokens_keep_their_adapters():
    adapters = token_adapters([2, -1, 0, 1], SLOTS, torch.device("cpu"), True)
    selected = adapters.select(torch.tensor([3, 0]))
    assert selected.slots.tolist() == [1, 2]
    assert selected.tiles is None
    assert not selected.ready


def test_tiles_hold_every_token_with_adapter_once():
    for count in (1, TILE_TOKENS, 3 * TILE_TOKENS + 5):
        slots = random.choices([-1, 0, 2, 3], k=count)
        tiles = token_adapters(slots, SLOTS, torch.device("cpu"), True).tiles
        seen = []
        for slot, first, size in tiles.tiles.tolist():
            own = tiles.order[first : first + size].tolist()
            assert size <= TILE_TOKENS
            assert all(slots[token] == slot for token in own)
            seen += own
        assert sorted(seen) == [token for token, slot in enumerate(slots) if slot >= 0]


def test_wrong_arguments_are_refused():
    problem = Problem(4, 8, (6, 2), 3, torch.float32)
    adapters = problem.adapters(False)
    given = (problem.x, problem.a, problem.scales)
    h = lora_shrink(*given, adapters)
    for name, wrong in {
        "x must": (problem.x[:, :-1], *given[1:], adapters),
        "scales": (*given[:2], problem.scales.half(), adapters),
        "slots": (*given, TokenAdapters(adapters.slots[:-1])),
        "floating": (problem.x.int(), *given[1:], adapters),
        "contiguous": (problem.x.t().contiguous().t(), *given[1:], adapters),
    }.items():
        with pytest.raises(ValueError, match=name):
            lora_shrink(*wrong)
    with pytest.raises(ValueError, match="two slices"):
        lora_expand_silu_mul(h, problem.b, (6, 2), adapters, problem.y)
    for name, wrong in {
        "rows": (h, problem.b, (6, 1), adapters, problem.y),
        "y must": (h, problem.b, (6, 2), adapters, problem.y[:, :-1]),
        "h must": (h.half(), problem.b, (6, 2), adapters, problem.y),
        "slots": (h, problem.b, (6, 2), TokenAdapters(adapters.slots[:-1]), problem.y),
    }.items():
        with pytest.raises(ValueError, match=name):
            lora_expand(*wrong)


def interpret(shapes, dtype):
    from bladellm_kernels.lora_expand_triton import launch_expand
    from bladellm_kernels.lora_shrink_triton import launch_shrink

    for shape in shapes:
        problem = Problem(*shape, dtype)
        for tiled in (False, True):
            problem.check(launch_shrink, launch_expand, problem.adapters(tiled))
        late = TokenAdapters(problem.adapters(False).slots, ready=False)
        problem.check(launch_shrink, launch_expand, late)


def interpreted():
    from bladellm_kernels.lora_expand_silu_triton import launch_expand_silu_mul
    from bladellm_kernels.lora_expand_triton import launch_expand
    from bladellm_kernels.lora_shrink_triton import launch_shrink

    problem = Problem(5, 40, (300, 300), 6, torch.float32)
    for ready in (True, False):
        check_gated(problem, launch_expand_silu_mul, TokenAdapters(problem.adapters(False).slots, ready=ready))
    interpret(SHAPES[:1], torch.float32)
    interpret(SHAPES[1:2], torch.float16)
    problem = Problem(TILE_TOKENS + 2, 40, (33, 20), 5, torch.float32, torch.float16)
    problem.check(launch_shrink, launch_expand, problem.adapters(True), limit=5)


def interpreted_all():
    from bladellm_kernels.lora_expand_triton import launch_expand
    from bladellm_kernels.lora_shrink_triton import launch_shrink

    for dtype in (torch.float32, torch.float16):
        interpret(SHAPES, dtype)
    problem = Problem(3, 33 * 128 + 5, (20,), 64, torch.float32)
    problem.check(launch_shrink, launch_expand, problem.adapters(False), limit=5)


@pytest.mark.parametrize("function", ["interpreted", pytest.param("interpreted_all", marks=pytest.mark.slow)])
def test_interpreted(function):
    pytest.importorskip("triton")
    run_interpreted("tests.kernels.test_lora", function)


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.slow)])
def test_kernels_compile_for_hopper(dtype):
    pytest.importorskip("triton")
    from bladellm_kernels.lora_expand_silu_triton import launch_expand_silu_mul
    from bladellm_kernels.lora_expand_triton import launch_expand
    from bladellm_kernels.lora_shrink_triton import launch_shrink

    problem = Problem(5, 512, (256, 64, 64), 16, dtype)
    with compiled_launches() as compiled:
        for tiled in (False, True):
            h = launch_shrink(problem.x, problem.a, problem.scales, problem.adapters(tiled))
            launch_expand(h, problem.b, problem.rows, problem.adapters(tiled), problem.y)
        launch_expand_silu_mul(h[:, :, :32].contiguous(), problem.b[:, :128], problem.adapters(False), problem.y)
    assert len(compiled) == 5
    for name, kernel in compiled.items():
        ptx = kernel.asm["ptx"]
        assert waits_before_it_writes(ptx), name
        assert spilled(ptx) == 0, name
