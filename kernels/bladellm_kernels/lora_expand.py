"""The second half of LoRA: `y += h Bᵀ` with the B of every token's own adapter, slice by slice (Punica's expand)."""

from itertools import accumulate

import torch

from bladellm_kernels.has_triton import has_triton
from bladellm_kernels.lora_shrink import TYPES, used_slots
from bladellm_kernels.lora_tokens import TokenAdapters
from bladellm_kernels.silu_mul import silu_mul

MAX_SLICES = 3


def lora_expand(
    h: torch.Tensor, b: torch.Tensor, rows: tuple[int, ...], adapters: TokenAdapters, y: torch.Tensor
) -> None:
    """Add `h Bᵀ` of each token's adapter to y, in place; tokens without adapter keep what they have.

    h: float32 [P, T, S · R] of `lora_shrink`; b: [slots, N, R], contiguous but for its first stride; rows: of the S
    slices, N in all: rows of b, and columns of y, that belong to a slice's ranks; y: [T, N]. y and b of floating-point
    types. One kernel where triton is installed on CUDA; never waits for the device. Raises ValueError naming the
    argument that is wrong.
    """
    _check(h, b, rows, adapters, y)
    if y.is_cuda and has_triton():
        from bladellm_kernels.lora_beside import join
        from bladellm_kernels.lora_expand_triton import launch_expand

        join(adapters)
        launch_expand(h, b, rows, adapters, y)
        return
    total = h.sum(0)
    for slot in used_slots(adapters, len(b)):
        own = (adapters.slots == slot).unsqueeze(1)
        parts = zip(total.split(b.shape[2], 1), b[slot].split(rows), y.split(rows, 1), strict=True)
        for shrunk, weight, target in parts:
            # Rows of tokens without adapter are undefined, so they are left out and not multiplied by zero.
            target.copy_(torch.where(own, target.float() + shrunk @ weight.float().t(), target))


def lora_expand_silu_mul(
    h: torch.Tensor, b: torch.Tensor, rows: tuple[int, int], adapters: TokenAdapters, y: torch.Tensor
) -> torch.Tensor:
    """`silu(gate) · up` of y [T, 2 · N], the gate's columns first, with what `lora_expand` adds to them: [T, N].

    As `lora_expand`, with two slices of N rows each; y is used up. One kernel for tokens that are not in tiles where
    triton is installed on CUDA, with no rounding in between.
    """
    if len(rows) != 2 or rows[0] != rows[1]:
        raise ValueError(f"rows must be two slices of one size, got {rows}")
    if not (y.is_cuda and has_triton()) or adapters.tiles is not None:
        lora_expand(h, b, rows, adapters, y)
        return silu_mul(y)
    _check(h, b, rows, adapters, y)
    from bladellm_kernels.lora_beside import join
    from bladellm_kernels.lora_expand_silu_triton import launch_expand_silu_mul

    join(adapters)
    return launch_expand_silu_mul(h, b, adapters, y)


def lora_expand_reference(
    h: torch.Tensor, b: torch.Tensor, rows: tuple[int, ...], slots: list[int], y: torch.Tensor
) -> torch.Tensor:
    """y [T, N] with what `lora_expand` adds for h [T, S · R], in float64, one token at a time."""
    out = y.double().clone()
    ends, ranks = list(accumulate(rows)), b.shape[2]
    for token, slot in enumerate(slots):
        for index, (size, end) in enumerate(zip(rows, ends, strict=True)):
            if slot >= 0:
                own = h[token, index * ranks : (index + 1) * ranks].double()
                out[token, end - size : end] += b[slot, end - size : end].double() @ own
    return out


def _check(h: torch.Tensor, b: torch.Tensor, rows: tuple[int, ...], adapters: TokenAdapters, y: torch.Tensor) -> None:
    if not 1 <= len(rows) <= MAX_SLICES or b.ndim != 3 or sum(rows) != b.shape[1]:
        raise ValueError(f"rows must be those of one to {MAX_SLICES} slices of b, got {rows} of {list(b.shape)}")
    if y.ndim != 2 or y.shape[1] != b.shape[1] or y.stride(1) != 1:
        raise ValueError(f"y must be [T, {b.shape[1]}] with contiguous rows, got {list(y.shape)}")
    if h.dtype != torch.float32 or h.shape[1:] != (len(y), len(rows) * b.shape[2]) or not h.is_contiguous():
        raise ValueError(f"h must be float32 [P, {len(y)}, {len(rows) * b.shape[2]}], got {h.dtype} {list(h.shape)}")
    if adapters.slots.shape != y.shape[:1]:
        raise ValueError(f"slots must be [{len(y)}] like y, got {list(adapters.slots.shape)}")
    for name, tensor in (("y", y), ("b", b)):
        if tensor.dtype not in TYPES:
            raise ValueError(f"{name} must be of a floating-point type, got {tensor.dtype}")
    if not b[0].is_contiguous():
        raise ValueError("the matrices of b must be contiguous")
