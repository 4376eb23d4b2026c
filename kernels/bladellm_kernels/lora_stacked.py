"""LoRA whose A lies behind the layer's weight: one product gives y and every slot's h, and one kernel more adds `h Bᵀ`.

A kernel for A would take as long as the layer's own start; read with the weight, it costs its bytes alone. The kernel
behind takes in what stands there anyway: a bias, the gate, the residual addition, and norms whose division is delayed
(`delayed_norm`), so that no program needs a whole row.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from bladellm_kernels.delayed_norm import DelayedNorm, check_norm_weight
from bladellm_kernels.has_triton import has_triton
from bladellm_kernels.lora_expand import MAX_SLICES, lora_expand
from bladellm_kernels.lora_shrink import TYPES
from bladellm_kernels.lora_tokens import TokenAdapters


@dataclass(frozen=True, slots=True)
class StackedOutputs:
    """What a layer with stacked A gave, and what of it is a token's own.

    y: [T, N + slots · S · R or more], rows contiguous: the layer's outputs without bias, then `x · Aᵀ` of every slot;
    nobody reads the latter but for a token's own slot. b: [slots, N, R], contiguous but for its first stride; scales:
    float32 [slots, S]; rows: outputs of each of the S slices, N in all; adapters: not in tiles. bias: [N], None for 0.
    norm: where y is of its weighted part, [T, K]; None where y is of what the layer is to be given. All but scales of
    floating-point types.
    """

    y: torch.Tensor
    b: torch.Tensor
    scales: torch.Tensor
    rows: tuple[int, ...]
    adapters: TokenAdapters
    bias: torch.Tensor | None = None
    norm: DelayedNorm | None = None

    @property
    def outputs(self) -> int:
        return self.b.shape[1]

    @property
    def ranks(self) -> int:
        """Of all slices."""
        return len(self.rows) * self.b.shape[2]

    @property
    def by_kernel(self) -> bool:
        return self.y.is_cuda and has_triton()


def stacked_expand(given: StackedOutputs, out: torch.Tensor | None = None) -> torch.Tensor:
    """The layer's outputs with `scale · h Bᵀ` of each token's adapter, [T, N] of y's type; new, or `out`.

    Here and below: sums in float32 that are rounded once; one kernel where triton is installed on CUDA, never waiting
    for the device; ValueError names the argument that is wrong.
    """
    _check(given)
    if out is not None and (out.shape != (len(given.y), given.outputs) or out.stride(1) != 1):
        raise ValueError(f"out must be [{len(given.y)}, {given.outputs}] with contiguous rows, got {list(out.shape)}")
    out = given.y.new_empty(len(given.y), given.outputs) if out is None else out
    if not given.by_kernel:
        return out.copy_(_summed(given))
    from bladellm_kernels.lora_stacked_triton import launch_stacked_rows

    launch_stacked_rows(given, out)
    return out


def stacked_expand_silu_mul(given: StackedOutputs) -> torch.Tensor:
    """`silu(gate) · up` of those outputs, of two slices, the gate's first: [T, N / 2]."""
    _check(given)
    if len(given.rows) != 2 or given.rows[0] != given.rows[1]:
        raise ValueError(f"rows must be two slices of one size, got {given.rows}")
    if not given.by_kernel:
        gate, up = _summed(given).chunk(2, 1)
        return (F.silu(gate) * up).to(given.y.dtype)
    from bladellm_kernels.lora_stacked_silu_triton import launch_stacked_silu_mul
    from bladellm_kernels.lora_stacked_tiles_triton import launch_stacked_silu_tiles, takes_tiles

    out = given.y.new_empty(len(given.y), given.rows[0])
    (launch_stacked_silu_tiles if takes_tiles(given) else launch_stacked_silu_mul)(given, out)
    return out


def stacked_expand_add(
    given: StackedOutputs, residual: torch.Tensor, norm_weight: torch.Tensor, eps: float
) -> DelayedNorm:
    """Add those outputs, of one slice, to residual [T, N] of y's type, in place. Returns the norm of the sum by
    norm_weight [N]."""
    _check(given)
    check_norm_weight(norm_weight, residual)
    expected = (len(given.y), given.outputs), given.y.dtype
    if (residual.shape, residual.dtype) != expected or residual.stride(1) != 1 or len(given.rows) != 1:
        raise ValueError(f"residual must be {expected} of one slice, got {residual.dtype} {list(residual.shape)}")
    if not given.by_kernel:
        residual.copy_(residual.float() + _summed(given))
        return DelayedNorm(residual * norm_weight, residual.float().square().sum(1, keepdim=True), eps)
    from bladellm_kernels.lora_stacked_triton import launch_stacked_rows, stacked_blocks

    squares = torch.empty(len(residual), stacked_blocks(given), dtype=torch.float32, device=residual.device)
    norm = DelayedNorm(residual.new_empty(residual.shape), squares, eps)
    launch_stacked_rows(given, residual, residual, norm_weight, norm)
    return norm


def _summed(given: StackedOutputs) -> torch.Tensor:
    """The outputs by PyTorch's operators, float32 [T, N]."""
    slots, count = given.adapters.slots, len(given.b)
    total = given.y[:, : given.outputs].to(torch.float32, copy=True)
    if len(total) and count:
        own = slots.clamp(min=0)
        shrunk = given.y[:, given.outputs : given.outputs + count * given.ranks].unflatten(1, (count, given.ranks))
        scale = given.scales[own].repeat_interleave(given.b.shape[2], 1)
        h = shrunk[torch.arange(len(own), device=own.device), own].float() * scale
        lora_expand(h[None].contiguous(), given.b, given.rows, TokenAdapters(slots), total)
    if given.norm is not None:
        total *= given.norm.factors()[:, None]
    return total if given.bias is None else total + given.bias


def _check(given: StackedOutputs) -> None:
    y, b, scales, rows = given.y, given.b, given.scales, given.rows
    if b.ndim != 3 or not 1 <= len(rows) <= MAX_SLICES or sum(rows) != b.shape[1] or not b[:1].is_contiguous():
        raise ValueError(f"b must be [slots, {sum(rows)}, R] of contiguous matrices, got {list(b.shape)}")
    least = given.outputs + len(b) * given.ranks
    if y.ndim != 2 or y.shape[1] < least or y.stride(1) != 1:
        raise ValueError(f"y must be [T, {least}] or wider with contiguous rows, got {list(y.shape)}")
    if scales.shape != (len(b), len(rows)) or scales.dtype != torch.float32 or scales.stride(1) != 1:
        raise ValueError(f"scales must be float32 {[len(b), len(rows)]}, got {scales.dtype} {list(scales.shape)}")
    if given.adapters.slots.shape != y.shape[:1] or given.adapters.tiles is not None:
        raise ValueError(f"adapters must be those of {len(y)} tokens, not in tiles")
    if given.bias is not None and (given.bias.shape != (given.outputs,) or given.bias.stride(0) != 1):
        raise ValueError(f"bias must be [{given.outputs}], got {list(given.bias.shape)}")
    if given.norm is not None and len(given.norm.squares) != len(y):
        raise ValueError(f"norm must be of {len(y)} tokens like y, got {len(given.norm.squares)}")
    for name, tensor in (("y", y), ("b", b)):
        if tensor.dtype not in TYPES:
            raise ValueError(f"{name} must be of a floating-point type, got {tensor.dtype}")
