"""Errors in the middle of a stream. Each test is named after its row of the fault table."""

import pytest

from tests.faults.sockets import SHORT
from tests.support.live import (
    events,
)

# Row 61: an error in the middle of a stream.


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_row_61_error_after_the_first_token(fake_server, beside, path):
    text = "@fake:error_after:3:invalid_logits"
    prompt = {"prompt": text} if path == "/v1/completions" else {"messages": [{"role": "user", "content": text}]}
    chunks = fake_server.stream(path, {"model": "demo", "max_tokens": 50, "n": 2, **prompt})
    assert chunks[-1]["error"]["code"] == "invalid_logits"
    assert [chunk for chunk in chunks if "error" in chunk] == chunks[-1:]
    assert 3 <= len(chunks) < 20


def test_row_61_error_before_the_first_token_has_a_status(fake_server, beside):
    body = {**SHORT, "prompt": "@fake:error:invalid_logits", "stream": True}
    status, answer = fake_server.json("/v1/completions", body)
    assert (status, answer["error"]["code"]) == (500, "invalid_logits")


def test_events_of_the_helper_refuse_a_cut_stream():
    with pytest.raises(AssertionError):
        events(b'data: {"choices":[]}\n\n')
