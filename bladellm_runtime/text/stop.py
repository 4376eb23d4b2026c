"""Stop strings: find the first one in a stream of text, holding back as little as possible."""

from collections import deque
from collections.abc import Sequence


class StopMatcher:
    """Cuts a stream of text at a stop string.

    The stop string that is complete first ends the text, as if it were checked after every character, so the outcome
    does not depend on how the text is split into pieces. Of several that end at the same character the longest
    counts. The text ends before the stop string, or after it with `include`.

    An Aho–Corasick automaton: time is linear in the text, and the depth of its state is the number of characters at
    the end of the text that may still become a stop string; only those are held back (none with `include`).
    """

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        self._include = include
        self._children: list[dict[str, int]] = [{}]
        self._depth = [0]
        self._match: list[str | None] = [None]
        for stop in stops:
            self._add(stop)
        self._fail = self._link()
        self._state = 0
        self._held = ""

    def feed(self, text: str, *, armed: bool = True) -> tuple[str, str | None]:
        """Take more text; returns (text that is safe to emit, the stop string that ended it or None).

        After a match nothing more may be fed. `armed=False` lets stop strings that end in this text pass: those
        within the first `min_tokens` tokens do not count.
        """
        state = self._state
        whole = self._held + text
        for end, char in enumerate(text, start=len(self._held) + 1):
            state = self._next(state, char)
            stop = self._match[state]
            if stop is not None and armed:
                return self._cut(whole[:end], stop), stop
        self._state = state
        keep = 0 if self._include else self._depth[state]
        self._held = whole[len(whole) - keep :]
        return whole[: len(whole) - keep], None

    def flush(self) -> str:
        """The text still held back, when no more will come."""
        held, self._held, self._state = self._held, "", 0
        return held

    def _cut(self, text: str, stop: str) -> str:
        self._held, self._state = "", 0
        return text if self._include else text[: len(text) - len(stop)]

    def _next(self, state: int, char: str) -> int:
        while char not in self._children[state]:
            if state == 0:
                return 0
            state = self._fail[state]
        return self._children[state][char]

    def _add(self, stop: str) -> None:
        state = 0
        for char in stop:
            if char not in self._children[state]:
                self._children[state][char] = len(self._children)
                self._children.append({})
                self._depth.append(self._depth[state] + 1)
                self._match.append(None)
            state = self._children[state][char]
        if state:
            self._match[state] = stop

    def _link(self) -> list[int]:
        """Fail link of every state: the state of its longest proper suffix. Also inherits the matches along them."""
        fail = [0] * len(self._children)
        queue = deque(self._children[0].values())
        while queue:
            state = queue.popleft()
            if self._match[state] is None:
                self._match[state] = self._match[fail[state]]
            for char, child in self._children[state].items():
                back = fail[state]
                while back and char not in self._children[back]:
                    back = fail[back]
                fail[child] = self._children[back].get(char, 0)
                queue.append(child)
        return fail
