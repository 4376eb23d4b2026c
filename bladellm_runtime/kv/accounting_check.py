"""What must hold of the KV accounting between calls. For tests: visits every slot and node."""

from collections import Counter
from collections.abc import Collection, Iterable

from bladellm_runtime.kv.granules import GranulePool
from bladellm_runtime.kv.prompt_cache import PromptCache
from bladellm_runtime.kv.prompt_tree import Node
from bladellm_runtime.kv.slot_granules import Slot, SlotGranules
from bladellm_runtime.kv.spec import KvSpec


def check(
    spec: KvSpec,
    pool: GranulePool,
    cache: PromptCache,
    granules: SlotGranules,
    idle_slots: Collection[int],
    pinned: Iterable[tuple[int, Node]],
) -> None:
    """Raise `RuntimeError` naming every count that is wrong."""
    pool.check()
    moves = [node for _, node in pinned]
    live = [slot for slot in granules.slots if slot.live]
    problems = {
        **_unit_rules(spec, pool, cache, live, moves),
        **_node_rules(cache, live, moves),
        **_slot_rules(granules, live),
        "an idle slot is live": {slot.number for slot in live} != set(range(spec.num_slots)) - set(idle_slots),
    }
    found = [text for text, wrong in problems.items() if wrong]
    if found:
        raise RuntimeError("KV accounting: " + "; ".join(found))


def _unit_rules(
    spec: KvSpec, pool: GranulePool, cache: PromptCache, live: list[Slot], moves: list[Node]
) -> dict[str, bool]:
    """Every granule is in one place: free, with a node, or a slot's own."""
    nodes = {*cache.nodes(), *moves, *(held.node for slot in live for held in slot.held if held.node is not None)}
    units = [node.unit for node in nodes if node.unit is not None]
    units += [held.unit for slot in live for held in slot.held if held.node is None]
    taken = Counter(granule for unit in units for granule in unit.granules)
    places = Counter(place for node in nodes for place in node.places or ())
    return {
        "granules are lost or invented": pool.free + taken.total() != spec.num_granules,
        "a granule is in two places": any(n > 1 or pool.is_free(granule) for granule, n in taken.items()),
        "places are lost or taken twice": cache.places_used != places.total() or places.total() != len(places),
        "idle is miscounted": cache.idle != sum(n.count for n in cache.nodes() if n.unit is not None and not n.busy),
    }


def _node_rules(cache: PromptCache, live: list[Slot], moves: list[Node]) -> dict[str, bool]:
    nodes = list(cache.nodes())
    users = Counter(held.node for slot in live for held in slot.held if held.node is not None)
    lost = {node for node in (*users, *moves) if node.lost}
    busy = Counter(moves) + users + Counter(node.parent for node in nodes if node.busy)
    resident = Counter(node.parent for node in nodes if node.unit is not None)
    return {
        "users are miscounted": any(node.users != users[node] for node in (*nodes, *lost)),
        "busy is miscounted": any(node.busy != busy[node] for node in (*nodes, *lost)),
        "resident is miscounted": any(node.resident != resident[node] for node in nodes),
        "shared is miscounted": cache.shared != sum((n - 1) * node.count for node, n in users.items()),
        "pinned is miscounted": cache.pinned
        != sum(node.count for node in {*nodes, *lost} if node.unit is not None and node.busy and not node.users),
        "a node is on the device without its parent": any(
            node.unit is not None and node.parent is not None and node.parent.count and node.parent.unit is None
            for node in nodes
        ),
        "a node is nowhere": any(node.unit is None and node.places is None for node in nodes),
        "a used node is lost": any(node.unit is None for node in (*users, *moves)),
    }


def _slot_rules(granules: SlotGranules, live: list[Slot]) -> dict[str, bool]:
    return {
        "ahead is miscounted": granules.ahead != sum(slot.granules - slot.needed for slot in live),
        "a slot is miscounted": any(
            slot.granules != sum(held.unit.count for held in slot.held) or slot.needed > slot.granules
            for slot in granules.slots
        ),
        "a slot does not show what it holds": any(
            [slot.view.at(position) for position in range(slot.granules)]
            != [granule for held in slot.held for granule in held.unit.granules]
            for slot in live
        ),
        "a path is not what a slot holds": any(
            any(held.node is None for held in slot.held[: slot.indexed])
            or any(held.node is not None for held in slot.held[slot.indexed :])
            for slot in live
        ),
    }
