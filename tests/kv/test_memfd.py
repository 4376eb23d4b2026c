"""What only mapped memory has: guards, limits of the system, and nothing left behind."""

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
from bladellm_kernels.kv_format import NO_QUANT

from bladellm_runtime.kv import sizing, virtual
from bladellm_runtime.kv.arena import KvShape
from bladellm_runtime.kv.factory import make_arena
from bladellm_runtime.kv.operations import Hide, Show
from bladellm_runtime.kv.sizing import kv_groups, plan_spec, worst_mappings
from bladellm_runtime.kv.spec import KvSpec
from tests.kv.accounting_model import AccountingModel
from tests.kv.arena_cases import CPU, Geometry, run_plan

GEOMETRY = Geometry(layers_per_group=1, num_slots=6, blocks=40, block_granules=1, max_granules=16)
SHAPE = GEOMETRY.shape


def process_maps():
    return Path("/proc/self/maps").read_text().splitlines()


def file_mappings(arena=None):
    """(start, end) of every mapping of a KV memory file in this process, the arena's whole file left out."""
    lines = [line for line in process_maps() if "bladellm-kv" in line]
    found = [tuple(int(part, 16) for part in line.split()[0].split("-")) for line in lines]
    home = None if arena is None else (arena._home.address, arena._home.address + arena._home.size)
    return [mapping for mapping in found if mapping != home]


def churn(model, steps):
    """Requests grow, share and end at random."""
    random = np.random.default_rng()
    for _ in range(steps):
        slot, other = (int(number) for number in random.integers(model.spec.num_slots, size=2))
        if model.slots[slot] and random.random() < 0.4:
            model.shrink(slot, int(random.integers(len(model.slots[slot]))))
        elif not model.slots[other] and model.slots[slot]:
            model.append(other, list(model.slots[slot]))
        elif (free := model.free_singles()) and model.room(slot):
            model.grow(slot, [(int(random.choice(free)), 1)])
        model.commit()


def test_exactly_the_granules_shown_are_accessible():
    arena = GEOMETRY.arena("memfd")
    model = AccountingModel(arena)
    churn(model, 300)
    model.check()
    expected = set()
    page = os.sysconf("SC_PAGESIZE")
    for layer in range(3):
        start = arena.layer(layer).payload.data_ptr()
        row = arena.spec.groups[layer].token_bytes
        for slot in range(arena.spec.num_slots):
            first = start + arena.base_row(slot) * row
            size = len(model.granules(slot)) * arena.spec.granule_tokens * row
            expected.update(range(first, first + size, page))
    assert {address for start, end in file_mappings(arena) for address in range(start, end, page)} == expected
    arena.close()


def test_granules_in_a_row_are_one_mapping():
    """However they came: at once, one by one, or in place of others."""
    arena = GEOMETRY.arena("memfd")
    run_plan(arena, [Show(0, 0, [0, 1]), Show(1, 0, [9, 12, 4])])
    run_plan(arena, [Hide(1, 0), Show(0, 2, [2, 3]), Show(0, 4, [4])])
    run_plan(arena, [Show(1, 0, [7, 20, 9]), Show(1, 1, [8])])
    assert len(file_mappings(arena)) == 3 * 2
    assert arena.mappings == 3 * (2 + 2 + 1) + 1
    arena.close()


def test_neither_mappings_nor_files_stay_after_close_or_collection():
    def use(close):
        arena = GEOMETRY.arena("memfd")
        churn(AccountingModel(arena), 50)
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
    run_plan(arena, [Show(1, 0, [3, 5])])
    base = arena.base_row(1)
    rows = arena.layer(2).payload[base : base + 4]
    rows[:] = 3.0
    del arena
    gc.collect()
    assert (rows == 3.0).all()
    del rows
    gc.collect()
    assert not file_mappings()


@pytest.mark.parametrize("failing", range(6))
@pytest.mark.parametrize("position", [0, 1, 3])
def test_a_refused_mapping_is_unwound(monkeypatch, failing, position):
    """The system refuses the n-th mapping of a view that takes two a group, over granules shown before."""
    arena = GEOMETRY.arena("memfd")
    model = AccountingModel(arena)
    model.grow(0, [(5, 1), (6, 1), (7, 1)])
    model.grow(1, [(0, 1), (30, 1)])
    model.commit()
    model.write(0, 0, 3 * arena.spec.granule_tokens)
    model.write(1, 0, 2 * arena.spec.granule_tokens)
    model.shrink(0, position, hide=False)
    original, calls = virtual.map_memory, iter(range(10**6))

    def refusing(address, size, protection, flags, fd=-1, offset=0):
        if fd >= 0 and next(calls) == failing:
            raise OSError(errno.ENOMEM, "mmap refused")
        return original(address, size, protection, flags, fd, offset)

    monkeypatch.setattr(virtual, "map_memory", refusing)
    views = [Show(0, position, [20, 22]), Show(2, 0, [33])]
    with pytest.raises(MemoryError, match=r"slot 0 cannot be mapped.*refused"):
        run_plan(arena, views)
    monkeypatch.undo()
    assert [len(arena.granules(slot)) for slot in range(3)] == [position, 2, 1]
    page_counts = [sum(end - start for start, end in file_mappings(arena)) // 4096, arena.mappings]
    assert page_counts[0] == 3 * (position + 2 + 1) * arena.spec.granule_tokens * SHAPE.payload_bytes // 4096
    assert page_counts[1] == 3 * ((position > 0) + 2 + 1 + (position > 0) + 2 + 1) + 1
    model.check()
    run_plan(arena, views)
    assert arena.granules(0)[position:] == [20, 22]
    arena.close()


def test_the_arena_keeps_below_max_map_count(monkeypatch, tmp_path):
    """Fragments on purpose; the arena refuses before the system would, and works on when there is room again."""
    limit_file = tmp_path / "max_map_count"
    limit_file.write_text("120")
    monkeypatch.setattr(sizing, "MAX_MAP_COUNT", limit_file)
    arena = GEOMETRY.arena("memfd")
    refused = None
    for granules in range(16):
        try:
            run_plan(arena, [Show(0, granules, [2 * granules]), Show(1, granules, [39 - 2 * granules])])
        except MemoryError as error:
            refused = error
            break
    assert "60 mappings, half of vm.max_map_count" in str(refused)
    assert len(file_mappings()) <= arena.mappings <= 60
    run_plan(arena, [Show(0, 1, [1]), Hide(0, 4), Show(1, 0, [5, 7])])
    arena.close()


def test_a_planned_arena_without_sharing_never_meets_the_mapping_limit(monkeypatch, tmp_path):
    limit_file = tmp_path / "max_map_count"
    limit_file.write_text("400")
    monkeypatch.setattr(sizing, "MAX_MAP_COUNT", limit_file)
    groups = kv_groups(3, SHAPE.payload_bytes, 1)
    spec = plan_spec(groups, 1 << 22, num_slots=8, max_model_len=3000, granule_tokens_hint=16, page_bytes=4096)
    assert worst_mappings(3, spec.num_granules, 8) <= 200
    arena = make_arena("memfd", "ragged_flash", spec, SHAPE, CPU)
    model = AccountingModel(arena)
    random = np.random.default_rng()
    for step in range(2000):
        slot = int(random.integers(8))
        if random.random() < 0.3:
            model.shrink(slot, int(random.integers(len(model.slots[slot]) + 1)))
        elif model.room(slot) and (free := model.free_singles()):
            model.grow(slot, [(int(random.choice(free)), 1)])
        model.commit()
        assert arena.mappings <= 200
        if step % 50 == 0:
            assert len(file_mappings()) <= arena.mappings
    arena.close()


def test_the_systems_own_limit_is_survived():
    """Without the arena's limit, in a process of its own: mmap fails with ENOMEM, and the arena goes on after it."""
    script = """
        import torch
        from bladellm_kernels.kv_format import NO_QUANT
        from bladellm_runtime.kv import memfd, virtual
        from bladellm_runtime.kv.arena import KvShape
        from bladellm_runtime.kv.operations import Hide, Show
        from bladellm_runtime.kv.spec import KvGroup, KvSpec
        from tests.kv.arena_cases import run_plan
        limit = 2 * memfd.mapping_limit()
        memfd.mapping_limit = lambda: 1 << 40
        count = 2 * limit
        spec = KvSpec((KvGroup((0,), 4096),), 1, count, 2, count)
        arena = memfd.MemfdArena(spec, KvShape(1, 512, torch.float32, NO_QUANT), torch.device("cpu"))
        rows = arena.layer(0).payload
        # Python itself cannot live without mappings: it gets these back once the arena has met the limit.
        ballast = virtual.AddressRange(2000 * 4096)
        for address in range(ballast.address, ballast.address + ballast.size, 8192):
            virtual.map_memory(address, 4096, 1, virtual.UNUSED | virtual.MAP_FIXED)
        views = [Show(0, first, list(range(2 * first, 2 * first + 200, 2))) for first in range(0, limit, 100)]
        held = 0
        try:
            for view in views:
                run_plan(arena, [view])
                held += 100
        except MemoryError as error:
            ballast.close()
            print(error)
        assert limit * 0.8 < held <= limit, held
        rows[held - 1] = 1.0
        run_plan(arena, [Hide(0, held // 2)])
        run_plan(arena, [Show(0, held // 2, [1, 3, 5]), Show(1, 0, [7])])
        rows[held // 2 + 2] = 1.0
        arena.close()
        print("survived")
    """
    command = [sys.executable, "-c", textwrap.dedent(script)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=100, cwd=Path(__file__).parents[2])
    assert re.search("cannot be mapped: .*Cannot allocate memory\nsurvived", result.stdout), result


def test_terabytes_of_addresses_take_no_memory():
    """256 slots of 128K tokens of an 8B model in bf16: 4 TiB of addresses, of which the last row is used."""
    spec = KvSpec(kv_groups(32, 4096, 4), 16, 8192, 256, 131072)
    shape = KvShape(8, 128, torch.bfloat16, NO_QUANT)
    arena = make_arena("memfd", "ragged_flash", spec, shape, CPU)
    before = len(process_maps())
    run_plan(arena, [Show(255, 0, [*range(8192)])])
    rows = torch.tensor([arena.base_row(255) + 131071, arena.base_row(255)])
    payload = arena.layer(31).payload
    payload[rows] = torch.full((2, 2, 8, 128), 3.0, dtype=torch.bfloat16)
    assert (payload.index_select(0, rows) == 3.0).all()
    assert (payload[arena.base_row(255) : arena.base_row(255) + 131072][-1] == 3.0).all()
    assert len(process_maps()) <= before + 16
    arena.close()


def test_granules_that_are_not_whole_pages_are_refused():
    spec = KvSpec(kv_groups(3, SHAPE.payload_bytes, 1), 3, 4, 2, 6)
    with pytest.raises(ValueError, match="whole pages of 4096 bytes"):
        make_arena("memfd", "ragged_flash", spec, SHAPE, CPU)
