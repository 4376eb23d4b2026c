"""Whether linear layers keep packed weights beside their plain ones, and how much memory these may take."""

import sys

import torch
from bladellm_kernels.hopper_device import is_hopper
from bladellm_kernels.packed_linear import kernels_load

from bladellm_runtime.config import GIB, EngineArgs
from bladellm_runtime.engine.memory import graph_bytes, workspace_bytes
from bladellm_runtime.errors import ConfigError
from bladellm_runtime.kv.arena import KvShape
from bladellm_runtime.models.config import ModelSpec
from bladellm_runtime.models.packed_layers import NO_ROOM, PackedRoom

AUTO_SHARE = 0.1
"""Of the memory that the engine may use: for 8 billion parameters on an H200, 10.7 of 131 GB."""


def packed_room(args: EngineArgs, spec: ModelSpec, kv: KvShape, device: torch.device, max_model_len: int) -> PackedRoom:
    """Memory for packed weights, none where there are to be none; with auto they take none that the KV cache was asked
    to have, nor that of one sequence of `max_model_len`.

    Raises `ConfigError` where they are asked for and no kernel reads them here.
    """
    if args.packed_weights == "off":
        return NO_ROOM
    lacks = _lacks(kv.dtype, device)
    if args.packed_weights == "on":
        _check_on(args, lacks)
        return PackedRoom(sys.maxsize, asked=True)
    if lacks is not None or args.enable_lora or args.world_size > 1:
        return NO_ROOM
    total = torch.cuda.mem_get_info(device)[1]
    usable = int(args.max_gpu_memory_utilization * total)
    return PackedRoom(int(AUTO_SHARE * usable), total - usable + _needed_bytes(args, spec, kv, max_model_len))


def check_packed(args: EngineArgs, packed_bytes: int) -> None:
    """Raise `ConfigError` where --packed_weights asks for what a loaded model has not: it keeps so many bytes."""
    if args.packed_weights == "on" and not packed_bytes:
        raise ConfigError(
            "--packed_weights on needs linear layers of plain bfloat16 weights, of rows and inputs in whole 64s, and "
            "this model has none; use --packed_weights off"
        )


def _check_on(args: EngineArgs, lacks: str | None) -> None:
    if lacks is not None:
        raise ConfigError(f"--packed_weights on needs {lacks}; use --packed_weights auto or off")
    if args.enable_lora:
        raise ConfigError(
            "--packed_weights on serves no --enable_lora, whose adapters lie behind weights; leave out either one"
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


def _needed_bytes(args: EngineArgs, spec: ModelSpec, kv: KvShape, max_model_len: int) -> int:
    """What is due beside the weights: steps, the first layer of every token, and keys and values, amply."""
    if args.kv_cache_gib is None:
        cached = max_model_len * spec.layers * (kv.payload_bytes + kv.scale_bytes) + GIB  # pieces are of some MiB
    else:
        cached = int(args.kv_cache_gib * GIB)
    width = (spec.heads + 2 * spec.kv_heads) * spec.head_dim if args.precompute_first_layer else 0
    known = spec.vocab_size * width * kv.dtype.itemsize
    return workspace_bytes(args, spec, kv.dtype) + graph_bytes(args, spec, kv.dtype) + known + cached
