"""Rotary position embedding (Su et al. 2021, arXiv:2104.09864) in the GPT-NeoX layout: i pairs with i + D/2."""

import torch

from bladellm_kernels.has_triton import has_triton


def rotary_tables(
    positions: torch.Tensor, inverse_frequencies: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The cosines and signed sines `rotary` multiplies with; made once a step, used by every layer.

    positions: int64 [T]; inverse_frequencies: float32 [D/2], or [T, D/2] when they differ by token; scale multiplies
    both tables (YaRN's attention factor). Returns (cos, sin), float32 [T, 1, D]: both halves of cos are equal, the
    first half of sin carries the minus sign of the rotation. On CUDA one kernel where triton is installed.
    """
    if positions.is_cuda and has_triton():
        from bladellm_kernels.rotary_triton import launch_rotary_tables

        shape = (positions.shape[0], 1, 2 * inverse_frequencies.shape[-1])
        cos, sin = torch.empty((2, *shape), dtype=torch.float32, device=positions.device).unbind()
        launch_rotary_tables(positions, inverse_frequencies, scale, cos, sin)
        return cos, sin
    angles = positions.unsqueeze(-1).float() * inverse_frequencies
    cos, sin = angles.cos(), angles.sin()
    if scale != 1.0:
        cos, sin = cos * scale, sin * scale
    return torch.cat((cos, cos), -1).unsqueeze(1), torch.cat((-sin, sin), -1).unsqueeze(1)


def rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate every head of `x` by its token's angles, in float32.

    x: [T, H, D], query heads, key heads or both side by side, D even; cos, sin: float32 [T, 1, D] of `rotary_tables`.
    Returns a new tensor of x's shape and type.
    """
    half_turned = x.roll(x.shape[-1] // 2, -1)
    return torch.addcmul(x * cos, half_turned, sin).to(x.dtype)


def rotary_reference(
    x: torch.Tensor, positions: torch.Tensor, inverse_frequencies: torch.Tensor, scale: float
) -> torch.Tensor:
    """Rotation of the pairs (i, i + D/2) as complex numbers, in float32. Returns float32 [T, H, D]."""
    first, second = x.float().chunk(2, dim=-1)
    angles = positions.unsqueeze(-1).float() * inverse_frequencies
    turn = torch.polar(torch.full_like(angles, scale), angles).unsqueeze(1)
    turned = torch.complex(first, second) * turn
    return torch.cat((turned.real, turned.imag), -1)
