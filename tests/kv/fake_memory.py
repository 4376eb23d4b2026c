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
    is other memory: its contents and all views of it are gone. Views that the step does not enter are carried out at
    once or with a later plan, at random.
    """

    def __init__(self, spec: KvSpec, *, shares: bool = True, seed: int = 0) -> None:
        self.spec, self.shares = spec, shares
        self.random = random.Random(seed)
        self.granules = [self._nothing() for _ in range(spec.num_granules)]
        self.host: dict[int, list[Hashable]] = {}
        self.slots: list[list[int | None]] = [[] for _ in range(spec.num_slots)]
        self.whole: dict[int, bool] = {}
        self.late: list[Show] = []
        """Views to come, in order."""
        self.shows: list[Show] = []
        """The views of the last plan, for tests that count them."""

    def apply(
        self,
        plan: MemoryPlan,
        busy: Iterable[tuple[int, int]] = (),
        moving: Iterable[Move] = (),
        rows: Iterable[tuple[int, int]] | None = None,
    ) -> None:
        """Carry out a plan while steps are in flight that touch the first tokens of slots, `busy` (slot, tokens), and
        the moves `moving`. rows: what the plan's step enters, likewise; None for all but its views ahead."""
        entered = None if rows is None else dict(rows)
        guarded = {slot: self.spec.granules(tokens) for slot, tokens in busy}
        before = {slot: self.slots[slot][:count] for slot, count in guarded.items()}
        pinned = [(granule, list(self.granules[granule])) for move in moving for granule in sources(move)]
        if self.random.random() < 0.5 or self._rest_on_late(plan, entered):
            self._catch_up()
        self.shows = [view for view in plan.views if isinstance(view, Show)]
        for view in plan.views:
            if isinstance(view, Hide):
                assert not self.shares, "only memory that cannot be shared is given up"
                assert 0 <= view.keep < len(self.slots[view.slot])
                del self.slots[view.slot][view.keep :]
            else:
                self._show_or_wait(view, plan, entered)
        for slot, shown in before.items():
            assert self.slots[slot][: guarded[slot]] == shown, "a view changed under a step in flight"
        assert all(self.granules[granule] == contents for granule, contents in pinned), "a move lost its source"
        for view in plan.ahead:
            self._show_or_wait(view, plan, {})
        self._move(plan)

    def is_shown(self, slot: int, granules: int) -> bool:
        """Whether no view of a slot's first granules is to come."""
        return not any(view.slot == slot and view.position < granules for view in self.late)

    def _rest_on_late(self, plan: MemoryPlan, entered: dict[int, int] | None) -> bool:
        """Whether a plan, or its step, rests on views that are to come."""
        slots = {view.slot for view in (*plan.views, *plan.ahead)}
        blocks = self._blocks(plan.moves) | self._blocks(plan.views) | self._blocks(plan.ahead)
        late = any(view.slot in slots for view in self.late) or not blocks.isdisjoint(self._blocks(self.late))
        return late or entered is None or not all(self._is_ready(slot, end) for slot, end in entered.items())

    def _is_ready(self, slot: int, tokens: int) -> bool:
        return self.is_shown(slot, self.spec.granules(tokens))

    def _catch_up(self) -> None:
        late, self.late = self.late, []
        for view in late:
            self._show(view)

    def _show_or_wait(self, view: Show, plan: MemoryPlan, entered: dict[int, int] | None) -> None:
        """Show a view of a plan; later, perhaps, where neither its step nor moves rest on it. None comes before another
        one that is to come of its slot or blocks, or takes the block in its place otherwise."""
        free = entered is not None and self.spec.granules(entered.get(view.slot, 0)) <= view.position
        behind = any(view.slot == other.slot for other in self.late)
        behind |= not {*self._blocks([view]), *self._replaced(view)}.isdisjoint(self._blocks(self.late))
        if free and self._blocks(plan.moves).isdisjoint(self._blocks([view])) and self.random.random() < 0.5:
            self.late.append(view)
            return
        if behind:
            self._catch_up()
        self._show(view)

    def _replaced(self, view: Show) -> set[int]:
        """The block of which a view would leave a part, if that is shown whole."""
        shown = self.slots[view.slot][view.position : view.position + 1]
        return {granule // self.spec.block_granules for granule in shown if granule is not None}

    def _blocks(self, parts: Iterable[Show | Hide | Move]) -> set[int]:
        """Of granules that views show, and that moves touch."""
        found: set[int] = set()
        for part in parts:
            granules = [] if isinstance(part, Hide) else part.granules if isinstance(part, Show) else touched(part)
            found.update(granule // self.spec.block_granules for granule in granules)
        return found

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
