"""How many programs a GPU runs at once, counted in its multiprocessors."""

from functools import cache

import torch


@cache
def multiprocessors(device: torch.device) -> int:
    """Of a CUDA device; 1 for any other."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
