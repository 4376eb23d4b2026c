"""The first half of LoRA: every token's inputs times the A of its own adapter, `h = scale · x Aᵀ` (Punica's shrink)."""

import torch

from bladellm_kernels.has_triton import has_triton
from bladellm_kernels.lora_tokens import TokenAdapters

TYPES = (torch.float32, torch.bfloat16, torch.float16)


def lora_shrink(x: torch.Tensor, a: torch.Tensor, scales: torch.Tensor, adapters: TokenAdapters) -> torch.Tensor:
    """`scale · x Aᵀ` of each token's adapter, for every slice of the layer.

    x: [T, K]; a: [slots, S · R, K], the ranks of slice after slice, contiguous but for its first stride; scales:
    float32 [slots, S]; x and a of floating-point types. Returns float32 [P, T, S · R], to be added up over its first
    dimension; rows of tokens without adapter are undefined. One kernel where triton is installed on CUDA; never waits
    for the device. Source: Punica (arXiv 2310.18547). Raises ValueError naming the argument that is wrong.
    """
    _check(x, a, scales, adapters)
    if x.is_cuda and has_triton():
        from bladellm_kernels.lora_shrink_triton import launch_shrink

        return launch_shrink(x, a, scales, adapters)
    out = torch.zeros(1, len(x), a.shape[1], dtype=torch.float32, device=x.device)
    for slot in used_slots(adapters, len(a)):
        scale = scales[slot].repeat_interleave(a.shape[1] // scales.shape[1])
        own = (adapters.slots == slot).unsqueeze(1)
        out[0] += torch.where(own, x.float() @ a[slot].float().t() * scale, 0)
    return out


def lora_shrink_reference(x: torch.Tensor, a: torch.Tensor, scales: torch.Tensor, slots: list[int]) -> torch.Tensor:
    """`lora_shrink` in float64, one token at a time, added up: [T, S · R], 0 for tokens without adapter."""
    out = torch.zeros(len(x), a.shape[1], dtype=torch.float64)
    ranks = a.shape[1] // scales.shape[1]
    for token, slot in enumerate(slots):
        if slot >= 0:
            out[token] = a[slot].double() @ x[token].double() * scales[slot].double().repeat_interleave(ranks)
    return out


def used_slots(adapters: TokenAdapters, count: int) -> list[int]:
    """The slots to go through: those in use on a CPU, all where asking would make the host wait."""
    if adapters.slots.is_cuda:
        return list(range(count))
    return [slot for slot in adapters.slots.unique().tolist() if slot >= 0]


def _check(x: torch.Tensor, a: torch.Tensor, scales: torch.Tensor, adapters: TokenAdapters) -> None:
    if x.ndim != 2 or a.ndim != 3 or x.shape[1] != a.shape[2]:
        raise ValueError(f"x must be [T, K] and a [slots, S · R, K], got {list(x.shape)} and {list(a.shape)}")
    if scales.ndim != 2 or len(scales) != len(a) or scales.dtype != torch.float32 or a.shape[1] % scales.shape[1]:
        raise ValueError(f"scales must be float32 [{len(a)}, S], got {scales.dtype} {list(scales.shape)}")
    if adapters.slots.shape != x.shape[:1]:
        raise ValueError(f"slots must be [{len(x)}] like x, got {list(adapters.slots.shape)}")
    for name, tensor in (("x", x), ("a", a)):
        if tensor.dtype not in TYPES:
            raise ValueError(f"{name} must be of a floating-point type, got {tensor.dtype}")
    if x.stride(1) != 1 or not a[0].is_contiguous():
        raise ValueError("rows of x and the matrices of a must be contiguous")
