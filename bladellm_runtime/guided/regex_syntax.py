"""Regular expressions as trees: one syntax, and one meaning, for all back ends.

Taken: characters, escapes, classes, `.`, groups, `|`, `* + ? {m} {m,} {m,n}` and their lazy forms (the same language),
`^` and `$` at the ends. Look-around, back references, word boundaries, flags and `\\p` are refused.

`\\d \\w \\s` mean ASCII in some dialects and Unicode in others; here each class is the narrower reading, so that a text
matches in both: `\\d` is 0-9, `\\D` leaves out every Unicode digit.
"""

import unicodedata
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeAlias

from bladellm_runtime.guided.pauses import breathe

MAX_REPEAT = 2000
MAX_DEPTH = 64
MAX_CODE_POINT = 0x10FFFF
MAX_WRITTEN = 2**20
MAX_RANGES = 60_000
"""Ranges of all the characters and classes of a pattern; one `\\W` has 700."""
_SURROGATES = (0xD800, 0xDFFF)
Ranges: TypeAlias = tuple[tuple[int, int], ...]


class RegexError(ValueError):
    """A pattern that is not in the syntax; one clause without the pattern."""


@dataclass(frozen=True, slots=True)
class Chars:
    """One character of these ranges of code points: sorted, disjoint, none empty, no surrogates."""

    ranges: Ranges


@dataclass(frozen=True, slots=True)
class Concat:
    parts: "tuple[Node, ...]"


@dataclass(frozen=True, slots=True)
class Alternate:
    branches: "tuple[Node, ...]"


@dataclass(frozen=True, slots=True)
class Repeat:
    """`inner` at least `low` times, at most `high` times (None: no limit)."""

    inner: "Node"
    low: int
    high: int | None


Node: TypeAlias = Chars | Concat | Alternate | Repeat


def full_match(pattern: str) -> Node:
    """The tree of a pattern that the whole text must match. Raises `RegexError`."""
    return Alternate(tuple(node for _, node, _ in _Parser(pattern).branches()))


def search(pattern: str) -> Node:
    """The tree of all texts in which a pattern is found somewhere, as JSON schemas mean it. Raises `RegexError`."""
    anything = Repeat(Chars(normalised([(0, MAX_CODE_POINT)])), 0, None)
    whole: list[Node] = []
    for at_start, node, at_end in _Parser(pattern).branches():
        before, after = (() if at_start else (anything,)), (() if at_end else (anything,))
        whole.append(Concat((*before, node, *after)))
    return Alternate(tuple(whole))


def literal(text: str) -> Node:
    """The tree of one text."""
    breathe()
    return Concat(tuple(Chars(((ord(char), ord(char)),)) for char in text))


def written(node: Node) -> str:
    """The tree in a syntax that every dialect of regular expressions with `\\x{...}` reads alike.

    Raises `RegexError` above `MAX_WRITTEN` characters.
    """
    return _Writer().of(node)


class _Writer:
    """Counts what it writes: a class of all letters has thousands of characters, and may stand there often."""

    def __init__(self) -> None:
        self.count = 0

    def of(self, node: Node) -> str:
        match node:
            case Chars(ranges):
                return self.counted(_written_chars(ranges))
            case Concat(parts):
                return "".join(map(self.of, parts))
            case Alternate(branches):
                return self.counted("(?:") + "|".join(map(self.of, branches)) + ")"
            case Repeat(inner, low, high):
                bounds = {(0, None): "*", (1, None): "+", (0, 1): "?"}.get((low, high))
                return f"(?:{self.of(inner)})" + self.counted(bounds or f"{{{low},{'' if high is None else high}}}")

    def counted(self, text: str) -> str:
        breathe()
        self.count += len(text)
        if self.count > MAX_WRITTEN:
            raise RegexError("it is too large")
        return text


@lru_cache(maxsize=512)
def _written_chars(ranges: Ranges) -> str:
    if len(ranges) == 1 and ranges[0][0] == ranges[0][1]:
        return _written_char(ranges[0][0])
    return "[" + "".join(f"{_written_char(low)}-{_written_char(high)}" for low, high in ranges) + "]"


def _written_char(code: int) -> str:
    return chr(code) if code < 128 and chr(code).isalnum() else f"\\x{{{code:x}}}"


def normalised(ranges: list[tuple[int, int]]) -> Ranges:
    """Sorted and joined, surrogates taken out."""
    low_half, high_half = _SURROGATES
    kept: list[tuple[int, int]] = []
    for low, high in ranges:
        kept += [(low, min(high, low_half - 1)), (max(low, high_half + 1), high)]
    joined: list[tuple[int, int]] = []
    for low, high in sorted(pair for pair in kept if pair[0] <= pair[1]):
        if joined and low <= joined[-1][1] + 1:
            joined[-1] = (joined[-1][0], max(high, joined[-1][1]))
        else:
            joined.append((low, high))
    return tuple(joined)


def complement(ranges: Ranges) -> Ranges:
    """All other characters."""
    edges = [-1, *(edge for pair in ranges for edge in pair), MAX_CODE_POINT + 1]
    return normalised([(low + 1, high - 1) for low, high in zip(edges[::2], edges[1::2], strict=True)])


_ASCII_CLASSES: dict[str, Ranges] = {
    "d": ((48, 57),),
    "w": ((48, 57), (65, 90), (95, 95), (97, 122)),
    "s": ((9, 13), (32, 32)),
}


@lru_cache(maxsize=3)
def _unicode_class(letter: str) -> Ranges:
    """Everything that some dialect takes for a digit, word character or space."""
    if letter in "dw":
        kinds, inside = ("Nd",) if letter == "d" else ("L", "M", "N", "Pc"), []
        for first in range(0, MAX_CODE_POINT + 1, 256):
            breathe()
            page = range(first, first + 256)
            inside += [code for code in page if unicodedata.category(chr(code)).startswith(kinds)]
    else:
        inside = [*range(9, 14), *range(0x1C, 0x21), 0x85, 0xA0, 0x1680, *range(0x2000, 0x200B), 0x2028, 0x2029]
        inside += [0x202F, 0x205F, 0x3000, 0xFEFF]
    return normalised([(code, code) for code in inside])


@lru_cache(maxsize=6)
def _narrow(letter: str) -> Ranges:
    """`\\letter` in the narrower reading."""
    return _ASCII_CLASSES[letter] if letter.islower() else complement(_unicode_class(letter.lower()))


@lru_cache(maxsize=6)
def _wide(letter: str) -> Ranges:
    """`\\letter` in the wider reading, for inside `[^...]`."""
    return _unicode_class(letter) if letter.islower() else complement(_ASCII_CLASSES[letter.lower()])


_CONTROL = {"t": 9, "n": 10, "v": 11, "f": 12, "r": 13}
_DOT = complement(normalised([(10, 10), (13, 13), (0x85, 0x85), (0x2028, 0x2029)]))


class _Parser:
    """Recursive descent over one pattern."""

    def __init__(self, pattern: str) -> None:
        self.text, self.at, self.ranges = pattern, 0, 0

    def branches(self) -> list[tuple[bool, Node, bool]]:
        """The alternatives at the top, each with whether `^` begins it and `$` ends it."""
        found = []
        while True:
            at_start = self.skip("^")
            node = self.sequence(0)
            found.append((at_start, node, self.skip("$")))
            if not self.skip("|"):
                break
        if self.at < len(self.text):
            raise RegexError(f"it has an unexpected {self.text[self.at]!r} at character {self.at}{self.hint()}")
        return found

    def hint(self) -> str:
        return "; anchors are supported at the ends of the pattern only" if self.text[self.at] in "^$" else ""

    def skip(self, token: str) -> bool:
        found = self.text.startswith(token, self.at)
        self.at += len(token) if found else 0
        return found

    def alternatives(self, depth: int) -> Node:
        branches = [self.sequence(depth)]
        while self.skip("|"):
            branches.append(self.sequence(depth))
        return branches[0] if len(branches) == 1 else Alternate(tuple(branches))

    def sequence(self, depth: int) -> Node:
        parts: list[Node] = []
        while self.at < len(self.text) and self.text[self.at] not in "|)^$":
            atom = self.atom(depth)
            self.ranges += len(atom.ranges) if isinstance(atom, Chars) else 0
            if self.ranges > MAX_RANGES:
                raise RegexError("it has too many or too large character classes")
            parts.append(self.repeated(atom))
        return parts[0] if len(parts) == 1 else Concat(tuple(parts))

    def atom(self, depth: int) -> Node:
        char = self.take()
        if char == "(":
            return self.group(depth + 1)
        if char == "[":
            return self.char_class()
        if char == ".":
            return Chars(_DOT)
        if char in "*+?":
            raise RegexError(f"nothing to repeat at character {self.at - 1}")
        if char == "\\":
            return Chars(self.escape(in_class=False, wide=False))
        if char == "\0":
            raise RegexError("NUL characters are not supported")
        return Chars(_one(ord(char)))

    def take(self) -> str:
        breathe()
        if self.at >= len(self.text):
            raise RegexError("it ends too early")
        self.at += 1
        return self.text[self.at - 1]

    def group(self, depth: int) -> Node:
        if depth > MAX_DEPTH:
            raise RegexError(f"groups are nested more than {MAX_DEPTH} deep")
        if self.skip("?"):
            if self.text.startswith(("=", "!", "<=", "<!"), self.at):
                raise RegexError("look-around is not supported")
            if self.skip("P<") or self.skip("<"):
                end = self.text.find(">", self.at)
                if not self.text[self.at : max(end, self.at)].isidentifier():
                    raise RegexError("a group has a bad name")
                self.at = end + 1
            elif not self.skip(":"):
                raise RegexError(f"(?{self.text[self.at : self.at + 1]} is not supported")
        inner = self.alternatives(depth)
        if not self.skip(")"):
            raise RegexError("a group is not closed, or has an anchor inside")
        return inner

    def repeated(self, node: Node) -> Node:
        bounds = self.bounds()
        if bounds is None:
            return node
        self.skip("?")
        if self.at < len(self.text) and (self.text[self.at] in "*+?" or self.bounds() is not None):
            raise RegexError(f"a repetition is repeated at character {self.at}; put the inner one in a group")
        low, high = bounds
        if max(low, high or 0) > MAX_REPEAT:
            raise RegexError(f"a repetition is above {MAX_REPEAT} times")
        if high is not None and high < low:
            raise RegexError(f"a repetition has its bounds the wrong way round: {low} and {high}")
        return Repeat(node, low, high)

    def bounds(self) -> tuple[int, int | None] | None:
        for token, bounds in (("*", (0, None)), ("+", (1, None)), ("?", (0, 1))):
            if self.skip(token):
                return bounds
        end = self.text.find("}", self.at, self.at + 24) if self.text.startswith("{", self.at) else -1
        low, comma, high = self.text[self.at + 1 : end].partition(",") if end > 0 else ("", "", "")
        if not all(part == "" or (part.isascii() and part.isdigit()) for part in (low, high)) or not low + high:
            return None
        if not low:
            raise RegexError(f"{{,{high}}} means different things; write {{0,{high}}}")
        self.at = end + 1
        return int(low), (int(high) if high else None) if comma else int(low)

    def escape(self, *, in_class: bool, wide: bool) -> Ranges:
        char = self.take()
        if char in "dDwWsS":
            return _wide(char) if wide else _narrow(char)
        if char in _CONTROL:
            return _one(_CONTROL[char])
        if char in "xu":
            return _one(self.hexadecimal(2 if char == "x" else 4))
        if char == "b" and in_class:
            return _one(8)
        if char in "bB":
            raise RegexError("word boundaries are not supported")
        if char in "123456789" or char in "kg":
            raise RegexError("back references are not supported")
        if char == "0" or char == "\0":
            raise RegexError("NUL characters are not supported")
        if char.isascii() and char.isalnum():
            raise RegexError(f"\\{char} is not supported")
        return _one(ord(char))

    def hexadecimal(self, length: int) -> int:
        if self.skip("{"):
            end = self.text.find("}", self.at, self.at + 9)
            digits, self.at = self.text[self.at : max(end, self.at)], end + 1
        else:
            digits, self.at = self.text[self.at : self.at + length], self.at + length
            digits = digits if len(digits) == length else ""
        if not digits or any(digit not in "0123456789abcdefABCDEF" for digit in digits):
            raise RegexError("an \\x or \\u escape is not complete")
        code = int(digits, 16)
        if not 0 < code <= MAX_CODE_POINT or _SURROGATES[0] <= code <= _SURROGATES[1]:
            raise RegexError(f"\\u{{{code:x}}} is not a character that a text can hold")
        return code

    def char_class(self) -> Node:
        negated = self.skip("^")
        ranges: list[tuple[int, int]] = []
        while not self.skip("]"):
            low = self.class_item(negated)
            if self.at + 1 < len(self.text) and self.text[self.at] == "-" and self.text[self.at + 1] != "]":
                self.at += 1
                high = self.class_item(negated)
                if any(len(side) != 1 or side[0][0] != side[0][1] for side in (low, high)) or high < low:
                    raise RegexError(f"a class has a bad range at character {self.at}")
                low = ((low[0][0], high[0][0]),)
            ranges += low
        found = complement(normalised(ranges)) if negated else normalised(ranges)
        if not found or not ranges:
            raise RegexError("a class holds no character")
        return Chars(found)

    def class_item(self, wide: bool) -> Ranges:
        if self.text.startswith(("[:", "[.", "[="), self.at):
            raise RegexError("POSIX classes are not supported")
        char = self.take()
        if char == "\\":
            return self.escape(in_class=True, wide=wide)
        if char == "\0":
            raise RegexError("NUL characters are not supported")
        return _one(ord(char))


def _one(code: int) -> Ranges:
    return ((code, code),)
