"""SwiGLU's gate (Shazeer 2020, arXiv:2002.05202) over the output of a fused gate-up projection."""

import torch
import torch.nn.functional as F


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """`silu(gate) · up`.

    gate_up: [..., 2·N], the gate in the first N columns and up in the others; float32, bfloat16 or float16.
    Returns [..., N] of the same type.
    """
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def silu_mul_reference(gate_up: torch.Tensor) -> torch.Tensor:
    """`silu_mul` written out in float32. Returns float32."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return gate / (1 + torch.exp(-gate)) * up
