"""`HostCopies`: which nodes of the prompt cache have a copy in host memory, and who gives up places for another."""

from bladellm_runtime.kv.prompt_tree import Node
from bladellm_runtime.kv.swap_space import SwapSpace


class HostCopies:
    """Nodes with places in the swap space: `away` those on the host only, the one longest there first; `backed` those
    on the device too, the one copied last at the end. Dicts as ordered sets."""

    def __init__(self, swap: SwapSpace) -> None:
        self.swap = swap
        self.away: dict[Node, None] = {}
        self.backed: dict[Node, None] = {}

    def add(self, node: Node, places: list[int]) -> None:
        """Note the copy of a node on the device."""
        node.places = places
        self.backed[node] = None

    def leave_device(self, node: Node) -> None:
        if node.places is not None:
            del self.backed[node]
            self.away[node] = None

    def land(self, node: Node) -> None:
        if node.places is not None:
            del self.away[node]
            self.backed[node] = None

    def free(self, node: Node) -> None:
        """Give up a node's copy, if it has one."""
        if node.places is not None:
            self.swap.give(node.places)
            node.places = None
            self.away.pop(node, None)
            self.backed.pop(node, None)

    def victim(self, node: Node) -> Node | None:
        """Whose copy should make room for that of `node`: what is on the host only, else what is on the device and was
        used later than it. Never one that is evicted before it: its copy would be needed first."""
        if self.away:
            return next(iter(self.away))
        latest = next(reversed(self.backed), None)
        return latest if latest is not None and latest.last_use > node.last_use else None
