"""The CUDA kernel of `rotary_tables`."""

import torch
import triton
import triton.language as tl

from bladellm_kernels.early_launch import early_launch, let_next_start, wait_for_inputs

WARPS = 2


@triton.jit  # type: ignore[untyped-decorator]
def rotary_tables_kernel(
    positions: tl.tensor, frequencies: tl.tensor, cos: tl.tensor, sin: tl.tensor, frequency_stride: tl.tensor,
    scale: tl.tensor, HALF: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
) -> None:  # fmt: skip
    """One program a token. frequency_stride: between the frequencies of two tokens, 0 where all have the same."""
    let_next_start(EARLY)
    token = tl.program_id(0).to(tl.int64)
    pair = tl.arange(0, BLOCK)
    inside = pair < HALF
    wait_for_inputs(EARLY)
    frequency = tl.load(frequencies + token * frequency_stride + pair, mask=inside, other=0.0)
    angle = tl.load(positions + token).to(tl.float32) * frequency
    cosine, sine = tl.cos(angle) * scale, tl.sin(angle) * scale
    place = token * (2 * HALF) + pair
    tl.store(cos + place, cosine, mask=inside)
    tl.store(cos + place + HALF, cosine, mask=inside)
    tl.store(sin + place, -sine, mask=inside)
    tl.store(sin + place + HALF, sine, mask=inside)


def launch_rotary_tables(
    positions: torch.Tensor, frequencies: torch.Tensor, scale: float, cos: torch.Tensor, sin: torch.Tensor
) -> None:
    """positions: int64 [T]; frequencies: float32 [D/2] or [T, D/2], last stride 1; cos, sin: contiguous [T, 1, D]."""
    if not len(positions):
        return
    half = frequencies.shape[-1]
    rotary_tables_kernel[(len(positions),)](
        positions, frequencies, cos, sin, frequencies.stride(0) if frequencies.dim() == 2 else 0, float(scale),
        half, triton.next_power_of_2(half), num_warps=WARPS, **early_launch(positions.device),
    )  # fmt: skip
