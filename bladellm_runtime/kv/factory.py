"""Which arena a device gets, and making it."""

import functools
import logging
import mmap
import os
import sys
from collections.abc import Callable
from typing import Literal

import torch

from bladellm_runtime.errors import ConfigError
from bladellm_runtime.kv.arena import KvArena, KvShape
from bladellm_runtime.kv.cuda_arena import CudaArena
from bladellm_runtime.kv.cuda_driver import cuda_driver, probe
from bladellm_runtime.kv.memfd import MemfdArena
from bladellm_runtime.kv.paged import PagedArena
from bladellm_runtime.kv.relocating import RelocatingArena
from bladellm_runtime.kv.spec import KvSpec

ArenaChoice = Literal["auto", "memfd", "relocating", "cuda"]
ArenaKind = Literal["memfd", "relocating", "cuda", "paged"]
AttentionClass = Literal["ragged_flash", "paged"]

BLOCK_BYTES = 32 << 20
"""Of one layer group, mapped by one call: on an H200 a call takes about as long for 2 MiB as for 64."""

logger = logging.getLogger(__name__)


def arena_kind(kind: ArenaChoice, device: torch.device, attn_cls: AttentionClass = "ragged_flash") -> ArenaKind:
    """Settle `--kv_arena` and `--attn_cls`: paged attention has an arena of its own on every device; else auto is
    cuda on a CUDA device whose driver can map memory, memfd on a Linux CPU, and relocating elsewhere.

    Raises `ConfigError` for an arena the device cannot have.
    """
    if attn_cls == "paged":
        return "paged"
    if kind == "relocating":
        return kind
    if kind == "memfd" or (kind == "auto" and device.type == "cpu"):
        return _memfd_or_less(kind, device)
    if kind == "cuda" or device.type == "cuda":
        return _cuda_or_less(kind, device)
    return "relocating"


def page_bytes(kind: ArenaKind, device: torch.device | None = None) -> int:
    """What an arena's granules must be multiples of in every layer group, for `plan_spec`."""
    if kind == "cuda":
        return cuda_driver(_index(device)).granularity
    return mmap.PAGESIZE if kind == "memfd" else 1


def block_bytes(kind: ArenaKind) -> int:
    """About how much of one layer group a block is to have, for `plan_spec`; 0 where there are no blocks."""
    return BLOCK_BYTES if kind == "cuda" else 0


def make_arena(
    kind: ArenaChoice, attn_cls: AttentionClass, spec: KvSpec, shape: KvShape, device: torch.device
) -> KvArena:
    """The arena `--kv_arena` and `--attn_cls` ask for.

    Raises `ConfigError` when it cannot be had, naming the flag to change.
    """
    settled = arena_kind(kind, device, attn_cls)
    try:
        if settled == "cuda":
            return CudaArena(spec, shape, _located(device), cuda_driver(_index(device)))
        arenas: dict[str, Callable[[KvSpec, KvShape, torch.device], KvArena]]
        arenas = {"memfd": MemfdArena, "relocating": RelocatingArena, "paged": PagedArena}
        return arenas[settled](spec, shape, device)
    except (OSError, MemoryError, RuntimeError) as error:
        raise ConfigError(_refusal(settled, spec, error)) from error


def _memfd_or_less(kind: ArenaChoice, device: torch.device) -> ArenaKind:
    if device.type == "cpu" and sys.platform == "linux" and hasattr(os, "memfd_create"):
        return "memfd"
    reason = f"needs a CPU under Linux, not {device.type} on {sys.platform}"
    if kind == "memfd":
        raise ConfigError(f"--kv_arena memfd {reason}; use --kv_arena auto")
    logger.info("KV memory is relocating: memfd %s", reason)
    return "relocating"


def _cuda_or_less(kind: ArenaChoice, device: torch.device) -> ArenaKind:
    problem = _cuda_problem(_index(device)) if device.type == "cuda" else f"needs a CUDA device, not {device.type}"
    if problem is None:
        return "cuda"
    if kind == "cuda":
        raise ConfigError(f"--kv_arena cuda {problem}; use --kv_arena auto")
    logger.info("KV memory is relocating: cuda %s", problem)
    return "relocating"


@functools.cache
def _cuda_problem(index: int) -> str | None:
    """What keeps a CUDA device from mapping memory; None if it can. Tried once a process."""
    try:
        probe(cuda_driver(index), _located(torch.device("cuda", index)))
    except (OSError, MemoryError, RuntimeError) as error:
        return f"cannot map memory ({_first_line(error)})"
    return None


def _index(device: torch.device | None) -> int:
    return torch.cuda.current_device() if device is None or device.index is None else device.index


def _located(device: torch.device) -> torch.device:
    """A CUDA device with its number."""
    return torch.device("cuda", _index(device))


def _refusal(kind: ArenaKind, spec: KvSpec, error: Exception) -> str:
    """One sentence for memory, or addresses, that the system does not give."""
    reason = _first_line(error)
    if kind == "memfd":
        addresses = spec.num_slots * spec.max_tokens * spec.token_bytes / 2**30
        return (
            f"the KV cache cannot reserve {addresses:.4g} GiB of addresses ({reason}); lower --max_running_requests "
            "or --max_model_len, or use --kv_arena relocating"
        )
    size = spec.num_granules * spec.granule_bytes / 2**30
    return (
        f"the KV cache of {size:.4g} GiB cannot be allocated ({reason}); lower --kv_cache_gib "
        "or --max_gpu_memory_utilization"
    )


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
