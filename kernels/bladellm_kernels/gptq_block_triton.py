"""The CUDA kernel of `gptq_block`: a program holds a tile of rows of the whole block in registers."""

import torch
import triton
import triton.language as tl

TILE_ROWS = 16
WARPS = 4


@triton.jit  # type: ignore[untyped-decorator]
def gptq_block_kernel(
    weight: tl.tensor,
    factor: tl.tensor,
    scales: tl.tensor,
    zeros: tl.tensor,
    groups: tl.tensor,
    codes: tl.tensor,
    errors: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    weight_stride: tl.tensor,
    factor_stride: tl.tensor,
    scale_row_stride: tl.tensor,
    scale_group_stride: tl.tensor,
    lowest: tl.tensor,
    highest: tl.tensor,
    middle: tl.tensor,
    HAS_ZEROS: tl.constexpr,
    FP8: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """zeros has the strides of scales; codes and errors are contiguous [rows, columns]."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    # Columns before i hold their errors, the others the weights still to round.
    tile = tl.load(weight + row[:, None] * weight_stride + column[None, :], mask=inside, other=0.0)
    levels = tl.zeros((ROWS, COLUMNS), tl.float32)
    for i in range(COLUMNS):
        current = (column == i)[None, :]
        value = tl.sum(tl.where(current, tile, 0.0), axis=1)
        place = row * scale_row_stride + tl.load(groups + i, mask=i < columns, other=0) * scale_group_stride
        scale = tl.load(scales + place, mask=row < rows, other=1.0)
        offset = tl.zeros((ROWS,), tl.float32) + middle
        if HAS_ZEROS:
            offset = tl.load(zeros + place, mask=row < rows, other=0).to(tl.float32)
        # The bounds are whole numbers: saturating before rounding gives the same codes.
        level = tl.minimum(tl.maximum(tl.div_rn(value, scale), lowest - offset), highest - offset)
        if FP8:
            # The power of two at or below |level|, but not below e4m3's least normal number 2^-6; its numbers there
            # are 2^-3 of it apart, which is the distance of floats near 1.5 · 2^20 times it.
            power = (level.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
            unit = tl.maximum(power, 0.015625) * 1572864.0
        else:
            # Floats near 1.5 · 2^23 are whole numbers: adding rounds, halves to even.
            unit = 12582912.0
        level = (level + unit) - unit
        pivot = tl.load(factor + i * factor_stride + i, mask=i < columns, other=1.0)
        error = tl.div_rn(value - level * scale, pivot)
        later = (column > i) & (column < columns)
        spread = tl.load(factor + i * factor_stride + column, mask=later, other=0.0)
        tile = tl.where(current, error[:, None], tile - error[:, None] * spread[None, :])
        levels = tl.where(current, (level + offset)[:, None], levels)
    place = row[:, None] * columns + column[None, :]
    tl.store(codes + place, levels.to(codes.dtype.element_ty), mask=inside)
    tl.store(errors + place, tile, mask=inside)


def launch(
    weight: torch.Tensor,
    factor: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    groups: torch.Tensor,
    bits: int | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`gptq_block` by one kernel; the arguments have been checked."""
    rows, columns = weight.shape
    weight = weight if weight.stride(1) == 1 else weight.contiguous()
    factor = factor if factor.stride(1) == 1 else factor.contiguous()
    if zeros is not None and zeros.stride() != scales.stride():
        scales, zeros = scales.contiguous(), zeros.contiguous()
    # Every e4m3 number is a bfloat16 number.
    codes = torch.empty(rows, columns, dtype=torch.bfloat16 if bits is None else torch.uint8, device=weight.device)
    errors = torch.empty(rows, columns, dtype=torch.float32, device=weight.device)
    lowest, highest, middle = (-448.0, 448.0, 0.0) if bits is None else (0.0, 2.0**bits - 1, 2.0 ** (bits - 1))
    gptq_block_kernel[(triton.cdiv(rows, TILE_ROWS),)](
        weight, factor, scales, scales if zeros is None else zeros, groups, codes, errors,
        rows, columns, weight.stride(0), factor.stride(0), scales.stride(0), scales.stride(1),
        lowest, highest, middle,
        HAS_ZEROS=zeros is not None,
        FP8=bits is None,
        ROWS=TILE_ROWS,
        COLUMNS=triton.next_power_of_2(columns),
        num_warps=WARPS,
        # Products are rounded before they are subtracted, as in the reference: the same codes.
        enable_fp_fusion=False,
    )  # fmt: skip
    return codes.to(torch.float8_e4m3fn) if bits is None else codes, errors
