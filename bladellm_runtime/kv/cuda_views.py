"""`ViewMap`: what is mapped where in the slots' address ranges. Numbers only, no memory."""

from typing import NamedTuple


class View(NamedTuple):
    """`length` granules from `granule` on, mapped by one call a group at a slot's position `start`: one, or a block."""

    slot: int
    start: int
    granule: int
    length: int


class ViewMap:
    """Views by slot and by first granule."""

    def __init__(self, num_slots: int, longest: int) -> None:
        """`longest`: granules of the longest view."""
        self._longest = longest
        self._slots: list[dict[int, View]] = [{} for _ in range(num_slots)]
        self._granules: dict[int, set[View]] = {}

    def __len__(self) -> int:
        return sum(len(views) for views in self._slots)

    def __contains__(self, view: View) -> bool:
        return self._slots[view.slot].get(view.start) == view

    def add(self, view: View) -> None:
        self._slots[view.slot][view.start] = view
        self._granules.setdefault(view.granule, set()).add(view)

    def remove(self, view: View) -> None:
        del self._slots[view.slot][view.start]
        views = self._granules[view.granule]
        views.remove(view)
        if not views:
            del self._granules[view.granule]

    def of(self, granule: int) -> list[View]:
        """Views that begin with a granule."""
        return list(self._granules.get(granule, ()))

    def overlapping(self, slot: int, first: int, end: int) -> list[View]:
        """Views of a slot that show any of its positions [first, end)."""
        views = self._slots[slot]
        starts = range(max(0, first - self._longest + 1), end)
        found = (views[start] for start in starts if start in views)
        return [view for view in found if view.start + view.length > first]

    def from_on(self, slot: int, first: int) -> list[View]:
        """Views of a slot that start at position `first` or later."""
        return [view for view in self._slots[slot].values() if view.start >= first]

    def all(self) -> list[View]:
        return [view for views in self._slots for view in views.values()]
