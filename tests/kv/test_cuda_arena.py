"""What only CUDA memory has: handles, blocks split and joined, a thread that maps. On a driver made of mmap."""

import gc
import threading
import time

import numpy as np
import pytest
import torch
from bladellm_kernels.kv_format import KV_FORMATS
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bladellm_runtime.kv.arena import KEPT_DURATIONS, ArenaStats, KvShape
from bladellm_runtime.kv.cuda_arena import CudaArena
from bladellm_runtime.kv.cuda_driver import CudaDriver
from bladellm_runtime.kv.operations import Copy, Hide, MemoryPlan, Show, SwapIn, SwapOut
from bladellm_runtime.kv.sizing import kv_groups
from bladellm_runtime.kv.spec import KvSpec
from tests.kv.accounting_model import AccountingModel
from tests.kv.arena_cases import CPU, Geometry, assert_holds, layers, run_plan, write
from tests.kv.fake_cuda import CUresult, FakeCuda
from tests.support.cases import examples

GEOMETRY = Geometry(format="int8", kv_heads=3)
GROUPS = 2
BLOCK = [4, 5, 6, 7]
FAILING = ("cuMemCreate", "cuMemMap", "cuMemSetAccess", "cuMemsetD8Async")


@pytest.fixture
def cuda():
    fake = FakeCuda()
    yield fake
    gc.collect()
    fake.dispose()


@pytest.fixture
def arena(cuda):
    arena = GEOMETRY.arena("cuda", cuda)
    cuda.calls.clear()
    yield arena
    arena.close()


def driver_calls(cuda):
    """How often each call was made since the last time."""
    counts = {name: cuda.calls.count(name) for name in sorted(set(cuda.calls))}
    cuda.calls.clear()
    return counts


def test_a_whole_block_takes_one_call_a_group(arena, cuda):
    run_plan(arena, [Show(0, 0, BLOCK, whole=True)])
    assert driver_calls(cuda) == {"cuMemMap": GROUPS, "cuMemSetAccess": GROUPS}
    assert (arena.stats.maps, arena.stats.unmaps, len(arena.stats.map_seconds)) == (GROUPS, 0, GROUPS)
    run_plan(arena, [Hide(0, 0)])
    assert driver_calls(cuda) == {"cuMemUnmap": GROUPS}


def test_what_is_shown_already_takes_no_call(arena, cuda):
    views = [Show(0, 0, BLOCK, whole=True), Show(0, 4, [8, 11])]
    run_plan(arena, views)
    driver_calls(cuda)
    run_plan(arena, views)
    run_plan(arena, [Show(0, 5, [11, 9])])
    assert driver_calls(cuda) == {"cuMemMap": GROUPS, "cuMemSetAccess": GROUPS}


def test_splitting_and_joining_replace_the_memory(arena, cuda):
    run_plan(arena, [Show(0, 0, BLOCK, whole=True), Show(1, 0, BLOCK, whole=True)])
    write(arena, 0, 0, np.arange(1, 4 * arena.spec.granule_tokens + 1))
    handles = len(cuda.handles)
    run_plan(arena, [Show(2, 0, [6])])
    assert len(cuda.handles) == handles + GROUPS * 3
    assert (arena.stats.splits, arena.stats.joins) == (1, 0)
    tokens = arena.spec.granule_tokens
    assert all((kv.payload[arena.base_row(2) :][:tokens] == 0).all() for kv in layers(arena))
    # Home of all blocks, one granule in one slot, and the guard: the two stale views are gone.
    assert len(cuda.mappings) == GROUPS * (3 + 4 + 1 + 1)
    write(arena, 2, 0, np.arange(1, arena.spec.granule_tokens + 1))
    run_plan(arena, [Hide(2, 0), Show(3, 0, BLOCK, whole=True)])
    assert len(cuda.handles) == handles
    assert len(cuda.mappings) == GROUPS * (4 + 1 + 1)
    assert (arena.stats.splits, arena.stats.joins) == (1, 1)
    assert all((kv.payload[arena.base_row(3) :][: 4 * tokens] == 0).all() for kv in layers(arena))


def test_what_a_block_is_made_of_may_be_touched_by_one_call_a_group(arena, cuda):
    """Of each call 28,000 would be made of 106 GiB at start, half of whose blocks are split then."""
    run_plan(arena, [Show(0, 0, [5])])
    made, shown = GROUPS * len(BLOCK), GROUPS
    calls = driver_calls(cuda)
    assert (calls["cuMemCreate"], calls["cuMemMap"]) == (made, made + shown)
    assert calls["cuMemSetAccess"] == GROUPS + shown


def test_granules_of_a_split_block_are_not_split_again(arena, cuda):
    run_plan(arena, [Show(0, 0, [5])])
    driver_calls(cuda)
    run_plan(arena, [Show(0, 1, [4, 7]), Show(1, 0, [5, 6])])
    assert driver_calls(cuda) == {"cuMemMap": GROUPS * 4, "cuMemSetAccess": GROUPS * 4}


def test_a_plan_may_take_a_block_both_ways(arena, cuda):
    """As when the request that was to have a granule is preempted in the same step: the last view stands."""
    run_plan(arena, [Show(1, 0, [0, 6]), Show(0, 0, BLOCK, whole=True)])
    assert mapped_granules(arena, cuda, 0) == [4, 4]
    assert mapped_granules(arena, cuda, 1) == [1, 1]
    run_plan(arena, [Hide(1, 0)], ahead=[Show(1, 0, [6])])
    run_plan(arena)
    assert mapped_granules(arena, cuda, 0) == [0, 0]
    assert mapped_granules(arena, cuda, 1) == [1, 1]


@pytest.mark.parametrize("move", [Copy(6, 0, 1), SwapOut(7, 0)])
def test_contents_that_a_plan_ends_are_not_moved_by_it(arena, move):
    run_plan(arena, [Show(0, 0, BLOCK, whole=True)])
    with pytest.raises(ValueError, match=r"a move reads granule \d, whose block the same plan takes otherwise"):
        run_plan(arena, [Show(1, 0, [5])], [move])
    run_plan(arena, [Show(1, 0, [0])], [Copy(6, 0, 1), SwapOut(7, 0)])


def test_contents_that_moves_bring_to_a_converted_block_may_be_moved_on(arena):
    stamps = np.arange(1, arena.spec.granule_tokens + 1)
    run_plan(arena, [Show(0, 0, BLOCK, whole=True), Show(1, 0, [1])])
    write(arena, 1, 0, stamps)
    run_plan(arena, moves=[SwapOut(1, 0)])
    moves = [SwapIn(0, BLOCK[0]), Copy(BLOCK[0], 2, len(stamps))]
    run_plan(arena, [Show(2, 0, [BLOCK[0], 2])], moves)
    assert_holds(arena, 2, np.concatenate((stamps, stamps)))


def test_a_block_shown_whole_is_not_cut(arena):
    run_plan(arena, [Show(0, 0, BLOCK, whole=True)])
    with pytest.raises(ValueError, match="which 2 would cut"):
        run_plan(arena, [Show(0, 2, [8])])
    run_plan(arena, [Hide(0, 2)])
    write(arena, 0, 0, np.arange(1, 2 * arena.spec.granule_tokens + 1))
    assert_holds(arena, 0, np.arange(1, 2 * arena.spec.granule_tokens + 1))


@settings(max_examples=examples(150), deadline=None, suppress_health_check=list(HealthCheck))
@given(
    call=st.sampled_from(FAILING),
    after=st.integers(0, 12),
    error=st.sampled_from([CUresult.CUDA_ERROR_OUT_OF_MEMORY, CUresult.CUDA_ERROR_UNKNOWN]),
    whole=st.booleans(),
    keep=st.integers(0, 3),
)
def test_a_failing_call_is_unwound(call, after, error, whole, keep):
    """The n-th call of a kind fails while a slot grows into a block to be converted, over what it showed before."""
    cuda = FakeCuda()
    arena = GEOMETRY.arena("cuda", cuda)
    model = AccountingModel(arena)
    model.grow(0, [(8, 1), (10, 1), (9, 1), (11, 1)])
    model.grow(1, [(12, 1), (13, 1)] if whole else [(12, 4)])
    model.grow(2, [(0, 1), (3, 1)])
    model.commit()
    for slot in (0, 2):
        model.write(slot, 0, len(model.granules(slot)) * arena.spec.granule_tokens)
    model.shrink(0, keep, hide=False)
    model.shrink(1, 0, hide=False)
    model.commit()
    show = Show(0, keep, [12, 13, 14, 15], whole=whole)
    cuda.fail[call] = (after, error)
    failed = outcome(arena, show)
    met = call not in cuda.fail
    cuda.fail.clear()
    # Short memory is asked for a second time.
    assert bool(failed) == (met and (call, error) != ("cuMemCreate", CUresult.CUDA_ERROR_OUT_OF_MEMORY))
    assert not failed or failed == f"KV memory of slots [0] cannot be mapped: {call}: {error.name}"
    assert len(arena.granules(0)) == (keep if failed else keep + 4)
    assert mapped_granules(arena, cuda, 0) == [keep if failed else keep + 4] * GROUPS
    model.check()
    assert outcome(arena, show) is None
    assert arena.granules(0)[keep:] == show.granules
    arena.close()
    arena.close()
    cuda.dispose()


def mapped_granules(arena, cuda, slot):
    """How many granules have memory among the addresses of a slot, in each group."""
    found = []
    for layer, group in ((0, arena.spec.groups[0]), (2, arena.spec.groups[1])):
        start = arena.layer(layer).payload.data_ptr() + arena.base_row(slot) * group.token_bytes
        end = start + arena.spec.max_tokens * group.token_bytes
        size = sum(each["size"] for address, each in cuda.mappings.items() if start <= address < end)
        found.append(size // (arena.spec.granule_tokens * group.token_bytes))
    return found


def outcome(arena, show):
    """What is wrong with a plan of one view; None if nothing."""
    try:
        run_plan(arena, [show])
    except MemoryError as error:
        return str(error)
    return None


def test_a_failed_conversion_over_a_whole_block_is_told_as_what_it_is(arena, cuda):
    """The next view finds the block that the slot showed before out of its way."""
    run_plan(arena, [Show(1, 0, [8]), Show(0, 0, BLOCK, whole=True)])
    cuda.fail["cuMemMap"] = (0, CUresult.CUDA_ERROR_UNKNOWN)
    show = Show(0, 0, [12, 9])
    assert outcome(arena, show) == "KV memory of slots [0] cannot be mapped: cuMemMap: CUDA_ERROR_UNKNOWN"
    assert mapped_granules(arena, cuda, 0) == [0, 0]
    assert outcome(arena, show) is None
    assert mapped_granules(arena, cuda, 0) == [2, 2]


@pytest.mark.parametrize("hidden", [True, False])
def test_a_failing_unmap_leaves_no_other_group_mapped(caplog, hidden):
    """Be it in a step or at the end: all the rest is given back."""
    cuda = FakeCuda()
    arena = GEOMETRY.arena("cuda", cuda)
    run_plan(arena, [Show(0, 0, [4, 9]), Show(1, 0, [4])])
    cuda.fail["cuMemUnmap"] = (0, CUresult.CUDA_ERROR_UNKNOWN)
    if hidden:
        with pytest.raises(MemoryError, match="cuMemUnmap: CUDA_ERROR_UNKNOWN"):
            run_plan(arena, [Hide(0, 0)])
        assert mapped_granules(arena, cuda, 0) == [0, 0]
    arena.close()
    assert ("KV memory was not given back: cuMemUnmap" in caplog.text) == (not hidden)
    cuda.dispose()


@pytest.mark.parametrize("helps", [True, False])
def test_short_memory_is_asked_for_twice(monkeypatch, helps):
    """What a converted block gave back is gone meanwhile; torch's cache may have it."""
    emptied = []

    def empty_cache():
        emptied.append(threading.current_thread().name)
        cuda.capacity += helps

    monkeypatch.setattr(torch.cuda, "empty_cache", empty_cache)
    cuda = FakeCuda()
    arena = GEOMETRY.arena("cuda", cuda)
    cuda.capacity = sum(size for _, size in cuda.handles.values()) - 1
    if helps:
        run_plan(arena, [Show(0, 0, [4])])
    else:
        with pytest.raises(MemoryError, match="cuMemCreate: CUDA_ERROR_OUT_OF_MEMORY"):
            run_plan(arena, [Show(0, 0, [4])])
        cuda.capacity += 1
        run_plan(arena, [Show(0, 0, [6])])
    assert emptied == ["kv-mapper"]
    arena.close()
    cuda.dispose()


def test_too_little_memory_at_the_start_leaves_nothing():
    cuda = FakeCuda(capacity=300_000)
    with pytest.raises(MemoryError, match="cuMemCreate: CUDA_ERROR_OUT_OF_MEMORY"):
        GEOMETRY.but(blocks=50).arena("cuda", cuda)
    cuda.dispose()


def test_an_arena_that_is_collected_gives_everything_back(cuda):
    gc.collect()
    threads = threading.active_count()
    arena = GEOMETRY.arena("cuda", cuda)
    run_plan(arena, [Show(0, 0, [4, 9])])
    assert threading.active_count() == threads + 1
    del arena
    gc.collect()
    assert threading.active_count() == threads


def test_a_driver_that_fails_at_the_end_is_survived(caplog):
    cuda = FakeCuda()
    arena = GEOMETRY.arena("cuda", cuda)
    cuda.fail["cuCtxSynchronize"] = (0, CUresult.CUDA_ERROR_UNKNOWN)
    arena.close()
    assert "KV memory was not given back: cuCtxSynchronize: CUDA_ERROR_UNKNOWN" in caplog.text


def test_steps_wait_for_their_own_views_only(monkeypatch, arena, cuda):
    """While the driver is stuck in a view ahead, `submit` and `wait` return; the next `wait` is for it too."""
    stuck, at_it = threading.Event(), threading.Event()
    original, granule = cuda.cuMemMap, GEOMETRY.spec("cuda").granule_tokens

    def slow(address, size, *rest):
        if threading.current_thread().name == "kv-mapper" and at_it.is_set():
            assert stuck.wait(10)
        return original(address, size, *rest)

    cuda.cuMemMap = slow
    run_plan(arena, [Show(0, 0, BLOCK, whole=True)])
    at_it.set()
    run_plan(arena, [], ahead=[Show(1, 0, [8, 9])])
    write(arena, 0, 0, np.arange(1, granule + 1))
    arena.submit(MemoryPlan([Hide(0, 0)]))
    assert arena.granules(1) == [8, 9]
    threading.Timer(0.2, stuck.set).start()
    start = time.perf_counter()
    arena.wait()
    assert time.perf_counter() - start > 0.15
    assert 0.15 < arena.stats.wait_seconds < 5
    write(arena, 1, 0, np.arange(1, 2 * granule + 1))
    assert_holds(arena, 1, np.arange(1, 2 * granule + 1))


@pytest.mark.parametrize("move", [Copy(1, 6, 3), SwapIn(0, 6)])
def test_moves_wait_for_the_memory_they_write_to(arena, cuda, move):
    """The target's block is converted by a view ahead, slowly."""
    run_plan(arena, [Show(0, 0, [1])])
    write(arena, 0, 0, np.arange(1, arena.spec.granule_tokens + 1))
    run_plan(arena, [], [SwapOut(1, 0)])
    original = cuda.cuMemCreate
    cuda.cuMemCreate = lambda *arguments: (time.sleep(0.01), original(*arguments))[1]
    run_plan(arena, [], [move], ahead=[Show(1, 0, [6])])
    run_plan(arena)
    assert_holds(arena, 1, np.arange(1, 4))


def test_views_of_a_plan_come_before_those_ahead(arena):
    arena.submit(MemoryPlan([Show(0, 0, [1, 2])], ahead=[Show(0, 2, [3])]))
    arena.submit(MemoryPlan([Show(0, 1, [8]), Hide(0, 2)]))
    arena.wait()
    assert arena.granules(0) == [1, 8]


def test_events_are_kept_on_request(arena):
    run_plan(arena, [Show(0, 0, BLOCK, whole=True)])
    assert not arena.stats.events
    arena.stats.trace(5)
    run_plan(arena, [Hide(0, 0), Show(1, 0, [4])])
    run_plan(arena, [])
    assert sorted(event.kind for event in arena.stats.events) == ["hide", "show", "split", "wait", "wait"]
    assert all(event.start <= event.end for event in arena.stats.events)
    run_plan(arena, [])
    assert len(arena.stats.events) == 5


def test_durations_are_the_latest():
    stats = ArenaStats()
    for number in range(2 * KEPT_DURATIONS + 10):
        stats.mapped(float(number))
    assert stats.maps == 2 * KEPT_DURATIONS + 10
    assert sorted(stats.map_seconds) == [float(n) for n in range(KEPT_DURATIONS + 10, 2 * KEPT_DURATIONS + 10)]


def test_the_percentile_of_mapping_calls_follows_them():
    stats = ArenaStats()
    assert stats.map_p99() == 0.0
    for count in range(1, 3 * KEPT_DURATIONS):
        stats.mapped(float(count))
        exact = sorted(stats.map_seconds)[len(stats.map_seconds) * 99 // 100] if count % 97 == 0 else None
        found = stats.map_p99()
        # At most an eighth of the calls are not in it yet, and each is 1 more than the one before.
        assert exact is None or exact - len(stats.map_seconds) / 8 - 1 <= found <= exact


def test_terabytes_of_addresses(cuda):
    """256 slots of 1M tokens of four layers: 4 TiB, of which the last row is used."""
    shape = KvShape(8, 128, torch.bfloat16, KV_FORMATS["no_quant"])
    spec = KvSpec(kv_groups(4, 4096, 4), 64, 16, 256, 1 << 20, block_granules=4)
    arena = CudaArena(spec, shape, CPU, CudaDriver(0, cuda))
    run_plan(arena, [Show(255, 0, BLOCK, whole=True)])
    payload, last = arena.layer(3).payload, arena.base_row(255) + 255
    assert payload.stride(0) * last > 1 << 40
    rows = torch.tensor([last, last - 255])
    payload[rows] = torch.full((2, 2, 8, 128), 3.0, dtype=torch.bfloat16)
    assert (payload.index_select(0, rows) == 3.0).all()
    arena.close()


def test_a_pool_of_part_blocks_is_refused(cuda):
    spec = GEOMETRY.spec("cuda")
    for changes in ({"num_granules": 15}, {"granule_tokens": 1, "max_tokens": 8}):
        wrong = type(spec)(**{name: getattr(spec, name) for name in spec.__slots__} | changes)
        with pytest.raises(ValueError, match="whole pages of 4096 bytes, and the pool whole blocks"):
            CudaArena(wrong, GEOMETRY.shape, CPU, CudaDriver(0, cuda))
