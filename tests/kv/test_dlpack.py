"""Tensors over bare addresses: they touch nothing, own nothing, and are of any size."""

import gc
import resource

import torch

from bladellm_runtime.kv.dlpack import bytes_at
from bladellm_runtime.kv.virtual import AddressRange
from tests.kv.arena_cases import CPU


def test_a_tensor_shows_the_bytes_at_an_address():
    memory = torch.arange(1000, dtype=torch.uint8)
    shown = bytes_at(memory.data_ptr() + 10, 200, CPU)
    assert (shown.dtype, shown.shape, shown.device) == (torch.uint8, (200,), CPU)
    assert torch.equal(shown, memory[10:210])
    shown[3] = 77
    assert memory[13] == 77


def test_addresses_without_memory_are_not_touched():
    """32 TiB of which any access would be a fault, seen as numbers of two bytes with strides beyond 2^31."""
    addresses = AddressRange(1 << 45)
    rows = bytes_at(addresses.address, addresses.size, CPU).view(torch.bfloat16)
    rows = rows.as_strided((1 << 30, 2, 8, 128), (8192, 128, 256, 1), 4096)
    last = rows[(1 << 30) - 1, 1, 7, 127]
    assert last.data_ptr() == addresses.address + 2 * (4096 + 8192 * ((1 << 30) - 1) + 128 + 7 * 256 + 127)


def test_the_tensor_neither_frees_nor_keeps_the_memory_nor_leaks():
    memory = torch.full((4096,), 5, dtype=torch.uint8)
    shown = bytes_at(memory.data_ptr(), 4096, CPU)
    view = shown.view(torch.int16)[5:]
    del shown
    gc.collect()
    assert (view == 0x0505).all()
    del view
    assert (memory == 5).all()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(100_000):
        bytes_at(memory.data_ptr(), 4096, CPU)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 5000
