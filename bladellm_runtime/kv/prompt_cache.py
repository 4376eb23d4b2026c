"""`PromptCache`: which granules hold the KV of which token sequences; a radix tree over tokens, evicted by last use."""

import heapq
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field

from bladellm_runtime.kv.granules import GranulePool, Unit
from bladellm_runtime.kv.swap_space import SwapSpace

TOKEN_BYTES = 4
CANDIDATES, SEEN = 16, 256
"""Children compared token by token for a match in part, and those looked at to find them: the ones added last."""


@dataclass(slots=True, eq=False)
class Node:
    """The tokens of one unit after those of its ancestors, and where their KV is: on the device, the host or both.

    tokens: int32 in bytes; fewer than the unit holds in a *tail*, the last granule of a sequence that ended, whose
    tokens can be copied but not shared. users: live sequences that show the unit, or moves that read it. born: the
    plan that writes the unit's KV. resident: children on the device; a node is never there without its parent.
    """

    parent: "Node | None"
    tokens: bytes
    count: int
    tail: bool
    unit: Unit | None = None
    places: list[int] | None = None
    users: int = 0
    last_use: int = 0
    born: int = 0
    resident: int = 0
    slot: int = -1
    children: dict[bytes, list["Node"]] = field(default_factory=dict)


@dataclass(slots=True)
class Match:
    """The longest beginning of some tokens that is cached.

    path: nodes from the root on whose units can be shown, holding the first `length` tokens; then `copied` more can be
    copied from the beginning of `source`.
    """

    path: list[Node] = field(default_factory=list)
    length: int = 0
    source: Node | None = None
    copied: int = 0

    @property
    def cached(self) -> int:
        return self.length + self.copied


class PromptCache:
    """A tree for every key (adapter and salt): sequences under different keys never meet.

    A node is one unit of the pool. Tokens are compared themselves; hashes only find candidates. Unused units stay until
    the pool needs them: the least recently used first, and none before its children. With swap space they are copied
    there before (`next_spill`), and remain in the tree when their granules go.
    """

    def __init__(self, granule_tokens: int, pool: GranulePool, swap: SwapSpace) -> None:
        self._granule_bytes = granule_tokens * TOKEN_BYTES
        self._pool = pool
        self._swap = swap
        self._roots: dict[str, Node] = {}
        self._clock = 0
        # Unused leaves by last use; entries that have become untrue are dropped when they come up.
        self._leaves: list[tuple[int, int, Node]] = []
        self._pushed = 0
        self._hosted: dict[Node, None] = {}
        self.idle = 0
        """Granules no live sequence shows; all of them can be evicted."""
        self.shared = 0
        """Granules saved by sharing: users of a granule beyond its first."""

    def match(self, key: str, tokens: bytes, limit: int, copyable: int) -> Match:
        """What is cached of the first `limit` tokens. Parts are copied only from units born before plan `copyable`."""
        end = limit * TOKEN_BYTES
        node, found, best = self._roots.get(key), Match(), Match()
        position = 0
        while node is not None:
            child = self._child(node, tokens, position, end)
            if child is None or len(node.children) > 1:
                source, common = self._part(node, tokens, position, end, copyable)
                if position + common > best.cached * TOKEN_BYTES:
                    best = Match(found.path.copy(), found.length, source, common // TOKEN_BYTES)
            node = child
            if node is not None:
                found.path.append(node)
                position += len(node.tokens)
                found.length = position // TOKEN_BYTES
        return found if found.length >= best.cached else best

    def insert(
        self, key: str, parent: Node | None, tokens: bytes, unit: Unit, *, born: int, tail: bool = False
    ) -> tuple[Node, bool]:
        """The node of these tokens under `parent` (None: the root), and whether it took the unit.

        It does not when there is one on the device already; it does when that was on the host only.
        """
        above = parent or self._roots.setdefault(key, Node(None, key.encode(), 0, False))
        self._clock += 1
        siblings = above.children.setdefault(tokens[: self._granule_bytes], [])
        node = next((each for each in siblings if each.tokens == tokens and each.count == unit.count), None)
        if node is not None and node.unit is not None:
            return node, False
        if node is None:
            node = Node(above, tokens, unit.count, tail, born=born)
            siblings.append(node)
        self._land(node, unit)
        return node, True

    def use(self, node: Node, touch: bool = True) -> None:
        """Count a user of a node on the device; all its ancestors must have users. `touch`: of its contents."""
        if touch:
            self._clock += 1
            node.last_use = self._clock
        if node.users == 0:
            self.idle -= node.count
        else:
            self.shared += node.count
        node.users += 1

    def release(self, node: Node, touch: bool = True) -> None:
        """Count a user less. `touch`: that was a use of its contents too."""
        node.users -= 1
        if node.users > 0:
            self.shared -= node.count
            return
        self.idle += node.count
        if touch:
            self._clock += 1
            node.last_use = self._clock
        self._offer(node)

    def land(self, node: Node, unit: Unit) -> list[int]:
        """Give a node that is on the host only a unit on the device; returns the places to copy from."""
        if node.unit is not None or node.places is None:
            raise ValueError("only a node on the host alone can come back")
        self._land(node, unit)
        return node.places

    def evict(self) -> Unit:
        """Free the least recently used unit and return it. There must be an idle one."""
        node = self._pop_leaf()
        if node is None or node.unit is None:
            raise RuntimeError("no cached unit can be evicted")
        unit, node.unit = node.unit, None
        self.idle -= node.count
        self._pool.give(unit)
        self._leave_device(node)
        if node.places is None:
            self._drop(node)
        return unit

    def next_spill(self, before: int, most: int) -> tuple[list[Node], list[int]] | None:
        """The next unit to copy to the host, with the places for it: among the `most` that would be evicted next, born
        before plan `before`, not there yet. The unit's node comes with its ancestors, children first, all of which get
        a user, so that they stay; None when there is none."""
        clean: list[Node] = []
        found: Node | None = None
        while found is None and len(clean) < most and (node := self._pop_leaf()) is not None:
            if node.places is None and node.born < before and not node.tail:
                found = node
            else:
                clean.append(node)
        for node in clean:
            self._offer(node)
        if found is None:
            return None
        places = self._find_places(found)
        if places is None:
            self._offer(found)
            return None
        found.places = places
        self._hosted[found] = None
        chain = list(_ancestry(found))
        for node in chain:
            self.use(node, touch=False)
        return chain, places

    def forget(self, node: Node) -> None:
        """Take a node and what follows it out of the tree, as far as nobody else uses it; its KV may be wrong."""
        if any(each.users for each in self._below(node)):
            return
        self._remove(node)

    def reset(self) -> None:
        """Forget everything that nobody uses."""
        while self.idle:
            self.evict()
        for node in list(self._hosted):
            if node.unit is None and node in self._hosted:
                self._remove(node)
            elif node.unit is not None:
                self._free_places(node)

    def nodes(self) -> Iterator[Node]:
        """Every node but the roots. For tests."""
        for root in self._roots.values():
            yield from (node for node in self._below(root) if node is not root)

    def _child(self, node: Node, tokens: bytes, position: int, end: int) -> Node | None:
        """The child whose tokens all come next, the longest of them."""
        beginning = tokens[position : min(position + self._granule_bytes, end)]
        fitting = [
            child
            for child in node.children.get(beginning, ())
            if not child.tail and position + len(child.tokens) <= end and tokens.startswith(child.tokens, position)
        ]
        return max(fitting, key=lambda child: len(child.tokens), default=None)

    def _part(self, node: Node, tokens: bytes, position: int, end: int, copyable: int) -> tuple[Node | None, int]:
        """The child that shares most of the next tokens, and how many bytes of them, whole tokens."""
        best, most = None, 0
        wanted = tokens[position : min(end, position + self._pool.block_granules * self._granule_bytes)]
        for child in _latest(node, wanted[:TOKEN_BYTES]):
            if child.born < copyable:
                common = _common(child.tokens, wanted)
                if common > most:
                    best, most = child, common
        return best, most

    def _land(self, node: Node, unit: Unit) -> None:
        node.unit = unit
        node.last_use = self._clock
        if node.parent is not None:
            node.parent.resident += 1
        self.idle += node.count
        self._offer(node)

    def _leave_device(self, node: Node) -> None:
        parent = node.parent
        if parent is not None:
            parent.resident -= 1
            self._offer(parent)

    def _offer(self, node: Node) -> None:
        """Note a node that may have become an unused leaf."""
        if node.unit is not None and node.users == 0 and node.resident == 0:
            self._pushed += 1
            heapq.heappush(self._leaves, (node.last_use, self._pushed, node))

    def _pop_leaf(self) -> Node | None:
        while self._leaves:
            last_use, _, node = heapq.heappop(self._leaves)
            if node.unit is not None and node.users == 0 and node.resident == 0 and node.last_use == last_use:
                return node
        return None

    def _find_places(self, node: Node) -> list[int] | None:
        """Places for a node's granules, those of the nodes that came first given up; None where they never fit."""
        if node.count > self._swap.num_places:
            return None
        while self._swap.free < node.count:
            oldest = next((each for each in self._hosted if each.users == 0 or each.unit is None), None)
            if oldest is None:
                return None
            if oldest.unit is None:
                self._remove(oldest)
            else:
                self._free_places(oldest)
        return self._swap.take(node.count)

    def _free_places(self, node: Node) -> None:
        if node.places is not None:
            self._swap.give(node.places)
            node.places = None
            self._hosted.pop(node, None)

    def _remove(self, node: Node) -> None:
        """Take an unused node and all below it out of the tree."""
        for each in reversed(list(self._below(node))):
            if each.unit is not None:
                unit, each.unit = each.unit, None
                self.idle -= each.count
                self._pool.give(unit)
                self._leave_device(each)
            self._drop(each)

    def _drop(self, node: Node) -> None:
        """Unlink a node that is not on the device, and what it has on the host below it."""
        for each in reversed(list(self._below(node))):
            self._free_places(each)
        parent = node.parent
        if parent is None:
            return
        beginning = node.tokens[: self._granule_bytes]
        siblings = parent.children.get(beginning)
        if siblings is not None and node in siblings:
            siblings.remove(node)
            if not siblings:
                del parent.children[beginning]
        if parent.parent is None and not parent.children:
            self._roots.pop(parent.tokens.decode(), None)

    def _below(self, node: Node) -> Iterator[Node]:
        """A node and its descendants, parents first."""
        stack = [node]
        while stack:
            each = stack.pop()
            yield each
            for siblings in each.children.values():
                stack.extend(siblings)


def _ancestry(node: Node) -> Iterator[Node]:
    """A node and its ancestors, without the root."""
    while node.parent is not None:
        yield node
        node = node.parent


def _latest(node: Node, first: bytes) -> list[Node]:
    """The children added last that begin with a token."""
    found: list[Node] = []
    for beginning in itertools.islice(reversed(node.children), SEEN):
        if beginning.startswith(first) and first:
            found += reversed(node.children[beginning])
            if len(found) >= CANDIDATES:
                break
    return found


def _common(one: bytes, other: bytes) -> int:
    """Bytes of the whole tokens two sequences have in common at the beginning."""
    low, high = 0, min(len(one), len(other)) // TOKEN_BYTES
    while low < high:
        middle = (low + high + 1) // 2
        if one[low * TOKEN_BYTES : middle * TOKEN_BYTES] == other[low * TOKEN_BYTES : middle * TOKEN_BYTES]:
            low = middle
        else:
            high = middle - 1
    return low * TOKEN_BYTES
