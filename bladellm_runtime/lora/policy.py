"""Which adapter is in which slot of the device, and which ones the host keeps: counts and names, no memory."""

from collections import OrderedDict
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Move:
    """Bring an adapter to a slot. read: from its folder, the host has no copy of it. dropped: whose copy on the host
    goes before. evicted: who had the slot."""

    adapter: str
    slot: int
    read: bool
    dropped: str | None = None
    evicted: str | None = None


@dataclass(frozen=True, slots=True)
class Acquired:
    """A use of an adapter that was counted. move: to be carried out first, None where it is in the slot, or on its way
    there."""

    slot: int
    move: Move | None = None


class AdapterPolicy:
    """`max_loras` slots and `max_cpu_loras` copies on the host, both given away by least recent use.

    An adapter that is in use keeps its slot; one that is being loaded keeps slot and copy. Every `acquire` that gave
    something is followed by one `release`, and every move by one `loaded` or `failed`.
    """

    def __init__(self, max_loras: int, max_cpu_loras: int) -> None:
        if max_loras < 1 or max_cpu_loras < 1:
            raise ValueError(f"there must be a slot and a copy at least, got {max_loras} and {max_cpu_loras}")
        self._free = list(reversed(range(max_loras)))
        self._max_copies = max_cpu_loras
        self._slots: OrderedDict[str, int] = OrderedDict()
        self._copies: OrderedDict[str, None] = OrderedDict()
        self._loading: dict[str, Move] = {}
        self._uses: dict[str, int] = {}
        self._versions: dict[str, int] = {}
        self._reads = 0

    def acquire(self, adapter: str) -> Acquired | None:
        """Count a use. None, with nothing changed, where all slots or copies are in use: ask again after a release."""
        slot = self._slots.get(adapter)
        move = None
        if slot is None:
            move = self._plan(adapter)
            if move is None:
                return None
            self._begin(move)
            slot = move.slot
        self._slots.move_to_end(adapter)
        if adapter in self._copies:
            self._copies.move_to_end(adapter)
        self._uses[adapter] = self._uses.get(adapter, 0) + 1
        return Acquired(slot, move)

    def release(self, adapter: str) -> None:
        """End a use. Raises ValueError where none was counted."""
        count = self._uses.get(adapter, 0)
        if count == 0:
            raise ValueError(f"{adapter} is not in use")
        if count == 1:
            del self._uses[adapter]
        else:
            self._uses[adapter] = count - 1

    def loaded(self, adapter: str) -> None:
        """The move of an adapter was carried out."""
        del self._loading[adapter]

    def failed(self, adapter: str) -> None:
        """The move of an adapter was given up: its slot is free, the host has no copy of it. Uses stay counted."""
        del self._loading[adapter]
        self._free.append(self._slots.pop(adapter))
        self._copies.pop(adapter, None)
        self._forget_version(adapter)

    def forget(self, adapter: str) -> bool:
        """Take an adapter out of its slot and off the host; False where it is in use or being loaded."""
        if adapter in self._uses or adapter in self._loading:
            return False
        if adapter in self._slots:
            self._free.append(self._slots.pop(adapter))
        self._copies.pop(adapter, None)
        self._forget_version(adapter)
        return True

    def ready_slot(self, adapter: str) -> int | None:
        """The slot of an adapter that may be computed with; None where it is not there yet."""
        return None if adapter in self._loading else self._slots.get(adapter)

    def version(self, adapter: str) -> int:
        """The number of the read that brought an adapter here, which has a slot or a copy: another one, whatever the
        adapter, means that its folder may have been another one too."""
        return self._versions[adapter]

    @property
    def in_slots(self) -> dict[str, int]:
        """Slots by adapter, least recently used first, those on their way too."""
        return dict(self._slots)

    @property
    def copies(self) -> tuple[str, ...]:
        """Adapters that the host keeps, least recently used first."""
        return tuple(self._copies)

    @property
    def in_use(self) -> dict[str, int]:
        """Uses by adapter; those without any are not there."""
        return dict(self._uses)

    def _plan(self, adapter: str) -> Move | None:
        evicted = None
        if not self._free:
            evicted = next((name for name in self._slots if name not in self._uses and name not in self._loading), None)
            if evicted is None:
                return None
        read, dropped = adapter not in self._copies, None
        if read and len(self._copies) >= self._max_copies:
            dropped = next((name for name in self._copies if name not in self._loading), None)
            if dropped is None:
                return None
        slot = self._free[-1] if evicted is None else self._slots[evicted]
        return Move(adapter, slot, read, dropped, evicted)

    def _begin(self, move: Move) -> None:
        if move.evicted is None:
            self._free.pop()
        else:
            del self._slots[move.evicted]
            self._forget_version(move.evicted)
        if move.dropped is not None:
            del self._copies[move.dropped]
            self._forget_version(move.dropped)
        if move.read:
            self._reads += 1
            self._versions[move.adapter] = self._reads
        self._slots[move.adapter] = move.slot
        self._copies[move.adapter] = None
        self._loading[move.adapter] = move

    def _forget_version(self, adapter: str) -> None:
        if adapter not in self._slots and adapter not in self._copies:
            self._versions.pop(adapter, None)
