"""What only mapped memory has: sharing, guards, limits of the system, and nothing left behind."""

import errno
import gc
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
import torch

from bladellm_runtime.kv import sizing, virtual
from bladellm_runtime.kv.factory import make_arena
from bladellm_runtime.kv.sizing import kv_groups, plan_spec, worst_mappings
from bladellm_runtime.kv.spec import KvSpec
from tests.kv.arena_cases import CPU, Geometry, Reference

GEOMETRY = Geometry(3, 1, 2, 16, torch.float32, num_slots=6, granules=40, max_granules=16)


def process_maps():
    return Path("/proc/self/maps").read_text().splitlines()


def file_mappings():
    """(start, end) of every mapping of a KV memory file in this process."""
    lines = [line for line in process_maps() if "bladellm-kv" in line]
    return [tuple(int(part, 16) for part in line.split()[0].split("-")) for line in lines]


def churn(arena, reference, steps):
    """Random maps and unmaps, with aliases."""
    random = np.random.default_rng()
    for _ in range(steps):
        slot, other = (int(number) for number in random.integers(arena.spec.num_slots, size=2))
        held = reference.held(slot)
        if held and random.random() < 0.5:
            arena.unmap(slot, keep := int(random.integers(len(held))))
            del held[keep:]
        elif not reference.held(other) and held:
            arena.alias(slot, other, len(held))
            reference.slots[other] = list(held)
        elif reference.free() > 0 and len(held) < 16:
            arena.map(slot, len(held) + 1)
            held.extend(reference.fresh(1))
            size = arena.spec.granule_tokens
            reference.write(slot, (len(held) - 1) * size, size)


def test_aliased_slots_share_memory_until_the_last_one_lets_go():
    arena = GEOMETRY.arena("memfd")
    size = arena.spec.granule_tokens
    arena.map(0, 3)
    arena.alias(0, 1, 2)
    arena.alias(1, 2, 1)
    for layer in range(3):
        arena.view(1, layer, size)[:] = 5.0 + layer
        assert (arena.view(0, layer, size) == 5.0 + layer).all()
        assert (arena.view(2, layer, size) == 5.0 + layer).all()
    arena.unmap(0, 0)
    arena.unmap(1, 0)
    arena.map(3, 16)
    arena.map(4, 16)
    arena.map(5, 7)
    with pytest.raises(MemoryError):
        arena.map(0, 1)
    for layer in range(3):
        for slot, granules in ((3, 16), (4, 16), (5, 7)):
            arena.view(slot, layer, granules * size)[:] = -1.0
        assert (arena.view(2, layer, size) == 5.0 + layer).all()
    arena.unmap(2, 0)
    arena.map(0, 1)
    arena.close()


def test_exactly_the_mapped_granules_are_accessible():
    arena = GEOMETRY.arena("memfd")
    reference = Reference(arena)
    churn(arena, reference, 300)
    reference.check()
    expected = set()
    page = os.sysconf("SC_PAGESIZE")
    for layer in range(3):
        start = arena.layer_kv(layer).data_ptr()
        row = arena.spec.groups[layer].token_bytes
        for slot, held in reference.slots.items():
            first = start + arena.base_row(slot) * row
            expected.update(range(first, first + len(held) * arena.spec.granule_tokens * row, page))
    assert {address for start, end in file_mappings() for address in range(start, end, page)} == expected
    arena.close()


def test_a_growing_slot_continues_its_run():
    """Granules that follow each other in the file are one mapping, whatever order others were freed in."""
    arena = GEOMETRY.arena("memfd")
    arena.apply([], [(0, 2), (1, 3), (2, 1)])
    arena.apply([(1, 0), (2, 0)], [(0, 4)])
    arena.map(0, 5)
    assert len(file_mappings()) == 3
    assert arena.mappings == 3 * (1 + 1 + 1)
    arena.close()


def test_neither_mappings_nor_files_stay_after_close_or_collection():
    def use(close):
        arena = GEOMETRY.arena("memfd")
        churn(arena, Reference(arena), 50)
        if close:
            arena.close()

    use(close=True)
    gc.collect()
    before = len(process_maps()), len(os.listdir("/proc/self/fd"))
    for turn in range(40):
        use(close=turn % 2 == 0)
    gc.collect()
    assert not file_mappings()
    after = len(process_maps()), len(os.listdir("/proc/self/fd"))
    assert after[1] == before[1]
    assert after[0] <= before[0] + 3


def test_a_tensor_outlives_a_collected_arena():
    arena = GEOMETRY.arena("memfd")
    arena.map(1, 2)
    rows = arena.view(1, 2, 4)
    rows[:] = 3.0
    del arena
    gc.collect()
    assert (rows == 3.0).all()
    del rows
    gc.collect()
    assert not file_mappings()


@pytest.mark.parametrize("failing", [0, 1, 2, 3, 4])
@pytest.mark.parametrize("operation", ["map", "alias"])
def test_a_refused_mapping_is_unwound(monkeypatch, failing, operation):
    """The system refuses the n-th mapping of an operation that takes two a group."""
    arena = GEOMETRY.arena("memfd")
    reference = Reference(arena)
    for slot, granules in ((0, 1), (1, 1), (0, 2), (1, 2)):
        arena.map(slot, granules)
    for slot in (0, 1):
        reference.held(slot).extend(reference.fresh(2))
        reference.write(slot, 0, 2 * arena.spec.granule_tokens)
    original, calls = virtual.map_memory, iter(range(10**6))

    def refusing(address, size, protection, flags, fd=-1, offset=0):
        if fd >= 0 and next(calls) == failing:
            raise OSError(errno.ENOMEM, "mmap refused")
        return original(address, size, protection, flags, fd, offset)

    arena.unmap(1, 0)
    del reference.held(1)[:]
    before = file_mappings()
    monkeypatch.setattr(virtual, "map_memory", refusing)
    with pytest.raises(MemoryError, match="refused"):
        arena.alias(0, 3, 2) if operation == "alias" else arena.map(3, 16)
    monkeypatch.undo()
    assert arena.mapped(3) == 0
    assert file_mappings() == before
    reference.check()
    arena.map(3, 16)
    arena.map(4, 16)
    arena.map(5, 6)
    reference.check()
    arena.close()


def test_the_arena_keeps_below_max_map_count(monkeypatch, tmp_path):
    """Fragments on purpose; the arena refuses before the system would, and works on when there is room again."""
    limit_file = tmp_path / "max_map_count"
    limit_file.write_text("120")
    monkeypatch.setattr(sizing, "MAX_MAP_COUNT", limit_file)
    arena = GEOMETRY.arena("memfd")
    refused = None
    for granules in range(1, 17):
        try:
            arena.map(0, granules)
            arena.map(1, granules)
        except MemoryError as error:
            refused = error
            break
    assert "60 mappings, half of vm.max_map_count" in str(refused)
    assert len(file_mappings()) <= arena.mappings <= 60
    arena.unmap(0, 0)
    arena.map(2, 2)
    arena.close()


def test_a_planned_arena_never_meets_the_mapping_limit(monkeypatch, tmp_path):
    limit_file = tmp_path / "max_map_count"
    limit_file.write_text("400")
    monkeypatch.setattr(sizing, "MAX_MAP_COUNT", limit_file)
    groups = kv_groups(3, 2 * 2 * 16 * 4, 1)
    spec = plan_spec(groups, 1 << 22, num_slots=8, max_model_len=3000, granule_tokens_hint=16, page_bytes=4096)
    assert worst_mappings(3, spec.num_granules, 8) <= 200
    arena = make_arena("memfd", spec, 2, 16, torch.float32, CPU)
    random = np.random.default_rng()
    most = spec.max_tokens // spec.granule_tokens
    for step in range(2000):
        slot = int(random.integers(8))
        free = spec.num_granules - sum(arena.mapped(s) for s in range(8))
        if random.random() < 0.3:
            arena.unmap(slot, int(random.integers(arena.mapped(slot) + 1)))
        elif free and arena.mapped(slot) < most:
            arena.map(slot, arena.mapped(slot) + 1)
        assert arena.mappings <= 200
        if step % 50 == 0:
            assert len(file_mappings()) <= arena.mappings
    arena.close()


def test_the_systems_own_limit_is_survived():
    """Without the arena's limit, in a process of its own: mmap fails with ENOMEM, and the arena goes on after it."""
    script = """
        import torch
        from bladellm_runtime.kv import memfd, virtual
        from bladellm_runtime.kv.spec import KvGroup, KvSpec
        limit = 2 * memfd.mapping_limit()
        memfd.mapping_limit = lambda: 1 << 40
        count = 2 * limit
        spec = KvSpec((KvGroup((0,), 4096),), 1, count, 2, count)
        arena = memfd.MemfdArena(spec, 1, 512, torch.float32, torch.device("cpu"))
        # Python itself cannot live without mappings: it gets these back once the arena has met the limit.
        ballast = virtual.AddressRange(2000 * 4096)
        for address in range(ballast.address, ballast.address + ballast.size, 8192):
            virtual.map_memory(address, 4096, 1, virtual.UNUSED | virtual.MAP_FIXED)
        held = 0
        try:
            while True:
                arena.map(0, held + 1)
                arena.map(1, held + 1)
                held += 1
        except MemoryError as error:
            ballast.close()
            print(error)
        assert limit * 0.8 < 2 * held <= limit, held
        arena.view(0, 0, held)[-1] = 1.0
        arena.unmap(1, held // 2)
        arena.map(0, held + 5)
        arena.view(0, 0, held + 5)[-1] = 1.0
        arena.close()
        print("survived")
    """
    command = [sys.executable, "-c", textwrap.dedent(script)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=100, cwd=Path(__file__).parents[2])
    assert re.search("cannot be mapped: .*Cannot allocate memory\nsurvived", result.stdout), result


def test_terabytes_of_addresses_take_no_memory():
    """256 slots of 128K tokens of an 8B model in bf16: 4 TiB of addresses, of which the last row is used."""
    spec = KvSpec(kv_groups(32, 4096, 4), 16, 8192, 256, 131072)
    arena = make_arena("memfd", spec, 8, 128, torch.bfloat16, CPU)
    before = len(process_maps())
    arena.map(255, 8192)
    rows = torch.tensor([arena.base_row(255) + 131071, arena.base_row(255)])
    arena.layer_kv(31)[rows] = torch.full((2, 2, 8, 128), 3.0, dtype=torch.bfloat16)
    assert (arena.layer_kv(31).index_select(0, rows) == 3.0).all()
    assert (arena.view(255, 31, 131072)[-1] == 3.0).all()
    assert len(process_maps()) <= before + 16
    arena.close()


def test_groups_that_do_not_fit_the_model_are_refused():
    groups = kv_groups(2, 4096, 1)
    for spec in (KvSpec(groups, 1, 4, 2, 4), KvSpec(kv_groups(2, 256, 1), 3, 4, 2, 6)):
        with pytest.raises(ValueError, match=r"bytes a token|whole pages"):
            make_arena("memfd", spec, 2, 16, torch.float32, CPU)
