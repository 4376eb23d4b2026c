"""For how many rows of x a decoder layer runs on the operators of `normed_linear`, rather than on operators apart."""

import torch

from bladellm_kernels.linear_checks import is_hopper

HOPPER_ROWS = 64
"""Up to these a layer is bound by reading its weight, and the kernels in between cost all the time they take."""

ALIGNMENT = 16
"""Elements that inputs must be multiples of, for 16-byte loads."""


def fused_rows(weight: torch.Tensor) -> int:
    """The most rows of x that fuse with this weight [N, K], by its type, K and device; 0 where none do."""
    return most_rows(is_hopper(weight.device), weight.dtype, weight.shape[1])


def most_rows(hopper: bool, dtype: torch.dtype, inputs: int) -> int:
    """`fused_rows` of any weight of this type and so many inputs, on a Hopper or elsewhere.

    bfloat16 alone: x · weight before the division of its norm can be out of float16's range where the norm is not.
    """
    return HOPPER_ROWS if hopper and dtype == torch.bfloat16 and inputs % ALIGNMENT == 0 else 0
