"""The CUDA kernel of the RMS norms: rows gathered, residual added, normalised and rounded to 8 bits in one pass."""

import torch
import triton
import triton.language as tl

from bladellm_kernels.early_launch import early_launch, let_next_start, wait_for_inputs
from bladellm_kernels.row_codes_triton import store_row_codes
from bladellm_kernels.row_schedule import FEW_ROWS, row_schedule


# fmt: off
@triton.jit(do_not_specialize_on_alignment=["index"])  # type: ignore[untyped-decorator]
def rms_norm_kernel(
    x: tl.tensor, residual: tl.tensor, weight: tl.tensor, index: tl.tensor, out: tl.tensor, total: tl.tensor,
    scales: tl.tensor, x_stride: tl.tensor, residual_stride: tl.tensor, total_stride: tl.tensor,
    out_stride: tl.tensor, eps: tl.tensor,
    N: tl.constexpr, BLOCK: tl.constexpr, LARGEST: tl.constexpr, EARLY: tl.constexpr,
) -> None:
    """One program a row. residual, index, total and scales are None where there are none.

    The row is rounded to its type where PyTorch's operators would: after the addition, before its codes.
    """
    let_next_start(EARLY)
    column = tl.arange(0, BLOCK)
    inside = column < N
    factor = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    wait_for_inputs(EARLY)
    target = tl.program_id(0).to(tl.int64)
    source = target
    if index is not None:
        source = tl.load(index + target)
    row = tl.load(x + source * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    if residual is not None:
        row += tl.load(residual + source * residual_stride + column, mask=inside, other=0.0).to(tl.float32)
        rounded = row.to(x.dtype.element_ty)
        row = rounded.to(tl.float32)
        if total is not None:
            tl.store(total + target * total_stride + column, rounded, mask=inside)
    row = row * tl.rsqrt(tl.sum(row * row, axis=0) / N + eps) * factor
    normed = row.to(x.dtype.element_ty)
    place = out + target * out_stride
    if scales is not None:
        store_row_codes(normed.to(tl.float32), place, scales + target, column, inside, LARGEST)
    else:
        tl.store(place + column, normed, mask=inside)
# fmt: on


def launch_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    index: torch.Tensor | None,
    eps: float,
    out: torch.Tensor,
    total: torch.Tensor | None = None,
    scales: torch.Tensor | None = None,
    largest: float = 0.0,
    warps: int | None = None,
) -> None:
    """Rows of x, or those at `index`, normalised into `out`; all are [rows, N], their last stride 1."""
    rows, columns = out.shape
    if rows == 0 or columns == 0:
        return
    block, most = row_schedule(columns, x.element_size(), rows <= FEW_ROWS)
    rms_norm_kernel[(rows,)](
        x, residual, weight, index, out, total, scales,
        x.stride(0), 0 if residual is None else residual.stride(0), 0 if total is None else total.stride(0),
        out.stride(0), eps, columns, block, largest,
        num_warps=warps or most, **early_launch(x.device),
    )  # fmt: skip
