"""The CUDA kernel of `stacked_expand` and `stacked_expand_add`: a program for a block of a token's outputs."""

import torch
import triton
import triton.language as tl

from bladellm_kernels.delayed_norm import DelayedNorm
from bladellm_kernels.early_launch import early_launch, let_next_start, wait_for_inputs
from bladellm_kernels.lora_expand_triton import blocks_of, slice_outputs, three
from bladellm_kernels.lora_stacked import StackedOutputs
from bladellm_kernels.power_of_two import power_of_two

TILE_NUMBERS, LEAST_OUTPUTS = 8192, 32
"""Numbers of B that a program holds; outputs of it at least."""


@triton.jit  # type: ignore[untyped-decorator]
def own_ranks(
    y: tl.tensor, number: tl.tensor, slot: tl.tensor, scale: tl.tensor, SLICES: tl.constexpr, RANKS: tl.constexpr,
    BLOCK_R: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """scale · h of slice `number` of a token's slot, float32 [BLOCK_R], 0 without one. y: at the token's first h."""
    rank = tl.arange(0, BLOCK_R)
    place = y + (slot * SLICES + number) * RANKS + rank
    return tl.load(place, mask=(rank < RANKS) & (slot >= 0), other=0.0).to(tl.float32) * scale


@triton.jit  # type: ignore[untyped-decorator]
def front_factor(
    squares: tl.tensor, token: tl.tensor, parts: tl.tensor, inputs: tl.tensor, eps: tl.tensor, BLOCK_P: tl.constexpr
) -> tl.tensor:
    """What the outputs of a token are multiplied by where a delayed norm is in front."""
    part = tl.arange(0, BLOCK_P)
    found = tl.load(squares + token.to(tl.int64) * parts + part, mask=part < parts, other=0.0)
    return tl.rsqrt(tl.sum(found, 0) / inputs + eps)


@triton.jit  # type: ignore[untyped-decorator]
def stacked_rows_kernel(
    y: tl.tensor, b: tl.tensor, scales: tl.tensor, slots: tl.tensor, bias: tl.tensor, squares: tl.tensor,
    residual: tl.tensor, norm_weight: tl.tensor, out: tl.tensor, weighted: tl.tensor, out_squares: tl.tensor,
    rows_0: tl.tensor, rows_1: tl.tensor, rows_2: tl.tensor, y_stride: tl.tensor, b_stride: tl.tensor,
    scale_stride: tl.tensor, residual_stride: tl.tensor, out_stride: tl.tensor, parts: tl.tensor, inputs: tl.tensor,
    eps: tl.tensor, SLICES: tl.constexpr, RANKS: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr, READY: tl.constexpr, EARLY: tl.constexpr,
) -> None:  # fmt: skip
    """Program (token, block of outputs). B is loaded before y is ready. bias, squares, residual, norm_weight, weighted
    and out_squares are None where there are none, the last three together."""
    let_next_start(EARLY)
    if not READY:
        wait_for_inputs(EARLY)
    token, outputs = tl.program_id(0).to(tl.int64), rows_0 + rows_1 + rows_2
    slot = tl.load(slots + token).to(tl.int64)
    number, output, inside = slice_outputs(tl.program_id(1), rows_0, rows_1, rows_2, BLOCK_N)
    rank = tl.arange(0, BLOCK_R)
    place = b + slot * b_stride + output[:, None] * RANKS + rank[None, :]
    weight = tl.load(place, mask=inside[:, None] & ((rank < RANKS) & (slot >= 0))[None, :], other=0.0)
    scale = tl.load(scales + slot * scale_stride + number, mask=slot >= 0, other=0.0)
    if norm_weight is not None:
        norm_factor = tl.load(norm_weight + output, mask=inside, other=0.0).to(tl.float32)
    if bias is not None:
        shift = tl.load(bias + output, mask=inside, other=0.0).to(tl.float32)
    if READY:
        wait_for_inputs(EARLY)
    source = y + token * y_stride
    h = own_ranks(source + outputs, number, slot, scale, SLICES, RANKS, BLOCK_R)
    total = tl.load(source + output, mask=inside, other=0.0).to(tl.float32)
    total += tl.sum(weight.to(tl.float32) * h[None, :], 1)
    if squares is not None:
        total *= front_factor(squares, token, parts, inputs, eps, BLOCK_P)
    if bias is not None:
        total += shift
    if residual is not None:
        total += tl.load(residual + token * residual_stride + output, mask=inside, other=0.0).to(tl.float32)
    rounded = total.to(out.dtype.element_ty)
    tl.store(out + token * out_stride + output, rounded, mask=inside)
    if norm_weight is not None:
        row = tl.where(inside, rounded.to(tl.float32), 0.0)
        tl.store(weighted + token * outputs + output, row * norm_factor, mask=inside)
        tl.store(out_squares + token * tl.num_programs(1) + tl.program_id(1), tl.sum(row * row, 0))


def launch_stacked_rows(
    given: StackedOutputs,
    out: torch.Tensor,
    residual: torch.Tensor | None = None,
    norm_weight: torch.Tensor | None = None,
    behind: DelayedNorm | None = None,
) -> None:
    """Write the outputs, with residual where there is one, to `out`, may be residual; and their norm to `behind`, whose
    squares have as many parts as there are `stacked_blocks`."""
    if not len(out):
        return
    front, parts, inputs, front_eps = front_of(given)
    weighted, squares = (None, None) if behind is None else (behind.weighted, behind.squares)
    stacked_rows_kernel[(len(out), stacked_blocks(given))](
        given.y, given.b, given.scales, given.adapters.slots, given.bias, front, residual, norm_weight,
        out, weighted, squares, *three(given.rows), given.y.stride(0), given.b.stride(0), given.scales.stride(0),
        0 if residual is None else residual.stride(0), out.stride(0), parts, inputs, front_eps,
        SLICES=len(given.rows), RANKS=given.b.shape[2], BLOCK_P=power_of_two(parts),
        BLOCK_R=power_of_two(given.b.shape[2]), BLOCK_N=block_of(given, TILE_NUMBERS), READY=given.adapters.ready,
        num_warps=4, **early_launch(out.device),
    )  # fmt: skip


def stacked_blocks(given: StackedOutputs) -> int:
    """Programs that a token's outputs are divided among."""
    return blocks_of(given.rows, block_of(given, TILE_NUMBERS))


def block_of(given: StackedOutputs, numbers: int) -> int:
    """Outputs of a program that holds about so many numbers of B."""
    return max(LEAST_OUTPUTS, numbers // power_of_two(given.b.shape[2]))


def front_of(given: StackedOutputs) -> tuple[torch.Tensor | None, int, int, float]:
    """Of the norm in front: squares, their parts, the inputs that they are of, and eps."""
    if given.norm is None:
        return None, 1, 1, 0.0
    return given.norm.squares, given.norm.squares.shape[1], given.norm.weighted.shape[1], given.norm.eps
