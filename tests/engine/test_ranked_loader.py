"""An adapter is there when all ranks have it; one that fails on any is given up by all."""

import random

from bladellm_runtime.engine.ranked_loader import RankedLoader
from bladellm_runtime.errors import CheckpointError
from bladellm_runtime.lora.loader import Outcome
from bladellm_runtime.lora.policy import AdapterPolicy
from bladellm_runtime.lora.store import AdapterStore
from bladellm_runtime.ranks.messages import AdapterMoved, DropAdapter, LoadAdapter, Numbered, decode_order, encode

RANKS = 4


class FakeRank:
    """Carries moves out when asked to, as chance has it; keeps the copies that a rank would keep."""

    def __init__(self) -> None:
        self.copies: set[str] = set()
        self.moves: list[LoadAdapter] = []
        self.failing: set[str] = set()

    def begin(self, move) -> None:
        self.moves.append(move)

    def drop(self, adapter: str) -> None:
        self.copies.discard(adapter)

    def carry_out(self) -> tuple[str, str | None]:
        move = self.moves.pop(0)
        self.copies.discard(move.dropped)
        assert move.read or move.adapter in self.copies, "a copy that the policy relies on is there"
        failed = move.adapter in self.failing
        (self.copies.discard if failed else self.copies.add)(move.adapter)
        return move.adapter, f"{move.adapter} is broken" if failed else None


class Local(FakeRank):
    def poll(self) -> list[Outcome]:
        if not self.moves or random.random() < 0.5:
            return []
        adapter, error = self.carry_out()
        return [Outcome(adapter, None if error is None else CheckpointError(error))]

    def close(self) -> None:
        pass


class Others:
    """The other ranks, over the wire's messages."""

    def __init__(self) -> None:
        self.ranks = [FakeRank() for _ in range(RANKS - 1)]

    def send(self, order) -> None:
        order = decode_order(encode(Numbered(0, order))).order
        for rank in self.ranks:
            rank.drop(order.adapter) if isinstance(order, DropAdapter) else rank.begin(order)

    def adapters_moved(self) -> list[AdapterMoved]:
        ready = [(number, rank) for number, rank in enumerate(self.ranks, 1) if rank.moves and random.random() < 0.5]
        return [AdapterMoved(number, *rank.carry_out()) for number, rank in ready]


def test_all_ranks_keep_what_the_policy_says_they_keep():
    local, others = Local(), Others()
    store = AdapterStore(AdapterPolicy(2, 3), RankedLoader(local, others, RANKS))
    ranks, failures = [local, *others.ranks], 0
    for _ in range(400):
        name = random.choice("abcdef")
        for rank in ranks:
            rank.failing = {name} if random.random() < 0.1 else set()
        broken = any(rank.failing for rank in ranks)
        assert store.acquire(name)
        outcomes = []
        while store.ready_slot(name) is None and not outcomes:
            outcomes = store.poll()
        read_anew = bool(outcomes)
        assert [(each.adapter, each.error is None) for each in outcomes] == [(name, not broken)] * read_anew
        if read_anew and broken:
            failures += 1
            assert "is broken" in str(outcomes[0].error)
            assert store.ready_slot(name) is None
        assert not any(rank.moves for rank in ranks)
        assert all(rank.copies == set(store.policy.copies) for rank in ranks)
        store.release(name)
        if random.random() < 0.1:
            assert store.unload(name)
    assert failures > 5
