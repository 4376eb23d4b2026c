"""Requests wait for adapters first come, first served, and keep nothing they were given; loads take a while."""

import random
from pathlib import Path

import pytest

from bladellm_runtime.engine.adapters import AdapterPreparer
from bladellm_runtime.engine.core import EngineCore
from bladellm_runtime.engine.preparation import RefusedError, WaitingRoom
from bladellm_runtime.engine.ranked_loader import RankedLoader
from bladellm_runtime.errors import CheckpointError
from bladellm_runtime.kv.accounting import KvAccounting
from bladellm_runtime.kv.spec import KvGroup, KvSpec
from bladellm_runtime.lora.loader import Outcome
from bladellm_runtime.lora.policy import AdapterPolicy, Move
from bladellm_runtime.lora.store import AdapterStore
from bladellm_runtime.ranks.messages import AdapterMoved, DropAdapter, LoadAdapter
from bladellm_runtime.request import FinishReason, SamplingParams
from bladellm_runtime.scheduler.admission import cache_key
from bladellm_runtime.scheduler.limits import SchedulerLimits
from bladellm_runtime.scheduler.prepared import Prepared
from bladellm_runtime.scheduler.scheduler import Scheduler
from bladellm_runtime.wire.messages import AddRequest, EngineStats, MoveAdapter
from tests.engine.test_core import EOS, VOCAB, ArithmeticRunner, drain, expected, make_requests

SLOTS, COPIES = 2, 3


class SlowLoader:
    """Carries moves out when told to; those of adapters in `broken` fail."""

    def __init__(self) -> None:
        self.begun: list[Move] = []
        self.dropped: list[str] = []
        self.broken: set[str] = set()
        self._outcomes: list[Outcome] = []
        self.closed = False

    def begin(self, move: Move) -> None:
        self.begun.append(move)

    def finish(self, count: int = 1) -> None:
        """End the oldest moves."""
        for move in self.begun[:count]:
            error = CheckpointError(f"{move.adapter}/config is broken") if move.adapter in self.broken else None
            self._outcomes.append(Outcome(move.adapter, error))
        del self.begun[:count]

    def poll(self) -> list[Outcome]:
        found, self._outcomes = self._outcomes, []
        return found

    def drop(self, adapter: str) -> None:
        self.dropped.append(adapter)

    def close(self) -> None:
        self.closed = True


class Desk:
    """A preparer, its loader, and requests by number that were prepared so far."""

    def __init__(self, loader: SlowLoader | None = None, root: Path = Path("/models")) -> None:
        self.loader = loader or SlowLoader()
        self._root = root
        self.policy = AdapterPolicy(SLOTS, COPIES)
        self.preparer = AdapterPreparer(AdapterStore(self.policy, self.loader), SLOTS)
        self.waiting: dict[int, AddRequest] = {}
        self.ready: dict[int, Prepared] = {}
        self.refused: dict[int, str] = {}

    def ask(self, request_id: int, adapter: str) -> bool:
        """Whether the request is prepared at once."""
        request = AddRequest(request_id, [1], SamplingParams(), 0, 0.0, adapter=str(self._root / adapter))
        assert self.preparer.is_needed(request)
        self.waiting[request_id] = request
        self._prepare(request)
        return request_id in self.ready

    def poll(self) -> None:
        for request_id in self.preparer.poll():
            if request_id in self.waiting:
                self._prepare(self.waiting[request_id])

    def _prepare(self, request: AddRequest) -> None:
        request_id, prepared = request.request_id, Prepared()
        try:
            done = self.preparer.prepare(request, prepared)
        except RefusedError as error:
            self.refused[request_id] = f"{error.code}: {error.sentence}"
            self.end(request_id)
            return
        if done:
            del self.waiting[request_id]
            self.ready[request_id] = prepared

    def end(self, request_id: int) -> None:
        self.waiting.pop(request_id, None)
        self.ready.pop(request_id, None)
        self.preparer.release(request_id)

    def finish(self, count: int = 1) -> None:
        self.loader.finish(count)
        self.poll()

    @property
    def stats(self) -> EngineStats:
        stats = EngineStats()
        self.preparer.add_stats(stats)
        return stats


def test_requests_for_more_adapters_than_slots_wait_in_line():
    desk = Desk()
    for number, adapter in enumerate("abcabdc"):
        assert not desk.ask(number, adapter)
    # The later ones for a and b wait behind the first for c, although those adapters are on their way.
    assert desk.stats.lora_waiting == 7
    desk.finish(2)
    assert sorted(desk.ready) == [0, 1]
    assert [desk.ready[number].adapter for number in (0, 1)] == [
        desk.policy.in_slots[f"/models/{name}"] for name in "ab"
    ]
    assert (desk.stats.lora_slots, desk.stats.lora_used, desk.stats.lora_waiting) == (2, 2, 5)
    desk.end(1)  # c, then a may have what they ask for; b is gone from the device
    desk.poll()
    assert [move.adapter for move in desk.loader.begun] == ["/models/c"]
    desk.finish()
    assert sorted(desk.ready) == [0, 2, 3]
    desk.end(2)
    desk.poll()
    desk.finish()
    assert sorted(desk.ready) == [0, 3, 4]
    desk.end(0)
    desk.end(3)
    desk.poll()
    desk.finish()
    assert sorted(desk.ready) == [4, 5]
    assert (desk.stats.lora_loads, desk.stats.lora_evictions, desk.stats.lora_waiting) == (5, 3, 1)
    desk.end(4)
    desk.poll()
    desk.finish()
    assert desk.ask(9, "c")
    for number in (5, 6, 9):
        desk.end(number)
    assert desk.policy.in_use == {}


def test_an_adapter_that_cannot_be_loaded_refuses_its_requests_and_frees_its_slot():
    desk = Desk()
    desk.loader.broken = {"/models/x"}
    for number, adapter in enumerate("xaxb"):
        desk.ask(number, adapter)
    desk.finish(2)
    assert desk.refused == dict.fromkeys((0, 2), "adapter_refused: config is broken")
    assert sorted(desk.ready) == [1]
    desk.poll()
    desk.finish()
    assert sorted(desk.ready) == [1, 3]
    assert {*desk.policy.in_use} == {"/models/a", "/models/b"}
    assert desk.stats.lora_loads == 2
    # It is read anew for the next one.
    desk.end(1)
    desk.loader.broken.clear()
    desk.ask(4, "x")
    assert desk.loader.begun[0].read
    desk.finish()
    assert 4 in desk.ready


def test_requests_that_end_while_they_wait_give_everything_back_once():
    desk = Desk()
    for number, adapter in enumerate("abcb"):
        desk.ask(number, adapter)
    for number in (2, 0, 0, 3):
        desk.end(number)
    assert desk.policy.in_use == {"/models/b": 1}
    assert desk.stats.lora_waiting == 1
    assert not desk.ask(5, "c")
    desk.finish(2)
    assert sorted(desk.ready) == [1]  # a has come for nobody, and c takes its slot
    desk.finish()
    assert sorted(desk.ready) == [1, 5]
    desk.end(1)
    desk.end(5)
    assert desk.policy.in_use == {}
    assert desk.stats.lora_waiting == 0


def test_prepared_requests_have_the_version_of_their_adapter_in_the_key_of_the_cache():
    desk = Desk()
    keys = []
    for unload in (False, False, True, False):
        desk.ask(1, "a")
        desk.finish()
        keys.append(cache_key("salt", desk.ready[1].weights))
        desk.end(1)
        if unload:
            desk.preparer.unload("/models/a")
            assert desk.loader.dropped == ["/models/a"]
    assert keys[0] == keys[1] == keys[2] != keys[3]
    desk.ask(2, "b")
    desk.finish()
    assert len({*keys, cache_key("salt", desk.ready[2].weights), cache_key("salt", ""), cache_key("", "")}) == 5
    with pytest.raises(RefusedError, match="adapter 'b' is in use"):
        desk.preparer.unload("/models/b")


def make_core(loader: SlowLoader) -> tuple[EngineCore, AdapterPolicy]:
    spec = KvSpec((KvGroup((0,), 64),), granule_tokens=4, num_granules=64, num_slots=8, max_tokens=128)
    limits = SchedulerLimits(32, 5, 128, frozenset({EOS}), VOCAB)
    policy = AdapterPolicy(SLOTS, COPIES)
    preparer = AdapterPreparer(AdapterStore(policy, loader), SLOTS)
    scheduler, room = Scheduler(limits, KvAccounting(spec)), WaitingRoom([preparer])
    return EngineCore(scheduler, ArithmeticRunner(), overlap=True, room=room, adapters=preparer), policy


class RandomLoader(SlowLoader):
    """Ends some moves whenever it is asked."""

    def poll(self) -> list[Outcome]:
        self.finish(random.choice((0, 0, 1, 2)))
        return super().poll()


def test_random_requests_get_their_tokens_whatever_they_wait_for():
    requests, loader = make_requests(60, seed=random.randrange(10**6)), RandomLoader()
    loader.broken = {"broken"}
    for index, request in enumerate(requests):
        requests[index] = AddRequest(
            request.request_id, request.prompt, request.params, 0, 0.0,
            adapter=random.choice(["", "a", "b", "c", "d", "broken"]),
        )  # fmt: skip
    core, policy = make_core(loader)
    aborted = set()
    step = core.step

    def some_end_early():
        gone = random.sample(range(60), 1) if random.random() < 0.1 else []
        deltas = core.abort(gone)
        aborted.update(delta.request_id for delta in deltas)
        return deltas + step()

    core.step = some_end_early
    found = drain(core, requests)
    for request in requests:
        tokens, finish, error = found[request.request_id]
        if request.request_id in aborted:
            assert finish is FinishReason.ABORT
        elif request.adapter == "broken":
            assert (finish, error) == (FinishReason.ERROR, "adapter_refused")
        else:
            assert (tokens, error) == (expected(request), None)
    assert policy.in_use == {}
    core.check()
    core.close()
    assert loader.closed


def test_adapters_are_moved_without_a_request():
    loader = SlowLoader()
    core, policy = make_core(loader)
    folder = str(Path("/models/a"))
    assert core.move_adapter(MoveAdapter(1, folder, True)) == []
    assert not core.idle
    [delta] = core.move_adapter(MoveAdapter(1, folder, True))
    assert delta.error == "invalid_request", "the number is taken"
    assert core.step() == []
    [delta] = core.move_adapter(MoveAdapter(2, folder, False))
    assert (delta.finish, delta.error, delta.message) == (
        FinishReason.ERROR, "adapter_in_use", "adapter 'a' is in use; unload it when its requests have ended",
    )  # fmt: skip
    assert core.step() == []
    loader.finish()
    [delta] = core.step()
    assert (delta.request_id, delta.finish, delta.tokens) == (1, FinishReason.STOP, [])
    assert core.idle
    assert policy.in_use == {}
    assert policy.in_slots == {folder: 0}
    [delta] = core.move_adapter(MoveAdapter(3, folder, False))
    assert delta.finish is FinishReason.STOP
    assert policy.in_slots == {}
    loader.broken = {folder}
    core.move_adapter(MoveAdapter(4, folder, True))
    core.step()
    loader.finish()
    [delta] = core.step()
    assert (delta.finish, delta.error, delta.message) == (FinishReason.ERROR, "adapter_refused", "config is broken")
    core.close()


class FakeRanks:
    """Two other ranks, whose reports are put in."""

    def __init__(self) -> None:
        self.sent: list[object] = []
        self.reports: list[AdapterMoved] = []

    def send(self, order: object) -> None:
        self.sent.append(order)

    def adapters_moved(self) -> list[AdapterMoved]:
        found, self.reports = self.reports, []
        return found


@pytest.mark.parametrize("failing", [None, 0, 1, 2])
def test_an_adapter_is_there_once_all_ranks_have_it_and_dropped_where_one_has_not(failing):
    own, ranks = SlowLoader(), FakeRanks()
    loader = RankedLoader(own, ranks, 3)
    own.broken = {"a"} if failing == 0 else set()
    loader.begin(Move("a", 1, True, dropped="x", evicted="y"))
    loader.begin(Move("b", 0, False))
    assert ranks.sent == [LoadAdapter("a", 1, True, "x", "y"), LoadAdapter("b", 0, False, None, None)]
    events = [("a", 0), ("a", 1), ("a", 2), ("b", 1), ("b", 2)]
    random.shuffle(events)
    outcomes = {}
    for adapter, rank in events:
        if rank == 0:
            own.finish()
        else:
            ranks.reports.append(AdapterMoved(rank, adapter, "no room" if (adapter, rank) == ("a", failing) else None))
        outcomes |= {outcome.adapter: outcome.error for outcome in loader.poll()}
        assert ("a" in outcomes) == {("a", 0), ("a", 1), ("a", 2)}.issubset(events[: events.index((adapter, rank)) + 1])
        assert "b" not in outcomes
    own.finish()
    assert [outcome.error for outcome in loader.poll()] == [None]
    assert (outcomes["a"] is None) == (failing is None)
    if failing is not None:
        assert str(outcomes["a"]) == ("a/config is broken" if failing == 0 else "no room")
    dropped = [] if failing is None else ["a"]
    assert own.dropped == dropped
    assert ranks.sent[2:] == [DropAdapter(name) for name in dropped]
    loader.close()
    assert own.closed
