"""The linear layer of 8-bit codes on both sides on CUDA: x is rounded by one kernel, multiplied by another."""

import torch
import triton

from bladellm_kernels.early_launch import early_launch
from bladellm_kernels.eight_bit_triton import code_product_kernel, round_rows_kernel
from bladellm_kernels.multiprocessors import multiprocessors

_BLOCK, _ROUND_BLOCK = 128, 1024
_LARGEST_TILE = 128
"""Tokens."""

_PROGRAMS_PER_SM = 3
_LEAST_BLOCKS = 4
"""Fewest blocks of K worth a program of its own."""


def eight_bit_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor,
    shifts: torch.Tensor | None,
    bias: torch.Tensor | None,
    input_scale: float | None,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """`steps · (codes @ (scales · weight).T + sum(codes) · shifts) + bias`, x rounded to codes of the weight's type.

    x: [T, K], bfloat16, float16 or float32, any strides. weight: int8 or float8_e4m3fn [N', K'], contiguous, with zeros
    beyond [N, K]. scales, shifts: float32 [N]. bias: [N]. input_scale: the scale of x, None for one a row (largest
    magnitude / 127 or / 448). out: [T, N] of x's type, rows contiguous. Returns out, or a new tensor.
    """
    tokens, columns = x.shape
    rows, width = len(scales), weight.shape[1]
    y = x.new_empty(tokens, rows) if out is None else out
    if not tokens:
        return y
    tile_rows, tile_tokens = 64 if tokens <= 16 else 128, min(_LARGEST_TILE, max(16, triton.next_power_of_2(tokens)))
    tiles, token_tiles = triton.cdiv(rows, tile_rows), triton.cdiv(tokens, tile_tokens)
    splits = _splits(tiles * token_tiles, triton.cdiv(width, _BLOCK), x.device)
    room = tiles * token_tiles * splits * tile_rows * tile_tokens if splits > 1 else 0
    integers = weight.dtype == torch.int8
    codes = torch.empty(tokens, width, dtype=weight.dtype, device=x.device)
    steps, sums = x.new_empty(2, tokens, dtype=torch.float32)
    arrived = x.new_empty(tiles * token_tiles, dtype=torch.int32)
    round_rows_kernel[(tokens,)](
        x, codes, steps, sums, arrived, x.stride(0), x.stride(1), columns, width, len(arrived), input_scale or 0.0,
        LARGEST=127.0 if integers else 448.0, STATIC=input_scale is not None, BLOCK=_ROUND_BLOCK, num_warps=4,
        **early_launch(x.device),
    )  # fmt: skip
    code_product_kernel[(tiles * splits, token_tiles)](
        codes, weight, steps, sums, scales, scales if shifts is None else shifts, y if bias is None else bias, y,
        x.new_empty(room, dtype=torch.int32 if integers else torch.float32), arrived,
        weight.stride(0), y.stride(0), tokens, rows, width, splits,
        ROWS=tile_rows, TOKENS=tile_tokens, BLOCK=_BLOCK, SPLIT=splits > 1, STAGES=4, EVEN=width % _BLOCK == 0,
        HAS_SHIFTS=shifts is not None, HAS_BIAS=bias is not None, num_warps=tile_rows // 16,
        enable_fp_fusion=False,  # A row is the same whatever tile it is in.
        **early_launch(x.device),
    )  # fmt: skip
    return y


def _splits(tiles: int, blocks: int, device: torch.device) -> int:
    splits = max(1, min(multiprocessors(device) * _PROGRAMS_PER_SM // tiles, blocks // _LEAST_BLOCKS))
    # Every program has blocks: shares are rounded up.
    return -(-blocks // -(-blocks // splits))
