"""Activations rounded to 8 bits with one scale a row, as the W8A8 and float8 linears take them."""

import torch

from bladellm_kernels.fixed_point import row_scales

LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
"""The types of codes, and the code of a row's largest magnitude."""


def row_codes(x: torch.Tensor, code_type: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Each row divided by its scale and rounded, halves to even.

    x: [..., N] of a float type; code_type: torch.int8 or torch.float8_e4m3fn. Returns codes [..., N] and scales,
    float32 [..., 1]: a row's largest magnitude / 127 or / 448, at least the least normal number. Raises ValueError for
    other code types.
    """
    largest = check_code_type(code_type)
    wide = x.float()
    scales = row_scales(wide, largest)
    steps = wide / scales
    steps = steps.round_() if code_type == torch.int8 else steps.clamp_(-largest, largest)
    return steps.to(code_type), scales


def check_code_type(code_type: torch.dtype) -> float:
    """The largest code of a type. Raises ValueError for one that is none of `LARGEST`."""
    largest = LARGEST.get(code_type)
    if largest is None:
        raise ValueError(f"code_type must be torch.int8 or torch.float8_e4m3fn, got {code_type}")
    return largest
