"""`PromptCache`: which granules hold the KV of which token sequences; radix trees over tokens, evicted by last use."""

import heapq
from collections.abc import Iterator

from bladellm_runtime.kv.granules import GranulePool, Unit
from bladellm_runtime.kv.host_copies import HostCopies
from bladellm_runtime.kv.prompt_match import Finder, Match
from bladellm_runtime.kv.prompt_tree import TOKEN_BYTES, Node
from bladellm_runtime.kv.swap_space import SwapSpace


class PromptCache:
    """A tree for every key (adapter and salt): sequences under different keys never meet.

    A node is one unit of the pool. Tokens are compared themselves; hashes only find candidates. Idle units stay until
    the pool needs them: the least recently used first, and none before its children. With swap space they are copied
    there before (`spill`), and remain in the tree when their granules go.
    """

    def __init__(self, granule_tokens: int, pool: GranulePool, swap: SwapSpace) -> None:
        self._granule_bytes = granule_tokens * TOKEN_BYTES
        self._pool = pool
        self._host = HostCopies(swap)
        self._roots: dict[str, Node] = {}
        self._clock = 0
        # Idle leaves by last use; entries that have become untrue are dropped when they come up.
        self._leaves: list[tuple[int, int, Node]] = []
        self._pushed = 0
        self.idle = 0
        """Granules that nothing needs; all of them can be evicted."""
        self.pinned = 0
        """Granules that no live sequence shows and that are not idle: moves read them, or something below them."""
        self.shared = 0
        """Granules saved by sharing: users of a granule beyond its first."""

    @property
    def places_used(self) -> int:
        """Places in host memory that hold copies."""
        return self._host.swap.used

    def match(self, key: str, tokens: bytes, limit: int, copyable: int) -> Match:
        """What is cached of the first `limit` tokens. Parts are copied only from units born before plan `copyable`."""
        root = self._roots.get(key)
        if root is None:
            return Match()
        unit_bytes = self._pool.block_granules * self._granule_bytes
        return Finder(tokens, limit * TOKEN_BYTES, self._granule_bytes, unit_bytes, copyable).find(root)

    def insert(
        self, key: str, parent: Node | None, tokens: bytes, unit: Unit, *, born: int, tail: bool = False
    ) -> tuple[Node | None, bool]:
        """The node of these tokens under `parent` (None: the root), and whether it took the unit.

        It does not when there is one on the device already; it does when that was on the host only. There is no node
        when the parent is lost.
        """
        if parent is not None and parent.lost:
            return None, False
        above = parent or self._roots.setdefault(key, Node(None, key.encode(), 0, False))
        siblings = above.children.setdefault(tokens[: self._granule_bytes], [])
        node = next((each for each in siblings if each.tokens == tokens and each.count == unit.count), None)
        if node is not None and node.unit is not None:
            return node, False
        if node is None:
            node = Node(above, tokens, unit.count, tail)
            siblings.append(node)
        node.born = born
        node.proven = False
        self._land(node, unit)
        return node, True

    def use(self, node: Node) -> None:
        """Count a user of a node on the device."""
        self._touch(node)
        self._wake(node)
        if node.users:
            self.shared += node.count
        else:
            self.pinned -= node.count
        node.users += 1

    def release(self, node: Node) -> None:
        """Count a user less; that was a use of its contents too."""
        node.users -= 1
        if node.users:
            self.shared -= node.count
        else:
            self._touch(node)
            self.pinned += node.count
        self._rest(node)

    def pin(self, node: Node, touch: bool) -> None:
        """Keep a node where it is while a move reads it. `touch`: that is a use of its contents."""
        if touch:
            self._touch(node)
        self._wake(node)

    def unpin(self, node: Node) -> None:
        self._rest(node)

    def land(self, node: Node, unit: Unit) -> list[int]:
        """Give a node that is on the host only a unit on the device; returns the places to copy from."""
        if node.unit is not None or node.places is None:
            raise ValueError("only a node on the host alone can come back")
        self._land(node, unit)
        return node.places

    def evict(self) -> None:
        """Free the least recently used unit. There must be an idle one."""
        node = self._pop_leaf()
        if node is None:
            raise RuntimeError("no cached unit can be evicted")
        self._leave_device(node)
        if node.places is None:
            self._drop(node)

    def evict_branch(self, node: Node) -> None:
        """Free an idle unit and those above it, up to where something else needs one or follows one."""
        while self._is_leaf(node) and node.parent is not None:
            above = node.parent
            self._leave_device(node)
            if node.places is None:
                self._drop(node)
            node = above

    def spill(self, before: int, granules: int, most: int) -> list[tuple[Node, list[int]]]:
        """The next nodes to copy to the host, with the places for them; they are pinned, the caller unpins them.

        They are found among the `most` units that would be evicted next: born before plan `before` and not on the host
        yet, until they have `granules` granules together.
        """
        found: list[tuple[Node, list[int]]] = []
        for node in self._next_evicted(most):
            if node.places is None and node.born < before and not node.tail and granules > 0:
                places = self._find_places(node)
                if places is None:
                    break
                self._host.add(node, places)
                found.append((node, places))
                granules -= node.count
        for node, _ in found:
            self._wake(node)
        return found

    def forget(self, node: Node) -> None:
        """Take a node and all below it out of the tree: their KV may be wrong. Their users keep them."""
        if node.lost:
            return
        self._unlink(node)
        for each in reversed(list(node.below())):
            self._host.free(each)
            if each.busy and each.parent is not None:
                self._rest(each.parent)
            if each.unit is not None and not each.busy:
                self._leave_device(each)
            elif each.unit is not None and each.parent is not None:
                each.parent.resident -= 1
            each.parent, each.lost = None, True
            each.children.clear()

    def reset(self) -> None:
        """Forget everything that nobody uses."""
        while self.idle:
            self.evict()
        while self._host.away:
            self._drop(next(iter(self._host.away)))
        for node in list(self._host.backed):
            self._host.free(node)

    def nodes(self) -> Iterator[Node]:
        """Every node but the roots and the lost ones. For tests."""
        for root in self._roots.values():
            yield from (node for node in root.below() if node is not root)

    def _touch(self, node: Node) -> None:
        self._clock += 1
        node.last_use = self._clock

    def _wake(self, node: Node) -> None:
        """Something more needs a node; while it does, none of those above it is idle."""
        while node.parent is not None:
            node.busy += 1
            if node.busy > 1:
                return
            self.idle -= node.count
            self.pinned += node.count
            node = node.parent

    def _rest(self, node: Node) -> None:
        """Something less needs a node."""
        while node.unit is not None:
            node.busy -= 1
            if node.busy:
                return
            self.pinned -= node.count
            if node.lost or node.parent is None:
                self._pool.give(node.unit)
                node.unit = None
                return
            self.idle += node.count
            self._offer(node)
            node = node.parent

    def _land(self, node: Node, unit: Unit) -> None:
        node.unit = unit
        self._touch(node)
        self._host.land(node)
        if node.parent is not None:
            node.parent.resident += 1
        self.idle += node.count
        self._offer(node)

    def _leave_device(self, node: Node) -> None:
        """Free the unit of an idle node that has no children on the device."""
        if node.unit is None:
            return
        self._pool.give(node.unit)
        node.unit = None
        self.idle -= node.count
        self._host.leave_device(node)
        if node.parent is not None:
            node.parent.resident -= 1
            self._offer(node.parent)

    def _offer(self, node: Node) -> None:
        """Note a node that may have become an idle leaf."""
        if not self._is_leaf(node):
            return
        self._pushed += 1
        heapq.heappush(self._leaves, (node.last_use, self._pushed, node))
        if len(self._leaves) > 4 * self._pool.num_granules + 64:
            true = {entry[2]: entry for entry in self._leaves if self._is_true(entry)}
            self._leaves = sorted(true.values(), key=lambda entry: entry[:2])

    def _is_leaf(self, node: Node) -> bool:
        return node.unit is not None and not node.busy and not node.resident and not node.lost

    def _is_true(self, entry: tuple[int, int, Node]) -> bool:
        return entry[0] == entry[2].last_use and self._is_leaf(entry[2])

    def _pop_leaf(self) -> Node | None:
        while self._leaves:
            entry = heapq.heappop(self._leaves)
            if self._is_true(entry):
                return entry[2]
        return None

    def _next_evicted(self, most: int) -> list[Node]:
        """Units in the order in which they would be evicted, roughly: each leaf is followed by what is above it."""
        found: list[Node] = []
        leaves: list[Node] = []
        while len(found) < most and (leaf := self._pop_leaf()) is not None:
            leaves.append(leaf)
            node: Node | None = leaf
            while node is not None and len(found) < most:
                found.append(node)
                above = node.parent
                single = above is not None and above.unit is not None and not above.busy and above.resident == 1
                node = above if single else None
        for leaf in leaves:
            self._offer(leaf)
        return found

    def _find_places(self, node: Node) -> list[int] | None:
        """Places for a node's granules, other copies given up for them; None where they do not fit."""
        swap = self._host.swap
        if node.count > swap.num_places:
            return None
        while swap.free < node.count:
            victim = self._host.victim(node)
            if victim is None:
                return None
            if victim.unit is None:
                self._drop(victim)
            else:
                self._host.free(victim)
        return swap.take(node.count)

    def _drop(self, node: Node) -> None:
        """Unlink a node that is not on the device, and what it has on the host below it."""
        for each in node.below():
            self._host.free(each)
        self._unlink(node)

    def _unlink(self, node: Node) -> None:
        """Take a node out of its parent's children, and the root with it if that was the last."""
        parent = node.parent
        if parent is None:
            return
        beginning = node.tokens[: self._granule_bytes]
        siblings = parent.children[beginning]
        siblings.remove(node)
        if not siblings:
            del parent.children[beginning]
        if parent.parent is None and not parent.children:
            self._roots.pop(parent.tokens.decode(), None)
