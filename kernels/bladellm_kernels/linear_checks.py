"""The checks every operator of a quantized linear layer makes of its arguments and its device."""

from functools import cache

import torch

ACTIVATION_TYPES = (torch.float32, torch.bfloat16, torch.float16)


def check_codes(
    codes: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    dtype: torch.dtype,
    code_dtype: torch.dtype,
    levels: int | None = None,
) -> None:
    """codes: `code_dtype` [N, K], below `levels`; scales: floating point [N, G], G dividing K; zeros: uint8 [N, G] or
    None; all on one device; dtype: float32, bfloat16 or float16. Raises ValueError naming the argument."""
    if codes.ndim != 2 or codes.dtype != code_dtype or 0 in codes.shape:
        raise ValueError(
            f"codes must be {code_dtype} [N, K] of at least one element, got {codes.dtype} {list(codes.shape)}"
        )
    rows, columns = codes.shape
    if scales.ndim != 2 or scales.shape[0] != rows or scales.shape[1] < 1 or columns % scales.shape[1]:
        raise ValueError(f"scales must be [{rows}, G] with G dividing {columns}, got {list(scales.shape)}")
    if not scales.is_floating_point():
        raise ValueError(f"scales must be floating point, got {scales.dtype}")
    if zeros is not None and (zeros.dtype != torch.uint8 or zeros.shape != scales.shape):
        raise ValueError(f"zeros must be uint8 {list(scales.shape)}, got {zeros.dtype} {list(zeros.shape)}")
    for name, tensor in (("scales", scales), ("zeros", zeros)):
        if tensor is not None and tensor.device != codes.device:
            raise ValueError(f"{name} must be on {codes.device} like codes, got {tensor.device}")
    if levels is not None and int(codes.max()) >= levels:
        raise ValueError(f"codes must be below {levels}, got {int(codes.max())}")
    if dtype not in ACTIVATION_TYPES:
        raise ValueError(f"dtype must be float32, bfloat16 or float16, got {dtype}")


def check_input(x: torch.Tensor, bias: torch.Tensor | None, rows: int, columns: int, dtype: torch.dtype) -> None:
    """x: `dtype` [T, columns]; bias: [rows] of x's type and device, or None. Raises ValueError naming the argument."""
    if x.ndim != 2 or x.shape[1] != columns:
        raise ValueError(f"x must be [T, {columns}], got {list(x.shape)}")
    if x.dtype != dtype:
        raise ValueError(f"x must be {dtype}, as the weight was packed for, got {x.dtype}")
    if bias is not None and bias.shape != (rows,):
        raise ValueError(f"bias must be [{rows}], got {list(bias.shape)}")
    if bias is not None and (bias.dtype != dtype or bias.device != x.device):
        raise ValueError(f"bias must be {dtype} on {x.device} like x, got {bias.dtype} on {bias.device}")


def check_input_scale(input_scale: float | None) -> None:
    """The static scale of an input, where there is one, must be positive and finite."""
    if input_scale is not None and not 0.0 < input_scale < float("inf"):
        raise ValueError(f"input_scale must be positive and finite, got {input_scale}")


@cache
def is_hopper(device: torch.device) -> bool:
    """Whether the device is an Nvidia GPU of sm_90 or later, which the Triton kernels of linear layers need."""
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device) >= (9, 0)
