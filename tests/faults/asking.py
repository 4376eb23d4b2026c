"""Short ways to ask the fault tests' server and to check how it answered."""

import json
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.faults.conftest import Neighbour, assert_quiet
from tests.support.live import LiveServer, events

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
BOTH_ROUTES = pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
VOCAB = 8192
MODEL_LEN = 4096
FILE_PATH = re.compile(r"(?<![\w.])/(?!v1/)\w|\.py\b|Traceback")
ACCEPTED: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"model": "demo", "prompt": "Hello there", "max_tokens": 4},
    CHAT: {"model": "demo", "messages": [{"role": "user", "content": "Hello there"}], "max_tokens": 4},
}
"""A request each route accepts; the tests change one field of it."""

Answer = tuple[int, Any]


def ask(server: LiveServer, path: str, **fields: Any) -> Answer:
    """Status and parsed answer; of a stream that is the list of its events."""
    body = {**ACCEPTED[path], **fields}
    if "max_completion_tokens" in fields and "max_tokens" not in fields:
        del body["max_tokens"]
    status, answer, _ = server.request(path, body)
    return status, events(answer) if status == 200 and body.get("stream") else json.loads(answer)


def text_of(answer: Answer) -> tuple[str, str]:
    """Text and finish reason of an answer with one choice, streamed or not."""
    status, body = answer
    assert status == 200, body
    chunks = body if isinstance(body, list) else [body]
    text, reasons = "", []
    for chunk in chunks:
        assert "error" not in chunk, chunk
        for choice in chunk["choices"]:
            assert not reasons, "a chunk after the one that ended the choice"
            part = (
                choice.get("text") or choice.get("delta", {}).get("content") or choice.get("message", {}).get("content")
            )
            text += part or ""
            reasons += [choice["finish_reason"]] if choice["finish_reason"] else []
    assert len(reasons) == 1
    return text, reasons[0]


def assert_error(answer: tuple[int, bytes, dict[str, str]], status: int) -> dict[str, Any]:
    """The error object of an answer that must be one."""
    got, body, headers = answer
    assert got == status, (got, body[:500])
    assert headers["content-type"].startswith("application/json")
    assert len(body) < 2000
    parsed = json.loads(body)
    assert list(parsed) == ["error"]
    error: dict[str, Any] = parsed["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    assert not FILE_PATH.search(error["message"]), error["message"]
    return error


def refused(server: LiveServer, path: str, *, status: int = 400, **fields: Any) -> dict[str, Any]:
    """The error object of a request that must be refused, streamed and not alike."""
    body = {**ACCEPTED[path], **fields}
    error = assert_error(server.request(path, body), status)
    assert assert_error(server.request(path, {**body, "stream": True}), status) == error
    return error


def refused_values(server: LiveServer, path: str, name: str, values: Iterable[Any]) -> None:
    """Each of these values must be refused with a 400 that names the field."""
    for value in values:
        error = refused(server, path, **{name: value})
        assert (error["param"], error["type"]) == (name, "invalid_request_error"), (value, error)


def say(text: str) -> str:
    """A prompt that makes the fake engine answer with `text`."""
    return f"@fake:say:{text}"


@contextmanager
def undisturbed(server: LiveServer) -> Iterator[None]:
    """What the fixture `beside` does, for a server that a test starts itself."""
    assert_quiet(server)
    neighbour = Neighbour(server)
    neighbour.start()
    yield
    neighbour.finish()
    assert_quiet(server)
