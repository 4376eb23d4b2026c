"""What the openai client raises: every refusal has the class, the status, the field and a sentence that helps."""

import openai
import pytest

from tests.server.openai_support import user
from tests.support.live import LiveServer

BAD = [
    ({"temperature": 2.5}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.01}, "top_p"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": 1.5}, "max_tokens"),
    ({"n": 0}, "n"),
    ({"n": 129}, "n"),
    ({"presence_penalty": 3}, "presence_penalty"),
    ({"frequency_penalty": -3}, "frequency_penalty"),
    ({"stop": ["a", "b", "c", "d", "e"]}, "stop"),
    ({"stop": [""]}, "stop"),
    ({"seed": "x"}, "seed"),
    ({"logit_bias": {"8192": 1}}, "logit_bias"),
    ({"logit_bias": {"5": 101}}, "logit_bias"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"extra_body": {"top_k": -2}}, "top_k"),
    ({"extra_body": {"min_p": 1.5}}, "min_p"),
    ({"extra_body": {"min_tokens": 6}}, "min_tokens"),
    ({"extra_body": {"repetition_penalty": 0}}, "repetition_penalty"),
    ({"extra_body": {"stop_token_ids": [8192]}}, "stop_token_ids"),
    ({"extra_body": {"guided_anything": "a+"}}, "guided_anything"),
    ({"extra_body": {"guided_regex": "(?=a)b"}}, "guided_regex"),
    ({"extra_body": {"guided_json": {"type": "array", "uniqueItems": True}}}, "guided_json"),
    ({"extra_body": {"guided_regex": "a+"}, "stop": "b"}, "stop"),
    ({"extra_body": {"best_of": 3}}, "best_of"),
]
IMAGE = {"type": "image_url", "image_url": {"url": "https://example.org/cat.png"}}
CHAT_ONLY = [
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "user", "content": [IMAGE]}]}, "messages[0].content[0].type"),
    ({"top_logprobs": 3}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"response_format": {"type": "json_objects"}}, "response_format"),
    ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
]
COMPLETIONS_ONLY = [
    ({"prompt": ""}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [8192]}, "prompt"),
    ({"prompt": ["a", ""]}, "prompt[1]"),
    ({"logprobs": 21}, "logprobs"),
    ({"suffix": "end"}, "suffix"),
]
UNSUPPORTED = ("guided_anything", "tools", "suffix", "messages[0].content[0].type")
CONSTRAINED = ("guided_regex", "guided_json", "response_format")


@pytest.fixture(scope="module")
def server(real_server):
    return real_server


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
        yield client


def chat(client, **fields):
    return client.chat.completions.create(**{"model": "demo", "messages": user("Hi"), "max_tokens": 5, **fields})


def completion(client, **fields):
    return client.completions.create(**{"model": "demo", "prompt": "Hi", "max_tokens": 5, **fields})


def assert_helpful(error, status, param, code=None):
    """One sentence that names the field, in OpenAI's object, with an id to look for in a log."""
    assert (error.status_code, error.param, error.code) == (status, param, code)
    assert set(error.body) == {"message", "type", "param", "code"}
    message = error.body["message"]
    assert 10 < len(message) <= 500
    assert "\n" not in message
    assert param is None or param.split("[")[0] in message
    assert error.request_id


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("ask", "fields", "param"),
    [(ask, *case) for ask in (chat, completion) for case in BAD]
    + [(chat, *case) for case in CHAT_ONLY]
    + [(completion, *case) for case in COMPLETIONS_ONLY],
)
def test_bad_fields(client, ask, fields, param, stream):
    if stream and "stream_options" in fields:
        return
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, stream=stream, **fields)
    code = "unsupported_field" if param in UNSUPPORTED else None
    if param in CONSTRAINED or "guided_regex" in fields.get("extra_body", ()):
        code = "constraint_refused"
    assert_helpful(caught.value, 400, param, code)
    assert caught.value.type == "invalid_request_error"


@pytest.mark.parametrize("stream", [False, True])
def test_too_long_prompts(client, stream):
    for ask, fields in (
        (completion, {"prompt": [300] * 4096}),
        (completion, {"prompt": "a b " * 4096}),
        (chat, {"messages": user("a b " * 4096)}),
    ):
        with pytest.raises(openai.BadRequestError) as caught:
            ask(client, stream=stream, **fields)
        assert_helpful(caught.value, 400, None, "context_length_exceeded")
        assert "4096" in caught.value.message


@pytest.mark.parametrize("ask", [chat, completion])
def test_unknown_model(client, ask):
    with pytest.raises(openai.NotFoundError) as caught:
        ask(client, model="gpt-4")
    assert_helpful(caught.value, 404, "model", "model_not_found")
    assert caught.value.type == "not_found_error"


def test_unknown_route(client):
    with pytest.raises(openai.NotFoundError):
        client.embeddings.create(model="demo", input="Hi")


def test_more_choices_than_the_server_takes():
    with (
        LiveServer(max_running_requests=2, max_queue_size=1) as server,
        openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client,
    ):
        with pytest.raises(openai.BadRequestError) as caught:
            chat(client, n=4)
        assert_helpful(caught.value, 400, "n")
        stream = chat(client, n=3, max_tokens=3000, stream=True, extra_body={"ignore_eos": True})
        next(stream)
        with pytest.raises(openai.RateLimitError) as caught:
            chat(client)
        assert_helpful(caught.value, 429, None, "queue_full")
        assert int(caught.value.response.headers["retry-after"]) >= 1
        stream.close()
        # The client comes back by itself, as the header tells it to.
        assert chat(client.with_options(max_retries=5)).choices


def test_keys():
    with LiveServer(api_key=["first-key", "second-key"]) as server:
        for key in ("wrong-key", "first-ke", "none"):
            with openai.OpenAI(base_url=server.url + "/v1", api_key=key, max_retries=0) as client:
                with pytest.raises(openai.AuthenticationError) as caught:
                    chat(client)
                assert_helpful(caught.value, 401, None, "invalid_api_key")
                assert "first-key" not in str(caught.value.body)
                with pytest.raises(openai.AuthenticationError):
                    client.models.list()
        for key in ("first-key", "second-key"):
            with openai.OpenAI(base_url=server.url + "/v1", api_key=key, max_retries=0) as client:
                assert chat(client).choices
                assert client.models.list().data[0].id == "demo"
        assert server.request("/health")[0] == 200


def test_strict_servers_name_the_unknown_field():
    with (
        LiveServer(strict_params=True) as server,
        openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client,
    ):
        with pytest.raises(openai.BadRequestError) as caught:
            chat(client, extra_body={"temprature": 1})
        assert_helpful(caught.value, 400, "temprature", "unknown_field")
        assert chat(client, user="me", metadata={"a": "b"}, store=False).choices
