"""Whether linear layers keep packed weights beside their plain ones, and how much memory these may take."""

import sys

import torch
from bladellm_kernels.hopper_device import is_hopper
from bladellm_kernels.packed_linear import kernels_load

from bladellm_runtime.config import EngineArgs
from bladellm_runtime.errors import ConfigError

AUTO_SHARE = 0.1
"""Of the memory that the engine may use: for 8 billion parameters on an H200, 10.7 of 131 GB."""


def most_packed_bytes(args: EngineArgs, dtype: torch.dtype, device: torch.device) -> int:
    """Bytes that packed weights may take, 0 where there are to be none. Raises `ConfigError` where they are asked for
    and no kernel reads them here."""
    if args.packed_weights == "off":
        return 0
    lacks = _lacks(dtype, device)
    if args.packed_weights == "on":
        if lacks is not None:
            raise ConfigError(f"--packed_weights on needs {lacks}; use --packed_weights auto or off")
        if args.enable_lora:
            raise ConfigError(
                "--packed_weights on serves no --enable_lora, whose adapters lie behind weights; leave out either one"
            )
        return sys.maxsize
    if lacks is not None or args.enable_lora or args.world_size > 1:
        return 0
    return int(AUTO_SHARE * args.max_gpu_memory_utilization * torch.cuda.mem_get_info(device)[1])


def check_packed(args: EngineArgs, packed_bytes: int) -> None:
    """Raise `ConfigError` where --packed_weights asks for what a loaded model has not: it keeps so many bytes."""
    if args.packed_weights == "on" and not packed_bytes:
        raise ConfigError(
            "--packed_weights on needs linear layers of plain bfloat16 weights, of rows and inputs in whole 64s, and "
            "this model has none; use --packed_weights off"
        )


def _lacks(dtype: torch.dtype, device: torch.device) -> str | None:
    """What kernels of packed weights need and there is not."""
    if not is_hopper(device):
        return "a Hopper GPU, as H100, H200 or H20"
    if dtype != torch.bfloat16:
        return "--dtype bfloat16"
    if not kernels_load(device.index or 0):
        return "NVRTC, which comes with a CUDA build of torch"
    return None
