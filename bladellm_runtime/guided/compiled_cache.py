"""`CompiledCache`: compiled constraints within a number of bytes, each in as many copies as its matchers need.

Matchers of one copy may share a lock, so that their masks are filled one after another: a constraint that many requests
have at once gets further copies, up to as many as the back end fills at the same time.
"""

import weakref
from collections import OrderedDict
from dataclasses import dataclass

from bladellm_runtime.guided.backend import Compiled, Matcher

MATCHERS_A_COPY = 4
"""Up to so many, one after another, take less time than the rest of a step."""
Key = tuple[str, str]
"""Kind and source; the vocabulary and the back end are the compiler's."""


@dataclass(eq=False)
class _Entry:
    """The copies of one constraint. `most_copies` is 1 for those that take too long to compile once more."""

    copies: list[Compiled]
    most_copies: int

    @property
    def byte_count(self) -> int:
        return sum(copy.byte_count for copy in self.copies)


class CompiledCache:
    """Least recently used first out, those with live matchers never. Not safe to use from two threads at once."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes, self.byte_count, self.evicted = max_bytes, 0, 0
        self._entries: OrderedDict[Key, _Entry] = OrderedDict()
        self._live: weakref.WeakKeyDictionary[Compiled, weakref.WeakSet[Matcher]] = weakref.WeakKeyDictionary()

    def __len__(self) -> int:
        """Constraints, whatever their copies."""
        return len(self._entries)

    def take(self, key: Key) -> Compiled | None:
        """The copy with the fewest live matchers, its constraint now the most recently used."""
        entry = self._entries.get(key)
        if entry is None:
            return None
        self._entries.move_to_end(key)
        return min(entry.copies, key=self._load)

    def is_full(self, compiled: Compiled) -> bool:
        """Whether a further matcher of the copy had better be one of another, which is there or may be made."""
        if self._load(compiled) < MATCHERS_A_COPY:
            return False
        return any(compiled in entry.copies and self._has_room(entry) for entry in self._entries.values())

    def missing_copies(self, key: Key) -> int:
        """How many copies may still be made of a constraint all of whose copies are full; 0 for any other."""
        entry = self._entries.get(key)
        if entry is None or any(self._load(copy) < MATCHERS_A_COPY for copy in entry.copies):
            return 0
        return entry.most_copies - len(entry.copies)

    def follow(self, compiled: Compiled, matcher: Matcher) -> None:
        """Count a matcher for as long as it lives."""
        self._live.setdefault(compiled, weakref.WeakSet()).add(matcher)

    def keep(self, key: Key, compiled: Compiled, most_copies: int) -> None:
        """Add the first copy of a constraint, or a further one, where there is room beside what is in use.

        Where there is none for a further copy, no more are made.
        """
        if not self._make_room(compiled.byte_count, key):
            self.stop_copies(key)
            return
        entry = self._entries.setdefault(key, _Entry([], most_copies))
        entry.copies.append(compiled)
        self.byte_count += compiled.byte_count

    def stop_copies(self, key: Key) -> None:
        """Make no more copies of a constraint."""
        if key in self._entries:
            self._entries[key].most_copies = len(self._entries[key].copies)

    def discard(self, compiled: Compiled) -> None:
        """Forget a constraint, all of its copies."""
        for key in [key for key, entry in self._entries.items() if compiled in entry.copies]:
            self._remove(key)

    def _load(self, compiled: Compiled) -> int:
        return len(self._live.get(compiled, ()))

    def _has_room(self, entry: _Entry) -> bool:
        return len(entry.copies) < entry.most_copies or any(self._load(copy) < MATCHERS_A_COPY for copy in entry.copies)

    def _make_room(self, byte_count: int, key: Key) -> bool:
        for other in list(self._entries):
            if self.byte_count + byte_count <= self.max_bytes:
                break
            if other != key and not any(map(self._load, self._entries[other].copies)):
                self._remove(other)
                self.evicted += 1
        return self.byte_count + byte_count <= self.max_bytes

    def _remove(self, key: Key) -> None:
        self.byte_count -= self._entries.pop(key).byte_count
