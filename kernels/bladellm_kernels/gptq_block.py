"""Round a block of columns with GPTQ: one by one, each error spread over the columns after it.

Frantar et al., arXiv:2210.17323, algorithm 1, the inner loop: with U the upper factor of the inverse Hessian,
q = round(w_i), e = (w_i − q) / U_ii, w_j −= e · U_ij for j > i. The caller spreads the errors over later blocks.
"""

from dataclasses import dataclass

import torch

from bladellm_kernels.has_triton import has_triton

FP8_MAX = 448.0
_LOOP_COLUMNS = 8


@dataclass(frozen=True, slots=True)
class ColumnGrid:
    """The values that B columns of N rows may take, by G groups of columns.

    scales: float32 [N, G]. zeros: [N, G], None for 2^(bits − 1). groups: int64 [B], the group of each column. bits:
    values are scale · (code − zero), codes uint8 from 0 to 2^bits − 1; None: they are scale · code, codes
    float8_e4m3fn, without zeros.
    """

    scales: torch.Tensor
    zeros: torch.Tensor | None
    groups: torch.Tensor
    bits: int | None

    @property
    def code_dtype(self) -> torch.dtype:
        return torch.float8_e4m3fn if self.bits is None else torch.uint8

    @property
    def limits(self) -> tuple[float, float, float]:
        """The lowest code, the highest, and the zero point where there are no zeros."""
        return (-FP8_MAX, FP8_MAX, 0.0) if self.bits is None else (0.0, 2.0**self.bits - 1, 2.0 ** (self.bits - 1))


def gptq_block(weight: torch.Tensor, factor: torch.Tensor, grid: ColumnGrid) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes [N, B] of a block of columns and their errors, float32 [N, B].

    weight: float32 [N, B], left as it is. factor: float32 [B, B], the block on the diagonal of the upper factor; what
    lies below its diagonal is never read. Halves round to even, values outside the grid saturate. On CUDA it is one
    fused kernel where triton is installed.
    """
    _check(weight, factor, grid)
    if weight.is_cuda and has_triton():
        from bladellm_kernels.gptq_block_triton import launch

        return launch(weight, factor, grid.scales, grid.zeros, grid.groups, grid.bits)
    return _by_halves(weight, factor, grid)


def gptq_block_reference(
    weight: torch.Tensor, factor: torch.Tensor, grid: ColumnGrid
) -> tuple[torch.Tensor, torch.Tensor]:
    """`gptq_block` written out, in the type of `weight`: float32 or float64."""
    rest, errors = weight.clone(), torch.empty_like(weight)
    codes = torch.empty(weight.shape, dtype=grid.code_dtype, device=weight.device)
    lowest, highest, middle = grid.limits
    for i, group in enumerate(grid.groups.tolist()):
        scale = grid.scales[:, group].to(weight.dtype)
        zero = middle if grid.zeros is None else grid.zeros[:, group].to(weight.dtype)
        steps = rest[:, i] / scale
        code = (steps if grid.bits is None else steps.round() + zero).clamp(lowest, highest).to(grid.code_dtype)
        errors[:, i] = (rest[:, i] - (code.to(weight.dtype) - zero) * scale) / factor[i, i]
        rest[:, i + 1 :] -= errors[:, i, None] * factor[i, i + 1 :]
        codes[:, i] = code
    return codes, errors


@dataclass(frozen=True, slots=True)
class _Columns:
    """A block in plain PyTorch, a column of the weight a row here, so that it is contiguous.

    values [B, N]: the weights, in the end the errors. levels [B, N]: code − zero, to be filled. scales [B, N]; low and
    high, [B, N] or [B, 1], the bounds of levels. factor [B, B].
    """

    values: torch.Tensor
    levels: torch.Tensor
    scales: torch.Tensor
    low: torch.Tensor
    high: torch.Tensor
    factor: torch.Tensor

    def part(self, part: slice) -> "_Columns":
        values, levels, scales, low, high = (
            each[part] for each in (self.values, self.levels, self.scales, self.low, self.high)
        )
        return _Columns(values, levels, scales, low, high, self.factor[part, part])


def _by_halves(weight: torch.Tensor, factor: torch.Tensor, grid: ColumnGrid) -> tuple[torch.Tensor, torch.Tensor]:
    lowest, highest, middle = grid.limits
    values = weight.t().clone(memory_format=torch.contiguous_format)
    if grid.zeros is None:
        offset = values.new_full((len(values), 1), middle)
    else:
        offset = grid.zeros.t()[grid.groups].float()
    scales = grid.scales.t()[grid.groups]
    columns = _Columns(values, torch.empty_like(values), scales, lowest - offset, highest - offset, factor)
    _halve(columns, fp8=grid.bits is None)
    codes = columns.levels.add_(offset).to(grid.code_dtype)
    return codes.t().contiguous(), values.t().contiguous()


def _halve(columns: _Columns, fp8: bool) -> None:
    """The first half, its errors spread over the second half by one product, the second half."""
    count = len(columns.values)
    if count <= _LOOP_COLUMNS:
        _loop(columns, fp8)
        return
    first, second = slice(None, count // 2), slice(count // 2, None)
    _halve(columns.part(first), fp8)
    columns.values[second].addmm_(columns.factor[first, second].t(), columns.values[first], alpha=-1)
    _halve(columns.part(second), fp8)


def _loop(columns: _Columns, fp8: bool) -> None:
    for i, pivot in enumerate(columns.factor.diagonal().tolist()):
        value, level, scale = columns.values[i], columns.levels[i], columns.scales[i]
        # The bounds are whole numbers: saturating before rounding gives the same codes.
        torch.div(value, scale, out=level).clamp_(columns.low[i], columns.high[i])
        if fp8:
            level.copy_(level.to(torch.float8_e4m3fn))
        else:
            level.round_()
        value.addcmul_(level, scale, value=-1).div_(pivot)
        columns.values[i + 1 :].addr_(columns.factor[i, i + 1 :], value, alpha=-1)


def _check(weight: torch.Tensor, factor: torch.Tensor, grid: ColumnGrid) -> None:
    rows, columns = weight.shape
    if factor.shape != (columns, columns) or grid.groups.shape != (columns,) or len(grid.scales) != rows:
        raise ValueError(
            f"weight {tuple(weight.shape)} needs factor [{columns}, {columns}], groups [{columns}] and {rows} rows of "
            f"scales, got {tuple(factor.shape)}, {tuple(grid.groups.shape)} and {tuple(grid.scales.shape)}"
        )
    if {weight.dtype, factor.dtype, grid.scales.dtype} != {torch.float32}:
        raise ValueError(
            f"weight, factor and scales must be float32, got {weight.dtype}, {factor.dtype} and {grid.scales.dtype}"
        )
    if grid.zeros is not None and (grid.bits is None or grid.zeros.shape != grid.scales.shape):
        raise ValueError("zeros must have the shape of scales, and an fp8 grid has none")
    if grid.bits is not None and not 2 <= grid.bits <= 8:
        raise ValueError(f"bits must be between 2 and 8, got {grid.bits}")
