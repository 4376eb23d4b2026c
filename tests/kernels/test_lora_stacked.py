"""LoRA with A behind the layer's weight: each operator against float64, on every device, interpreted and compiled."""

import random

import pytest
import torch
from bladellm_kernels.delayed_norm import DelayedNorm
from bladellm_kernels.lora_expand import lora_expand_reference
from bladellm_kernels.lora_stacked import (
    StackedOutputs,
    stacked_expand,
    stacked_expand_add,
    stacked_expand_silu_mul,
)
from bladellm_kernels.lora_tokens import TokenAdapters, token_adapters

from tests.kernels.conditions import DEVICES, DTYPES, TOLERANCE
from tests.kernels.hopper import compiled_launches, spilled, waits_before_it_writes
from tests.kernels.interpreted import run_interpreted

SLOTS, EPS = 4, 1e-5
SHAPES = [(1, (5,), 3), (6, (40, 9, 9), 8), (35, (300, 300), 16), (9, (1100,), 16)]
"""Tokens, outputs of each slice, ranks."""


class Problem:
    """A layer's outputs in which all that is not a token's own is NaN, and what is to come of them in float64."""

    def __init__(self, tokens, rows, ranks, dtype, device="cpu", bias=False, normed=False, ready=True):
        outputs, count = sum(rows), len(rows) * ranks
        self.dtype, self.rows, self.device = dtype, rows, device
        slots = random.choices(range(-1, SLOTS), k=tokens)
        y = torch.randn(tokens, outputs).to(dtype)
        h = torch.randn(tokens, count).to(dtype)
        wide = torch.full((tokens, outputs + SLOTS * count + 5), torch.nan, dtype=dtype)
        wide[:, :outputs] = y
        for token, slot in enumerate(slots):
            if slot >= 0:
                wide[token, outputs + slot * count :][:count] = h[token]
        b = (torch.randn(SLOTS, outputs * ranks + 8) / ranks**0.5).to(dtype)[:, :-8].view(SLOTS, outputs, ranks)
        scales = torch.rand(SLOTS, len(rows) + 2)[:, : len(rows)] + 0.5
        own = scales[torch.tensor(slots)].repeat_interleave(ranks, 1).double() * h.double()
        self.expected = lora_expand_reference(own, b, rows, slots, y)
        norm = None
        if normed:
            norm = DelayedNorm(torch.randn(tokens, 13).to(dtype), torch.rand(tokens, 3) + 0.5, EPS)
            self.expected *= torch.rsqrt(norm.squares.double().sum(1, keepdim=True) / 13 + EPS)
            norm = DelayedNorm(norm.weighted.to(device), norm.squares.to(device), EPS)
        shift = torch.randn(outputs).to(dtype) if bias else None
        self.expected += 0 if shift is None else shift.double()
        adapters = TokenAdapters(token_adapters(slots, SLOTS, torch.device(device), False).slots, ready=ready)
        shift = None if shift is None else shift.to(device)
        given = (wide.to(device), b.to(device), scales.to(device), rows, adapters, shift, norm)
        self.given = StackedOutputs(*given)
        self.residual = torch.randn(tokens, outputs + 3).to(dtype).to(device)[:, :outputs]
        self.norm_weight = torch.randn(outputs).to(dtype).to(device)

    def near(self, found, expected, factor=1.0):
        tolerance = factor * TOLERANCE[self.dtype]
        torch.testing.assert_close(found.cpu().double(), expected, atol=tolerance, rtol=tolerance)

    def check(self, expand=stacked_expand):
        target = torch.full((len(self.expected), sum(self.rows) + 2), torch.nan, dtype=self.dtype, device=self.device)
        out = expand(self.given, target[:, :-2])
        assert out.data_ptr() == target.data_ptr()
        self.near(out, self.expected)
        assert target[:, -2:].isnan().all()

    def check_gated(self, expand=stacked_expand_silu_mul):
        gate, up = self.expected.chunk(2, 1)
        out = expand(self.given)
        assert out.dtype == self.dtype
        self.near(out, torch.nn.functional.silu(gate) * up, 3)

    def check_add(self, expand=stacked_expand_add):
        before = self.residual.cpu().double()
        norm = expand(self.given, self.residual, self.norm_weight, EPS)
        self.near(self.residual, before + self.expected, 2)
        # The norm is of the stream as it was rounded.
        stream = self.residual.cpu().double()
        squares = stream.square().mean(1, keepdim=True)
        expected = stream * torch.rsqrt(squares + EPS) * self.norm_weight.cpu().double()
        self.near(norm.normed(), expected, 2)
        assert norm.weighted.is_contiguous()


CASES = [(False, False), (True, False), (False, True), (True, True)]
"""Whether there is a bias, and a norm in front."""


@pytest.mark.parametrize(("bias", "normed"), CASES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("device", DEVICES)
def test_tokens_of_any_adapters(device, dtype, bias, normed):
    for shape in SHAPES:
        problem = Problem(*shape, dtype, device, bias, normed)
        problem.check()
        problem.near(stacked_expand(problem.given), problem.expected)
        if len(shape[1]) == 2:
            problem.check_gated()
        if len(shape[1]) == 1:
            problem.check_add()


@pytest.mark.parametrize("device", DEVICES)
def test_tokens_without_adapters_keep_their_bits(device):
    problem = Problem(7, (40,), 8, torch.bfloat16, device)
    problem.given.adapters.slots.fill_(-1)
    assert torch.equal(stacked_expand(problem.given), problem.given.y[:, :40])


def test_wrong_arguments_are_refused():
    problem = Problem(4, (6, 2), 3, torch.float32)
    given = problem.given
    adapters = given.adapters
    for name, changes in {
        "b must": {"rows": (6, 1)},
        "y must": {"y": given.y[:, :-6]},
        "scales": {"scales": given.scales.half()},
        "not in tiles": {"adapters": token_adapters([0] * 4, SLOTS, torch.device("cpu"), True)},
        "4 tokens": {"adapters": TokenAdapters(adapters.slots[:-1])},
        "bias": {"bias": torch.zeros(7)},
        "norm": {"norm": DelayedNorm(torch.zeros(3, 4), torch.zeros(3, 1), EPS)},
        "floating": {"y": given.y.int()},
    }.items():
        fields = {field: getattr(given, field) for field in StackedOutputs.__slots__} | changes
        with pytest.raises(ValueError, match=name):
            stacked_expand(StackedOutputs(**fields))
    with pytest.raises(ValueError, match="two slices"):
        stacked_expand_silu_mul(given)
    with pytest.raises(ValueError, match="one slice"):
        stacked_expand_add(given, problem.residual, problem.norm_weight, EPS)
    with pytest.raises(ValueError, match="norm_weight"):
        stacked_expand_add(given, problem.residual, problem.norm_weight[1:], EPS)
    with pytest.raises(ValueError, match="out must"):
        stacked_expand(given, problem.residual[1:])


def launched(given, out):
    from bladellm_kernels.lora_stacked_triton import launch_stacked_rows

    launch_stacked_rows(given, out)
    return out


def launched_gated(given):
    from bladellm_kernels.lora_stacked_silu_triton import launch_stacked_silu_mul

    out = torch.full((len(given.y), given.rows[0]), torch.nan, dtype=given.y.dtype)
    launch_stacked_silu_mul(given, out)
    return out


def launched_tiles(given):
    from bladellm_kernels.lora_stacked_tiles_triton import launch_stacked_silu_tiles

    out = torch.full((len(given.y), given.rows[0]), torch.nan, dtype=given.y.dtype)
    launch_stacked_silu_tiles(given, out)
    return out


def launched_add(given, residual, norm_weight, eps):
    from bladellm_kernels.lora_stacked_triton import launch_stacked_rows, stacked_blocks

    squares = torch.full((len(residual), stacked_blocks(given)), torch.nan)
    norm = DelayedNorm(torch.full(residual.shape, torch.nan, dtype=residual.dtype), squares, eps)
    launch_stacked_rows(given, residual, residual, norm_weight, norm)
    return norm


def check_launches(shape, dtype, bias, normed, ready=True):
    problem = Problem(*shape, dtype, "cpu", bias, normed, ready)
    problem.check(launched)
    if len(shape[1]) == 2:
        problem.check_gated(launched_gated)
        if shape[2] in (8, 64):
            problem.check_gated(launched_tiles)
    if len(shape[1]) == 1:
        problem.check_add(launched_add)


def interpreted():
    for shape, case in zip([*SHAPES[:2], (5, (300, 300), 16), SHAPES[3]], CASES, strict=True):
        check_launches(shape, torch.float32, *case, ready=not case[0])
    check_launches((3, (6, 6), 5), torch.float16, True, False)
    check_launches((33, (70, 70), 8), torch.float32, False, True, ready=False)
    check_launches((5, (9, 9), 64), torch.float16, True, False)


def interpreted_all():
    for shape in SHAPES:
        for case in CASES:
            for dtype in (torch.float32, torch.float16):
                check_launches(shape, dtype, *case)
                check_launches(shape, dtype, *case, ready=False)


@pytest.mark.parametrize("function", ["interpreted", pytest.param("interpreted_all", marks=pytest.mark.slow)])
def test_interpreted(function):
    pytest.importorskip("triton")
    run_interpreted("tests.kernels.test_lora_stacked", function)


@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float32, marks=pytest.mark.slow)])
def test_kernels_compile_for_hopper(dtype):
    """Those of a decode step of a model without biases, which neither spill nor write before they have waited."""
    pytest.importorskip("triton")
    found = {}
    if dtype == torch.bfloat16:  # of half precision alone
        with compiled_launches() as compiled:
            launched_tiles(Problem(32, (512, 512), 16, dtype, normed=True).given)
        found |= {("tiles", True, kernel): text for kernel, text in compiled.items()}
    for name, rows, launch in (("qkv", (256, 64, 64), launched), ("gate_up", (512, 512), launched_gated)):
        for normed in (False, True):
            given = Problem(32, rows, 16, dtype, normed=normed).given
            with compiled_launches() as compiled:
                launch(given, *([torch.empty(32, sum(rows), dtype=dtype)] if launch is launched else []))
            found |= {(name, normed, kernel): text for kernel, text in compiled.items()}
    problem = Problem(32, (4096,), 16, dtype)
    with compiled_launches() as compiled:
        launched_add(problem.given, problem.residual, problem.norm_weight, EPS)
    found |= {("output", False, kernel): text for kernel, text in compiled.items()}
    assert len(found) == 5 + (dtype == torch.bfloat16)
    for name, kernel in found.items():
        ptx = kernel.asm["ptx"]
        assert waits_before_it_writes(ptx), name
        assert spilled(ptx) == 0, name
