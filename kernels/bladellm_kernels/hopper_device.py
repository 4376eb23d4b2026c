"""Whether a device has what kernels for Hopper need: an NVIDIA GPU of compute capability 9."""

import torch


def on_hopper(tensor: torch.Tensor) -> bool:
    """Whether a tensor is on one."""
    return tensor.is_cuda and _has_capability(tensor.device)


def is_hopper(device: torch.device) -> bool:
    """Whether a device is one."""
    return device.type == "cuda" and _has_capability(device)


def is_other_gpu(device: torch.device) -> bool:
    """Whether a device is a GPU that instructions of a Hopper alone, as those of its products, do not run on."""
    return device.type == "cuda" and not _has_capability(device)


def _has_capability(device: torch.device) -> bool:
    return torch.version.hip is None and torch.cuda.get_device_capability(device)[0] == 9
