"""What commands write on a terminal: one error line, and colour only where a person reads it."""

import os
import sys
from collections.abc import Sequence
from typing import TextIO

RED, YELLOW, GREEN, BOLD, DIM = "31", "33", "32", "1", "2"


def is_terminal(stream: TextIO) -> bool:
    """True when a person reads the stream; a closed stream is nobody's terminal."""
    try:
        return stream.isatty()
    except ValueError:
        return False


def styled(text: str, style: str, stream: TextIO) -> str:
    """The text in an ANSI style where the stream is a terminal and NO_COLOR is unset; else as it is."""
    if not is_terminal(stream) or os.environ.get("NO_COLOR"):
        return text
    return f"\x1b[{style}m{text}\x1b[0m"


def one_line(text: str) -> str:
    """The text on one line, without control characters that could rewrite the terminal."""
    joined = " ".join(text.split())
    return "".join(character if character.isprintable() else "\ufffd" for character in joined)


def fail(message: str) -> None:
    """Print an error as one line on standard error."""
    print(f"{styled('error:', RED, sys.stderr)} {one_line(message)}", file=sys.stderr, flush=True)


def gib(size: float) -> str:
    """Bytes in GiB, with enough digits that a small model is not 0.00."""
    value = size / 1024**3
    return f"{value:,.2f} GiB" if value >= 1 else f"{value:.4f} GiB"


def table(rows: Sequence[tuple[str, str]], indent: str = "  ") -> list[str]:
    """Two columns, names to the left and values to the right, as lines."""
    names = max((len(name) for name, _ in rows), default=0)
    values = max((len(value) for _, value in rows), default=0)
    return [f"{indent}{name:<{names}}  {value:>{values}}" for name, value in rows]
