"""Which arena a device gets, and making it."""

import mmap
import os
import sys
from typing import Literal

import torch

from bladellm_runtime.errors import ConfigError
from bladellm_runtime.kv.arena import KvArena
from bladellm_runtime.kv.memfd import MemfdArena
from bladellm_runtime.kv.relocating import RelocatingArena
from bladellm_runtime.kv.spec import KvSpec

ArenaKind = Literal["memfd", "relocating"]


def arena_kind(kind: Literal["auto", "memfd", "relocating"], device: torch.device) -> ArenaKind:
    """Settle `--kv_arena`: auto is memfd on a Linux CPU and relocating elsewhere.

    Raises `ConfigError` for memfd where it cannot work.
    """
    possible = device.type == "cpu" and sys.platform == "linux" and hasattr(os, "memfd_create")
    if kind == "memfd" and not possible:
        raise ConfigError(
            f"--kv_arena memfd needs a CPU under Linux, not {device.type} on {sys.platform}; use relocating"
        )
    if kind == "auto":
        return "memfd" if possible else "relocating"
    return kind


def page_bytes(kind: ArenaKind) -> int:
    """What an arena's granules must be multiples of, for `plan_spec`."""
    return mmap.PAGESIZE if kind == "memfd" else 1


def make_arena(
    kind: Literal["auto", "memfd", "relocating"],
    spec: KvSpec,
    kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device,
) -> KvArena:
    """The arena `--kv_arena` asks for. Raises `ConfigError` when it cannot be had, naming the flag to change."""
    settled = arena_kind(kind, device)
    arena = MemfdArena if settled == "memfd" else RelocatingArena
    try:
        return arena(spec, kv_heads, head_dim, dtype, device)
    except (OSError, MemoryError, RuntimeError) as error:
        raise ConfigError(_refusal(settled, spec, error)) from error


def _refusal(kind: ArenaKind, spec: KvSpec, error: Exception) -> str:
    """One sentence for memory, or addresses, that the system does not give."""
    reason = str(error).splitlines()[0] if str(error) else type(error).__name__
    if kind == "memfd":
        addresses = spec.num_slots * spec.max_tokens * spec.token_bytes / 2**30
        return (
            f"the KV cache cannot reserve {addresses:.4g} GiB of addresses ({reason}); lower --max_running_requests "
            "or --max_model_len, or use --kv_arena relocating"
        )
    size = spec.num_granules * spec.granule_bytes / 2**30
    return f"the KV cache of {size:.4g} GiB cannot be allocated ({reason}); lower --kv_cache_gib"
