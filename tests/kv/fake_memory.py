"""KV memory on paper: executes memory plans literally, token by token, and refuses what no arena could do."""

import random
from collections.abc import Hashable, Iterable

from bladellm_runtime.kv.operations import Copy, Hide, MemoryPlan, Show, SwapIn, SwapOut
from bladellm_runtime.kv.spec import KvSpec

Move = Copy | SwapOut | SwapIn


def sources(move: Move) -> list[int]:
    """The granules that a move reads."""
    match move:
        case Copy(source, _, _) | SwapOut(source, _):
            return [source]
    return []


def touched(move: Move) -> list[int]:
    """The granules that a move reads or writes."""
    match move:
        case Copy(source, target, _):
            return [source, target]
        case SwapOut(granule, _) | SwapIn(_, granule):
            return [granule]


class FakeMemory:
    """Physical granules, each a list of whatever its tokens hold (None: nothing), and what the slots show of them.

    Views last until they are replaced. A block that is shown in another class than before, whole or granule by granule,
    is other memory: its contents and all views of it are gone. `ahead` views are carried out at once or with the next
    plan, at random.
    """

    def __init__(self, spec: KvSpec, *, shares: bool = True, seed: int = 0) -> None:
        self.spec, self.shares = spec, shares
        self.random = random.Random(seed)
        self.granules = [self._nothing() for _ in range(spec.num_granules)]
        self.host: dict[int, list[Hashable]] = {}
        self.slots: list[list[int | None]] = [[] for _ in range(spec.num_slots)]
        self.whole: dict[int, bool] = {}
        self.late: list[Show] = []
        self.shows: list[Show] = []
        """The views of the last plan, for tests that count them."""

    def apply(self, plan: MemoryPlan, busy: Iterable[tuple[int, int]] = (), moving: Iterable[Move] = ()) -> None:
        """Carry out a plan while steps are in flight that touch the first tokens of slots, `busy` (slot, tokens), and
        the moves `moving`."""
        guarded = {slot: self.spec.granules(tokens) for slot, tokens in busy}
        before = {slot: self.slots[slot][:count] for slot, count in guarded.items()}
        pinned = [(granule, list(self.granules[granule])) for move in moving for granule in sources(move)]
        for view in self.late:
            self._show(view)
        self.late = []
        self.shows = [view for view in plan.views if isinstance(view, Show)]
        for view in plan.views:
            if isinstance(view, Hide):
                assert not self.shares, "only memory that cannot be shared is given up"
                assert 0 <= view.keep < len(self.slots[view.slot])
                del self.slots[view.slot][view.keep :]
            else:
                self._show(view)
        for slot, shown in before.items():
            assert self.slots[slot][: guarded[slot]] == shown, "a view changed under a step in flight"
        assert all(self.granules[granule] == contents for granule, contents in pinned), "a move lost its source"
        size = self.spec.block_granules
        moved = {granule // size for move in plan.moves for granule in touched(move)}
        # A block is converted before contents are moved there.
        if self.random.random() < 0.5 and not any(g // size in moved for view in plan.ahead for g in view.granules):
            self.late = plan.ahead
        else:
            for view in plan.ahead:
                self._show(view)
        self._move(plan)

    def granule(self, slot: int, position: int) -> int:
        """The granule behind a slot's token."""
        index = position // self.spec.granule_tokens
        assert index < len(self.slots[slot]), "a token beyond what its slot shows"
        granule = self.slots[slot][index]
        assert granule is not None, "a token whose view is gone"
        return granule

    def read(self, slot: int, position: int) -> Hashable:
        return self.granules[self.granule(slot, position)][position % self.spec.granule_tokens]

    def write(self, slot: int, position: int, contents: Hashable) -> None:
        self.granules[self.granule(slot, position)][position % self.spec.granule_tokens] = contents

    def _nothing(self) -> list[Hashable]:
        return [None] * self.spec.granule_tokens

    def _show(self, view: Show) -> None:
        shown, end = self.slots[view.slot], view.position + len(view.granules)
        assert view.granules, "a view of nothing"
        assert view.position <= len(shown), "a gap in a slot"
        assert end * self.spec.granule_tokens <= self.spec.max_tokens
        assert all(0 <= granule < self.spec.num_granules for granule in view.granules)
        if view.whole:
            size, first = self.spec.block_granules, view.granules[0]
            assert size > 1
            assert first % size == 0
            assert view.granules == list(range(first, first + size)), "this is not a whole block"
        for granule in view.granules:
            self._set_class(granule, view.whole)
        for position in range(view.position, min(end, len(shown))):
            self._split(shown, position, view.position)
        shown[view.position : end] = view.granules
        if not self.shares:
            everything = [granule for slot in self.slots for granule in slot]
            assert len(everything) == len(set(everything)), "a granule is shown twice"

    def _set_class(self, granule: int, whole: bool) -> None:
        size = self.spec.block_granules
        block = granule // size
        if size == 1 or self.whole.get(block) == whole:
            return
        self.whole[block] = whole
        for each in range(block * size, min((block + 1) * size, self.spec.num_granules)):
            self.granules[each] = self._nothing()
        for shown in self.slots:
            shown[:] = [None if g is not None and g // size == block else g for g in shown]

    def _split(self, shown: list[int | None], position: int, begin: int) -> None:
        """Before a position of a view from `begin` on is replaced: a block mapped whole goes as a whole."""
        granule, size = shown[position], self.spec.block_granules
        if granule is not None and self.whole.get(granule // size):
            first = position - granule % size
            assert first >= begin or first < 0 or shown[first] != granule // size * size, "a view cuts a whole block"
            for index in range(max(first, 0), min(first + size, len(shown))):
                if shown[index] is not None and shown[index] - (index - first) == granule // size * size:
                    shown[index] = None

    def _move(self, plan: MemoryPlan) -> None:
        for move in plan.moves:
            match move:
                case Copy(source, target, tokens):
                    assert source != target
                    assert 0 < tokens <= self.spec.granule_tokens
                    self.granules[target][:tokens] = self.granules[source][:tokens]
                case SwapOut(granule, host):
                    assert 0 <= host < self.spec.host_granules
                    self.host[host] = list(self.granules[granule])
                case SwapIn(host, granule):
                    self.granules[granule] = list(self.host[host])
