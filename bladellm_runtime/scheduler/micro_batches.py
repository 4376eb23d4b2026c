"""`MicroBatches`: running sequences in groups that take turns, so that every stage of a pipeline has one to work on."""

from collections import deque
from collections.abc import Iterator, Sequence


class MicroBatches:
    """Whose turn it is. Consecutive steps serve different groups while several have something to run.

    A step reads tokens that the last step of its group sampled, so steps of one group pass the stages one by one, and
    those of `count` groups side by side. `each`: steps of a group that may be in flight, the second one planned before
    the result of the first is known. A single group always has its turn: who plans its steps bounds their number.
    """

    def __init__(self, count: int = 1, each: int = 2) -> None:
        self.count = count
        self._each = each
        self._turn = 0
        self._in_flight: deque[int] = deque()

    def turns(self) -> Iterator[int]:
        """The groups that may have the next step, in the order in which they are to be asked."""
        for place in range(self.count):
            group = (self._turn + place) % self.count
            if self.count == 1 or self._in_flight.count(group) < self._each:
                yield group

    def planned(self, group: int) -> None:
        """A step of the group is in flight from now on."""
        self._in_flight.append(group)
        self._turn = (group + 1) % self.count

    def completed(self) -> None:
        """The oldest step in flight is not any more."""
        self._in_flight.popleft()

    def give_up(self) -> None:
        """No step is in flight any more."""
        self._in_flight.clear()


def has_room(group: int, sizes: Sequence[int], waiting: int, slots: int) -> bool:
    """Whether a group may have one more sequence, so that all groups end up with as many, or one less.

    sizes: running sequences of every group; waiting: those that want in. As long as something waits and a slot is free
    some group has room.
    """
    least, more = divmod(min(sum(sizes) + waiting, slots), len(sizes))
    return sizes[group] < least + (sum(size > least for size in sizes) < more)
