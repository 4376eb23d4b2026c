"""For which mappings a step on CUDA memory waits: those that its rows and moves enter, and no others."""

import gc
import random
import threading
import time

import numpy as np
import pytest

from bladellm_runtime.engine.core import EngineCore
from bladellm_runtime.kv import mapper
from bladellm_runtime.kv.accounting import KvAccounting
from bladellm_runtime.kv.operations import Copy, Hide, MemoryPlan, Rows, Show, SwapIn, SwapOut
from bladellm_runtime.request import SamplingParams
from bladellm_runtime.scheduler.limits import SchedulerLimits
from bladellm_runtime.scheduler.scheduler import Scheduler
from bladellm_runtime.wire.messages import AddRequest
from tests.kv.arena_cases import Geometry, assert_holds, run_plan, write
from tests.kv.fake_cuda import PAGE, CUresult, FakeCuda
from tests.kv.test_scheduled_arenas import VOCAB, ContentRunner

GEOMETRY = Geometry()
GROUPS = 2
BLOCK = [4, 5, 6, 7]
SECONDS = 10


class GatedCuda(FakeCuda):
    """Once `gate` is set, the mapping thread stops before every call that creates memory, maps or unmaps it, until
    `allow` lets some of them through."""

    def __init__(self):
        super().__init__()
        self.gate = False
        self.waiting = threading.Event()
        self._allowed = threading.Semaphore(0)

    def allow(self, calls):
        self._allowed.release(calls)

    def open(self):
        """Let everything through from now on."""
        self.gate = False
        self._allowed.release(1)

    def _outcome(self, name):
        if self.gate and name in ("cuMemCreate", "cuMemMap", "cuMemUnmap"):
            self.waiting.set()
            assert self._allowed.acquire(timeout=SECONDS), "nobody lets the mapping thread go on"
        return super()._outcome(name)


@pytest.fixture
def cuda():
    fake = GatedCuda()
    yield fake
    gc.collect()
    fake.dispose()


@pytest.fixture
def arena(cuda):
    arena = GEOMETRY.arena("cuda", cuda)
    yield arena
    if cuda.gate:
        cuda.open()
    arena.close()


def step(arena, views=(), rows=(), moves=(), ahead=()):
    """Submit a step with rows (slot, first position, tokens); `wait` is the caller's matter."""
    slots, starts, lengths = zip(*rows, strict=True) if rows else ((), (), ())
    numbers = (np.array(each, np.int64) for each in (slots, starts, lengths))
    arena.submit(MemoryPlan(list(views), list(moves), list(ahead)), Rows(*numbers))


def in_thread(call):
    """Start a call in a thread, and say so when it has returned."""
    returned = threading.Event()
    threading.Thread(target=lambda: (call(), returned.set()), daemon=True).start()
    return returned


def test_a_conversion_for_one_slot_does_not_delay_steps_of_another(arena, cuda):
    """The conversion is stuck in the driver's call all the time."""
    tokens = arena.spec.granule_tokens
    run_plan(arena, [Show(1, 0, [0, 1])])
    cuda.gate = True
    step(arena, rows=[(1, 0, tokens)], ahead=[Show(0, 0, [5])])
    assert cuda.waiting.wait(SECONDS)
    for position in range(2 * tokens):
        step(arena, rows=[(1, position, 1)])
        arena.wait()
    step(arena, ahead=[Show(2, 0, [6])])
    arena.wait()
    step(arena, rows=[(0, 0, 1)])
    waiting = in_thread(arena.wait)
    assert not waiting.wait(0.1)
    cuda.open()
    assert waiting.wait(SECONDS)
    assert (arena.stats.splits, arena.granules(0)) == (2, [5])


def test_what_a_step_needs_goes_between_the_calls_of_a_conversion(arena, cuda):
    """Slot 1 grows by a granule while a block is split for slot 0: after one call of that, its own come first."""
    run_plan(arena, [Show(1, 0, [0])])
    cuda.gate = True
    step(arena, ahead=[Show(0, 0, [5])])
    assert cuda.waiting.wait(SECONDS)
    step(arena, [Show(1, 1, [1])], rows=[(1, arena.spec.granule_tokens, 1)])
    # The call that the conversion is at, and those of the granule.
    cuda.allow(1 + GROUPS)
    assert in_thread(arena.wait).wait(SECONDS)
    assert arena.stats.splits == 1
    assert arena.granules(1) == [0, 1]
    write(arena, 1, 0, np.arange(1, 2 * arena.spec.granule_tokens + 1))
    cuda.open()
    run_plan(arena)
    assert arena.stats.splits == 2


@pytest.mark.parametrize("again", [[], [Show(2, 0, BLOCK, whole=True)]])
def test_a_view_in_place_of_a_block_comes_after_what_splits_that(arena, cuda, again):
    """A slot's next sequence needs its memory at once, and the slot still shows a whole block that another one has been
    given a granule of: the block is shown from a position on that lies before the view. again: it is joined, too.
    """
    run_plan(arena, [Show(0, 0, BLOCK, whole=True)])
    cuda.gate = True
    step(arena, ahead=[Show(3, 0, [9]), Show(1, 0, [5]), *again, Show(0, 2, [8])])
    assert cuda.waiting.wait(SECONDS)
    step(arena, [Show(0, 0, [0, 1])], rows=[(0, 0, 3 * arena.spec.granule_tokens)])
    waiting = in_thread(arena.wait)
    assert not waiting.wait(0.1)
    cuda.open()
    assert waiting.wait(SECONDS)
    assert (arena.stats.splits, arena.granules(0)[:3], arena.granules(1)) == (3, [0, 1, 8], [5])
    assert mapped(arena, cuda, 0, 3)


def test_a_chunk_does_not_wait_for_the_memory_behind_it(arena, cuda):
    tokens = arena.spec.granule_tokens
    cuda.gate = True
    step(arena, [Show(0, 0, BLOCK, whole=True), Show(0, 4, [8, 9, 10, 11], whole=True)], rows=[(0, 0, 4 * tokens)])
    cuda.allow(GROUPS)
    arena.wait()
    write(arena, 0, 0, np.arange(1, 4 * tokens + 1))
    step(arena, rows=[(0, 4 * tokens, 1)])
    cuda.allow(GROUPS)
    arena.wait()
    write(arena, 0, 4 * tokens, np.arange(1, 2))


def test_a_step_waits_for_what_an_earlier_plan_had_ahead_for_it(arena, cuda):
    """And for what comes before that in the same slot and block, even a conversion, but for nothing else."""
    cuda.gate = True
    step(arena, ahead=[Show(1, 0, [1]), Show(0, 0, [5]), Show(2, 0, BLOCK, whole=True), Show(3, 0, [9])])
    step(arena, rows=[(2, 0, 1)])
    waiting = in_thread(arena.wait)
    assert not waiting.wait(0.1)
    cuda.open()
    assert waiting.wait(SECONDS)
    assert mapped(arena, cuda, 2, 4)
    assert (arena.stats.joins, arena.granules(0)) == (1, [5])


def test_a_hold_puts_off_views_ahead_but_none_that_a_step_enters(arena, cuda, monkeypatch):
    monkeypatch.setattr(mapper, "HOLD_SECONDS", 60.0)
    tokens = arena.spec.granule_tokens
    arena.hold()
    step(arena, [Show(1, 0, [1])], rows=[(1, 0, tokens)], ahead=[Show(0, 0, [0]), Show(1, 1, [2])])
    arena.wait()
    assert mapped(arena, cuda, 1, 1)
    assert [view.job.done for view in arena._pending] == [True, False, False]
    step(arena, rows=[(1, tokens, 1)])
    arena.wait()
    assert mapped(arena, cuda, 1, 2)
    assert not mapped(arena, cuda, 0, 1)
    arena.resume()
    run_plan(arena)
    assert mapped(arena, cuda, 0, 1)


def test_after_a_hold_the_views_of_a_plan_come_before_what_was_ahead(arena, cuda, monkeypatch):
    """The next step may enter them; this one does not wait for them."""
    monkeypatch.setattr(mapper, "HOLD_SECONDS", 60.0)
    # A granule of each block, so that none is to be converted.
    run_plan(arena, [Show(1, 0, [1, 5, 9, 13])])
    arena.hold()
    cuda.gate = True
    step(arena, ahead=[Show(0, 0, [0]), Show(3, 0, [3])], rows=[(1, 0, 1)])
    step(arena, [Show(2, 0, [9, 10])], rows=[(1, 1, 1)], ahead=[Show(0, 1, [2])])
    arena.wait()
    assert not any(arena.is_shown(slot, 1) for slot in (0, 2, 3))
    assert arena.is_shown(1, 1)
    arena.resume()
    cuda.allow(GROUPS)
    wait_until(lambda: arena.is_shown(2, 1))
    assert not arena.is_shown(2, 2)
    cuda.allow(GROUPS)
    wait_until(lambda: arena.is_shown(2, 2))
    assert not any(arena.is_shown(slot, 1) for slot in (0, 3))
    cuda.open()
    run_plan(arena)
    assert all(arena.is_shown(slot, 1) for slot in (0, 2, 3))


def wait_until(true):
    deadline = time.monotonic() + SECONDS
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_moves_do_not_wait_for_views_of_the_memory_they_write_to(arena, cuda):
    run_plan(arena, [Show(0, 0, [1, 2])])
    write(arena, 0, 0, np.arange(1, 2 * arena.spec.granule_tokens + 1))
    cuda.gate = True
    # In the same block.
    move = Copy(1, 3, 3)
    step(arena, [Show(1, 0, [3])], rows=[(0, 0, 1)], moves=[move])
    assert in_thread(arena.wait).wait(SECONDS)
    arena.move([move])
    cuda.open()
    step(arena, rows=[(1, 0, 3)])
    arena.wait()
    assert_holds(arena, 1, np.arange(1, 4))


@pytest.mark.parametrize("move", [Copy(1, 6, 3), SwapIn(0, 6)])
def test_moves_wait_for_the_memory_they_write_to_without_a_row(arena, cuda, move):
    """The target's block is converted by a view ahead, slowly."""
    run_plan(arena, [Show(0, 0, [1])])
    write(arena, 0, 0, np.arange(1, arena.spec.granule_tokens + 1))
    run_plan(arena, [], [SwapOut(1, 0)])
    original = cuda.cuMemCreate
    cuda.cuMemCreate = lambda *arguments: (time.sleep(0.01), original(*arguments))[1]
    step(arena, moves=[move], ahead=[Show(1, 0, [6])])
    arena.wait()
    arena.move([move])
    run_plan(arena)
    assert_holds(arena, 1, np.arange(1, 4))


def test_errors_are_raised_by_the_step_that_enters_the_slot(arena, cuda):
    """A conversion for slot 0 fails, which slot 1 has nothing to do with. Tried again, it succeeds."""
    tokens = arena.spec.granule_tokens
    run_plan(arena, [Show(0, 0, [0]), Show(1, 0, [1])])
    cuda.fail["cuMemMap"] = (3, CUresult.CUDA_ERROR_UNKNOWN)
    step(arena, ahead=[Show(0, 1, [5, 6]), Show(0, 3, [2])])
    for position in range(tokens):
        step(arena, rows=[(0, position, 1), (1, position, 1)])
        arena.wait()
    step(arena, rows=[(1, 0, 1), (0, tokens, 1)])
    with pytest.raises(MemoryError, match=r"^KV memory of slots \[0\] cannot be mapped: cuMemMap: CUDA_ERROR_UNKNOWN$"):
        arena.wait()
    assert arena.granules(0) == [0]
    assert mapped(arena, cuda, 0, 1)
    step(arena, [Show(0, 1, [5, 6])], rows=[(0, tokens, 2 * tokens)])
    arena.wait()
    assert mapped(arena, cuda, 0, 3)
    write(arena, 0, 0, np.arange(1, 3 * tokens + 1))
    assert_holds(arena, 0, np.arange(1, 3 * tokens + 1))


def test_a_failed_view_is_raised_however_late_its_slot_is_entered(arena, cuda):
    cuda.fail["cuMemSetAccess"] = (0, CUresult.CUDA_ERROR_OUT_OF_MEMORY)
    step(arena, ahead=[Show(2, 0, [0])])
    for _ in range(3):
        step(arena, [Hide(1, 0)])
        arena.wait()
    step(arena, rows=[(2, 0, 1)])
    with pytest.raises(MemoryError, match=r"slots \[2\] cannot be mapped"):
        arena.wait()
    run_plan(arena)


@pytest.mark.parametrize("between", [[], [Hide(2, 0)]])
def test_a_failed_view_that_another_one_replaces_is_nobodys_error(arena, cuda, between):
    """Mapped ahead for a request that ended; the next one in its slot has other granules there."""
    run_plan(arena, [Show(1, 0, [0, 1, 3])])
    cuda.fail["cuMemSetAccess"] = (0, CUresult.CUDA_ERROR_OUT_OF_MEMORY)
    step(arena, ahead=[Show(2, 0, [0])])
    for view in between:
        step(arena, [view])
        arena.wait()
    step(arena, [Show(2, 0, [1, 3])], rows=[(2, 0, 1)])
    arena.wait()
    assert not cuda.fail
    assert mapped(arena, cuda, 2, 1)
    assert arena.granules(2) == [1, 3]


class SlowCuda(FakeCuda):
    """Calls take a random while, and memory is zero only some time after that was asked for."""

    def __init__(self, rng):
        super().__init__()
        self.rng = rng
        self.slow = False

    def cuStreamQuery(self, stream):
        if self.slow and self.rng.random() < 0.5:
            return (CUresult.CUDA_ERROR_NOT_READY,)
        return super().cuStreamQuery(stream)

    def _outcome(self, name):
        if self.slow and self.rng.random() < 0.3:
            time.sleep(self.rng.random() * 2e-3)
        return super()._outcome(name)


class CheckingRunner(ContentRunner):
    """Before each row, checks that the driver has mapped what the row enters, and nothing else in its place."""

    def __init__(self, arena, cuda):
        super().__init__(arena)
        self.cuda = cuda
        self.unfinished = 0

    def run(self, plan, row):
        end = plan.starts[row] + plan.query_lens[row]
        granules = -(-end // self.arena.spec.granule_tokens)
        assert mapped(self.arena, self.cuda, plan.slots[row], granules), f"step {plan.step} enters what is not there"
        self.unfinished += any(not view.job.done for view in self.arena._pending)
        return super().run(plan, row)


def mapped(arena, cuda, slot, granules):
    """Whether exactly so many granules of a slot, at least, are mapped in each group to what is at their homes."""
    memory, spec = arena._memory, arena.spec
    for start, home, group in zip(memory.slots, memory.homes, spec.groups, strict=True):
        size = spec.granule_tokens * group.token_bytes
        for position, granule in enumerate(arena.granules(slot)[:granules]):
            there = physical(cuda, start + (slot * spec.max_tokens // spec.granule_tokens + position) * size)
            if there is None or there != physical(cuda, home + granule * size):
                return False
    return len(arena.granules(slot)) >= granules


def physical(cuda, address):
    """The handle at an address and the place in it; None where nothing is mapped to read and write."""
    for start, mapping in list(cuda.mappings.items()):
        if start <= address < start + mapping["size"] and mapping["access"]:
            return mapping["handle"], (address - start) // PAGE
    return None


@pytest.mark.parametrize("overlap", [True, False])
def test_no_step_enters_an_unfinished_view(overlap):
    """Random requests on a driver with random delays: every row finds its memory, and its own tokens in it."""
    rng = random.Random()
    geometry = Geometry(num_layers=2, kv_heads=1, num_slots=5, blocks=8, block_granules=2, max_granules=10)
    cuda = SlowCuda(rng)
    arena = geometry.arena("cuda", cuda)
    spec, cuda.slow = arena.spec, True
    memory = KvAccounting(spec, shares=arena.shares, sticky=arena.sticky, progress=arena if arena.background else None)
    limits = SchedulerLimits(2 * spec.granule_tokens, 2 * spec.granule_tokens, spec.max_tokens, frozenset(), VOCAB)
    runner = CheckingRunner(arena, cuda)
    core = EngineCore(Scheduler(limits, memory), runner, overlap=overlap)
    beginnings = [[rng.randrange(VOCAB) for _ in range(5 * spec.granule_tokens)] for _ in range(3)]
    for request in range(40):
        prompt = rng.choice(beginnings)[: rng.randint(1, 5 * spec.granule_tokens)]
        prompt = prompt + [rng.randrange(VOCAB) for _ in range(rng.randint(1, spec.granule_tokens))]
        params = SamplingParams(max_tokens=rng.randint(1, 3 * spec.granule_tokens), ignore_eos=True)
        core.add(AddRequest(request, prompt, params, 0, time.monotonic()))
        for _ in range(rng.randint(0, 12)):
            core.step()
    while not core.idle:
        core.step()
    assert arena.stats.splits > 0
    assert arena.stats.joins > 0
    assert runner.unfinished > 0, "no step ran beside a mapping"
    arena.close()
    cuda.dispose()
