"""Request bodies: bytes in, a checked JSON object out, within bounded time and memory."""

from typing import Any

import orjson

from bladellm_runtime.server.errors import ApiError, invalid_request

MAX_DEPTH = 64
MAX_CONTAINERS = 65_536
"""Most objects and arrays in a body. Millions of tiny ones cost seconds to build and to free."""
MAX_KEYS = 65_536

# Keeps what shapes a document, objects written as arrays: quotes, brackets and the colons that follow keys.
_TO_BRACKETS = bytes.maketrans(b"{}", b"[]")
_NOT_STRUCTURE = bytes(byte for byte in range(256) if byte not in b'"[]{}:')


def parse_body(raw: bytes) -> dict[str, Any]:
    """Parse a request body.

    Integers beyond 64 bits become floats, which every integer field refuses.

    Raises `ApiError` 400 for anything but one JSON object in valid UTF-8 with unique keys, at most `MAX_DEPTH`
    levels deep, with at most `MAX_CONTAINERS` objects and arrays and `MAX_KEYS` keys.
    """
    if not raw.strip():
        raise invalid_request("The request body is empty; send a JSON object")
    structure = _structure(raw)
    _check_shape(structure)
    try:
        body = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise _not_json(raw, error) from None
    if not isinstance(body, dict):
        raise invalid_request("The request body must be a JSON object")
    _check_unique_keys(structure, body)
    return body


def _not_json(raw: bytes, error: orjson.JSONDecodeError) -> ApiError:
    """The 400 with what is wrong and where, and no more: the exception carries the whole document."""
    try:
        raw.decode()
    except UnicodeDecodeError as wrong:
        return invalid_request(f"The request body is not valid UTF-8 at byte {wrong.start}")
    return invalid_request(f"The request body is not valid JSON: {error.msg} at character {error.pos}")


def _structure(raw: bytes) -> bytes:
    """The `[`, `]` and `:` of a JSON document outside its strings, in order, with `[` for `{` and `]` for `}`.

    Works in a few passes at memory speed. Exact on valid JSON; on anything else the answer means nothing.
    """
    if b"\\" in raw:
        raw = raw.replace(b"\\\\", b"").replace(b'\\"', b"")
    marks = raw.translate(_TO_BRACKETS, _NOT_STRUCTURE)
    # Dropping a pair of adjacent quotes leaves everything else inside or outside a string, as it was.
    return b"".join(marks.replace(b'""', b"").split(b'"')[::2])


def _check_shape(structure: bytes) -> None:
    """Refuse documents that are too deep or have too many parts, before anything is built from them."""
    if structure.count(b":") > MAX_KEYS:
        raise _too_complex(f"has more than {MAX_KEYS} keys")
    brackets = structure.replace(b":", b"")
    if len(brackets) > 2 * MAX_CONTAINERS:
        raise _too_complex(f"has more than {MAX_CONTAINERS} objects and arrays")
    if len(brackets) > 2 * MAX_DEPTH and _deeper_than(brackets, MAX_DEPTH):
        raise _too_complex(f"is nested more than {MAX_DEPTH} levels deep")


def _deeper_than(brackets: bytes, depth: int) -> bool:
    """Whether balanced brackets are nested deeper than `depth`; each pass takes the innermost level away."""
    for _ in range(depth):
        shorter = brackets.replace(b"[]", b"")
        if len(shorter) in (0, len(brackets)):
            # Empty: shallow enough. Unchanged: unbalanced, which the parser reports better.
            return False
        brackets = shorter
    return True


def _check_unique_keys(structure: bytes, body: dict[str, Any]) -> None:
    """Refuse duplicate keys, of which the parser silently keeps the last: then fewer keys come out than went in."""
    if structure.count(b":") != _structure(orjson.dumps(body)).count(b":"):
        raise invalid_request("The request body has an object with the same key twice", code="duplicate_key")


def _too_complex(reason: str) -> ApiError:
    return invalid_request(f"The request body {reason}", code="body_too_complex")
