"""A small server's view of requests: shorthands for the protocol tests."""

import pytest

from bladellm_runtime.server.chat import parse_chat
from bladellm_runtime.server.completions import parse_completion
from bladellm_runtime.server.context import RequestContext
from bladellm_runtime.server.errors import ApiError

VOCAB = 500
CTX = RequestContext(["demo", "alias"], max_model_len=100, kv_tokens=1000, vocab_size=VOCAB)
HELLO = [{"role": "user", "content": "hello"}]


def completion(ctx=CTX, **fields):
    return parse_completion({"prompt": "hello", **fields}, ctx)


def chat(ctx=CTX, **fields):
    return parse_chat({"messages": HELLO, **fields}, ctx)


def refusal(parse, param, **fields):
    with pytest.raises(ApiError) as caught:
        parse(**fields)
    error = caught.value
    assert 400 <= error.status < 500
    assert error.param == param, error.message
    assert len(error.body()) < 1500
    return error


BOTH = pytest.mark.parametrize("parse", [completion, chat])
