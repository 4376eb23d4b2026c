"""Checks that formats share. Errors of tensors start with the tensor's suffix: callers put the module before it."""

from collections.abc import Mapping

import torch

from bladellm_runtime.errors import CheckpointError
from bladellm_runtime.fields import Fields
from bladellm_runtime.quantization.scheme import Scheme

FLOATS = ("F32", "F16", "BF16")
"""Types that scales may have."""
INTEGERS = ("I32", "I64")
MAX_GROUP = 2**20


def read_group_size(fields: Fields, name: str, default: int | None = None) -> int | None:
    """Inputs that share a scale; None where the config has -1: one scale an output channel."""
    size = fields.integer(name, -1, MAX_GROUP, default=default)
    if size == 0:
        raise fields.error(name, "must be -1 or positive, got 0")
    return None if size == -1 else size


def check_groups(suffix: str, scheme: Scheme, columns: int) -> None:
    """Raises `CheckpointError` where the group size does not divide the inputs."""
    if scheme.group_size is not None and columns % scheme.group_size:
        raise CheckpointError(f"{suffix} has {columns} inputs, not a multiple of the group size {scheme.group_size}")


def check_finite(suffix: str, scales: torch.Tensor) -> torch.Tensor:
    """The scales themselves. Raises `CheckpointError` for NaN and infinity."""
    if not bool(torch.isfinite(scales).all()):
        raise CheckpointError(f"{suffix} has NaN or infinite values")
    return scales


def check_fp8(suffix: str, codes: torch.Tensor) -> torch.Tensor:
    """The float8_e4m3fn codes themselves. Raises `CheckpointError` for NaN."""
    if bool((codes.view(torch.uint8) & 127 == 127).any()):
        raise CheckpointError(f"{suffix} has NaN values")
    return codes


def check_zeros_are(suffix: str, zeros: torch.Tensor, value: int, symmetric_field: str) -> None:
    """Raises `CheckpointError` where a scheme said to be symmetric has another zero point than `value`."""
    if not bool((zeros == value).all()):
        raise CheckpointError(f"{suffix} has zero points other than {value}, but config.json has {symmetric_field}")


def check_zeros_fit(suffix: str, zeros: torch.Tensor, scheme: Scheme) -> torch.Tensor:
    """The zero points themselves. Raises `CheckpointError` for one beyond the codes: 16, which only gptq can hold."""
    if bool((zeros > scheme.levels - 1).any()):
        raise CheckpointError(f"{suffix} cannot hold the zero point {int(zeros.max())} in {scheme.bits} bits")
    return zeros


def read_input_scale(tensors: Mapping[str, torch.Tensor]) -> float:
    """The static scale of the input. Raises `CheckpointError` unless it is one positive finite number."""
    scale = float(check_finite("input_scale", tensors["input_scale"].float()))
    if scale <= 0:
        raise CheckpointError(f"input_scale must be positive, got {scale:g}")
    return scale
