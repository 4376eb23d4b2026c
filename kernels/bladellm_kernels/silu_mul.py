"""SwiGLU's gate (Shazeer 2020, arXiv:2002.05202) over the output of a fused gate-up projection.

On CUDA one kernel for [T, 2 · N] whose last stride is 1, where triton is installed; PyTorch's operators otherwise.
"""

import torch
import torch.nn.functional as F

from bladellm_kernels.has_triton import has_triton
from bladellm_kernels.row_codes import check_code_type, row_codes


def silu_mul(gate_up: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """`silu(gate) · up`.

    gate_up: [..., 2·N], the gate in the first N columns and up in the others; float32, bfloat16 or float16. out:
    [..., N] of its type. Returns [..., N].
    """
    if not _one_kernel(gate_up, out):
        product = _product(gate_up)
        return product if out is None else out.copy_(product)
    from bladellm_kernels.silu_mul_triton import launch_silu_mul

    if out is None:
        out = torch.empty(gate_up.shape[0], gate_up.shape[1] // 2, dtype=gate_up.dtype, device=gate_up.device)
    launch_silu_mul(gate_up, out)
    return out


def silu_mul_quant(gate_up: torch.Tensor, code_type: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """`row_codes` of `silu_mul`. code_type: torch.int8 or torch.float8_e4m3fn.

    Returns codes [..., N] and scales, float32 [..., 1].
    """
    largest = check_code_type(code_type)
    if not _one_kernel(gate_up, None):
        return row_codes(_product(gate_up), code_type)
    from bladellm_kernels.silu_mul_triton import launch_silu_mul_quant

    codes = torch.empty(gate_up.shape[0], gate_up.shape[1] // 2, dtype=code_type, device=gate_up.device)
    scales = torch.empty(gate_up.shape[0], 1, dtype=torch.float32, device=gate_up.device)
    launch_silu_mul_quant(gate_up, codes, scales, largest)
    return codes, scales


def silu_mul_reference(gate_up: torch.Tensor) -> torch.Tensor:
    """`silu_mul` written out in float32. Returns float32."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return gate / (1 + torch.exp(-gate)) * up


def _one_kernel(gate_up: torch.Tensor, out: torch.Tensor | None) -> bool:
    if not (gate_up.is_cuda and has_triton() and gate_up.dim() == 2 and gate_up.stride(1) == 1):
        return False
    return out is None or out.stride(1) == 1


def _product(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)
