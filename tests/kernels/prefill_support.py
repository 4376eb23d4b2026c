"""Random KV memory in every format, poisoned where no sequence lies, and chunks over it."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from bladellm_kernels.kv_format import KV_FORMATS, KvFormat
from bladellm_kernels.kv_layer import KvLayer
from bladellm_kernels.prefill_tiles import Span

GRANULE = 16
SPANS = [(0, 1), (0, 23), (13, 7), (40, 1), (3, 37), (0, 65), (5, 131)]
"""(start, length) of chunks."""


def kv_memory(format: KvFormat, dtype, kv_heads: int, head_dim: int, rows: int, mapped: bool, device) -> torch.Tensor:
    """Payload [rows, 2, Hk, W] interleaved with another layer, all poison: NaN, or codes without a scale.

    mapped: K and V of a head side by side, as mapped memory has them; otherwise all K, then all V.
    """
    stored, width = format.dtype(dtype), format.width(head_dim)
    shape = (rows, 2, kv_heads, 2, width) if mapped else (rows, 2, 2, kv_heads, width)
    if stored in (torch.int8, torch.uint8):
        memory = torch.randint(0, 256, shape, dtype=torch.uint8, device=device).view(stored)
    else:
        memory = torch.full(shape, torch.nan, device=device).to(stored)
    payload = memory[:, 1]
    return payload.transpose(1, 2) if mapped else payload


def random_stored(format: KvFormat, dtype, shape: tuple[int, ...], device) -> torch.Tensor:
    """Stored numbers any of which the format may hold."""
    stored = format.dtype(dtype)
    if not format.quantized:
        return torch.randn(shape, device=device).to(stored)
    if stored in (torch.float8_e4m3fn, torch.float8_e5m2):
        return (torch.randn(shape, device=device) * 60).to(stored)
    if format.float12:
        return torch.randint(0, 256, shape, device=device).to(stored)
    codes = torch.randint(int(format.lowest), int(format.highest) + 1, (2, *shape), device=device)
    return (codes[0] + 16 * codes[1] if format.nibbles else codes[0]).to(stored)


def prefill_case(
    name: str, dtype, heads: tuple[int, int, int], spans, device="cpu", paged=False, mapped=False
) -> tuple[torch.Tensor, KvLayer, list[Span]]:
    """Queries, memory and chunks of `spans` in a flat batch that begins with two tokens of no chunk.

    Granules are dealt out in random order; what no sequence holds is NaN, its scales and zeros too.
    """
    format, (query_heads, kv_heads, head_dim) = KV_FORMATS[name], heads
    limit = -(-max(start + length for start, length in spans) // GRANULE) * GRANULE + GRANULE
    granules = len(spans) * limit // GRANULE
    table = torch.randperm(granules).view(len(spans), -1).to(device, torch.int32)
    payload = kv_memory(format, dtype, kv_heads, head_dim, granules * GRANULE, mapped, device)
    scales = torch.full((granules, kv_heads, 2, format.planes, GRANULE), torch.nan, dtype=torch.float16, device=device)
    chunks, first = [], 2
    for slot, (start, length) in enumerate(spans):
        base, total = slot * limit + 5, start + length
        pool_rows = (table[slot].long()[:, None] * GRANULE + torch.arange(GRANULE, device=device)).view(-1)[:total]
        rows = pool_rows if paged else base + torch.arange(total, device=device)
        payload[rows] = random_stored(format, dtype, (total, 2, kv_heads, format.width(head_dim)), device)
        drawn = torch.rand(total, kv_heads, 2, format.planes, device=device) / (format.highest or 1) * 3
        scales[pool_rows // GRANULE, :, :, :, pool_rows % GRANULE] = drawn.half()
        chunks.append(Span(first, length, start, base, slot))
        first += length
    q = torch.randn(first, query_heads + 2 * kv_heads, head_dim, device=device).to(dtype)[:, :query_heads]
    needed = format.quantized or paged
    kv = KvLayer(payload, format, GRANULE, table if needed else None, scales if format.quantized else None, paged)
    return q, kv, chunks


class HopperDriver:
    """Stands for the driver of an H100 or H200 which is not there."""

    def get_current_target(self):
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


@contextmanager
def hopper(kernel) -> Iterator[None]:
    """Let `kernel.warmup` compile for Hopper what a launch with the same arguments would, without a GPU."""
    from triton.runtime import driver

    active = driver._active
    driver.set_active(HopperDriver())
    kernel.device_caches.clear()
    try:
        yield
    finally:
        driver._active = active
        kernel.device_caches.clear()
