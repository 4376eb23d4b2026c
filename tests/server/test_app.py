"""The whole server against the openai client and raw HTTP; the fake engine behind it makes every answer predictable."""

import gzip
import json
import socket
import threading
import time

import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.support.fake_tokens import expected_text, tokenizer
from tests.support.live import LiveServer, fake_answer, fake_command, summed_samples, until


@pytest.fixture(scope="module")
def server():
    with LiveServer(fake_command(step_seconds=0.001), max_body_mib=0.05, header_timeout=1.0) as live:
        yield live


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
        yield client


FLOOD = 128 * 2**20


def chat_prompt(text):
    """The demo model's chat template, written out."""
    return f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"


def chat_answer(text, count, choice=0):
    return expected_text(tokenizer().encode(chat_prompt(text)).ids, count, choice)


def user(text):
    return [{"role": "user", "content": text}]


def test_completion(client):
    answer = client.completions.create(model="demo", prompt="Hello", max_tokens=7)
    assert answer.choices[0].text == fake_answer("Hello", 7)
    assert answer.choices[0].finish_reason == "length"
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(tokenizer().encode("Hello").ids), 7)


def test_chat(client):
    answer = client.chat.completions.create(model="demo", messages=user("Hi"), max_tokens=9)
    assert answer.choices[0].message.content == chat_answer("Hi", 9)
    assert answer.choices[0].message.role == "assistant"


def test_chat_stream_says_the_same_as_the_whole_answer(client):
    options = {"include_usage": True}
    chunks = list(
        client.chat.completions.create(
            model="demo", messages=user("Hi"), max_tokens=9, stream=True, stream_options=options
        )
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == chat_answer("Hi", 9)
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "length"
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == 9
    assert len({(c.id, c.created, c.model) for c in chunks}) == 1


def test_the_engine_is_told_of_requests_before_their_text_is_tokenized(client):
    def announced(text, **fields):
        answer = client.completions.create(model="demo", prompt=text + "@fake:announced", extra_body=fields)
        return int(answer.choices[0].text)

    before = announced("")
    assert announced("word " * 1000) == before + 1
    client.chat.completions.create(model="demo", messages=user("Hi"), max_tokens=1)
    assert announced("", padding="x" * 40000) == before + 2, "not of one of 40,000 bytes"


@pytest.mark.parametrize("stream", [False, True])
def test_prompts_times_choices_come_prompt_by_prompt(client, stream):
    prompts = ["One", "Two", [300, 301, 302]]
    answer = client.completions.create(model="demo", prompt=prompts, n=2, max_tokens=5, stream=stream)
    texts = dict.fromkeys(range(6), "")
    for part in answer if stream else [answer]:
        for choice in part.choices:
            texts[choice.index] += choice.text
    ids = [tokenizer().encode("One").ids, tokenizer().encode("Two").ids, [300, 301, 302]]
    assert texts == {i: expected_text(ids[i // 2], 5, i % 2) for i in range(6)}


def test_the_end_of_the_sequence_stops(client):
    answer = client.chat.completions.create(model="demo", messages=user("@fake:say:Good day"))
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == ("Good day", "stop")
    assert answer.usage.completion_tokens == len(tokenizer().encode("Good day").ids) + 1


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_ends_the_answer_and_frees_the_engine(server, client, stream):
    text = fake_answer("Stop here", 3000)
    stop = text[60:70]
    answer = client.completions.create(
        model="demo", prompt="Stop here", max_tokens=3000, stop=[stop], stream=stream, extra_body={"ignore_eos": True}
    )
    parts = list(answer) if stream else [answer]
    assert "".join(part.choices[0].text for part in parts) == text[: text.index(stop)]
    assert parts[-1].choices[0].finish_reason == "stop"
    until(lambda: server.gauges() == (0, 0, 0), 1.0, "an idle engine")


def test_logprobs_have_one_entry_a_token(client):
    answer = client.chat.completions.create(
        model="demo", messages=user("Hi"), max_tokens=6, logprobs=True, top_logprobs=3
    )
    content = answer.choices[0].logprobs.content
    assert "".join(entry.token for entry in content) == chat_answer("Hi", 6)
    assert all(len(entry.top_logprobs) == 3 and entry.logprob == -0.25 for entry in content)


def test_echo_scores_the_prompt(client):
    prompt = "Score this prompt"
    answer = client.completions.create(model="demo", prompt=prompt, max_tokens=0, echo=True, logprobs=1)
    choice = answer.choices[0]
    assert choice.text == prompt
    assert "".join(choice.logprobs.tokens) == prompt
    assert choice.logprobs.token_logprobs[0] is None
    assert answer.usage.completion_tokens == 0


@pytest.mark.parametrize("skip", [False, True])
@pytest.mark.parametrize("prompt", ["<|im_start|>Hi<|im_end|>!", [1, 300, 2, 301], "<|im_start|", [2]])
def test_special_tokens_of_an_echoed_prompt_stand_at_their_offsets(client, prompt, skip):
    extra = {"skip_special_tokens": skip, "ignore_eos": True}
    answer = client.completions.create(
        model="demo", prompt=prompt, max_tokens=3, echo=True, logprobs=0, extra_body=extra
    )
    [choice] = answer.choices
    shown = isinstance(prompt, str) or not skip
    assert ("<|im_" in choice.text) is shown
    pairs = list(zip(choice.logprobs.tokens, choice.logprobs.text_offset, strict=True))
    kept = [(token, offset) for token, offset in pairs if shown or not token.startswith("<|im_")]
    assert "".join(token for token, _ in kept) == choice.text
    assert all(choice.text.startswith(token, offset) for token, offset in kept)


@pytest.mark.parametrize("stream", [False, True])
def test_echo_comes_before_the_answer(client, stream):
    answer = client.completions.create(model="demo", prompt="Echo", max_tokens=4, echo=True, stream=stream)
    text = "".join(part.choices[0].text for part in (answer if stream else [answer]))
    assert text == "Echo" + fake_answer("Echo", 4)


def test_errors_are_the_clients_classes(client):
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="other", prompt="x")
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="demo", prompt="x", temperature=5)
    assert caught.value.param == "temperature"
    with pytest.raises(openai.InternalServerError):
        client.completions.create(model="demo", prompt="@fake:error:invalid_logits")
    stream = client.completions.create(model="demo", prompt="@fake:error_after:2:invalid_logits", stream=True)
    with pytest.raises(openai.APIError, match="not numbers"):
        list(stream)


def test_models(client, server):
    assert [model.id for model in client.models.list()] == ["demo"]
    assert client.models.retrieve("demo").owned_by == "bladellm"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("org/other")


def test_tokenize_and_back(server):
    _, answer = server.json("/tokenize", {"prompt": "Hello world"})
    assert answer["tokens"] == tokenizer().encode("Hello world").ids
    assert answer["count"] == len(answer["tokens"])
    assert server.json("/detokenize", {"tokens": answer["tokens"]})[1] == {"prompt": "Hello world"}
    _, answer = server.json("/tokenize", {"messages": user("Hi")})
    assert answer["tokens"] == tokenizer().encode(chat_prompt("Hi")).ids
    assert server.json("/detokenize", {"tokens": [8192]})[0] == 400
    assert server.json("/tokenize", {})[1]["error"]["param"] == "prompt"


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"])
def test_only_json_bodies_within_the_limit(server, path):
    assert server.request(path, b"{}", headers={"Content-Type": "text/plain"})[0] == 415
    body = gzip.compress(b'{"prompt": "x"}')
    status, answer, _ = server.request(path, body, headers={"Content-Encoding": "gzip"})
    assert status == 415
    assert "Content-Encoding" in json.loads(answer)["error"]["message"]
    big = json.dumps({"prompt": "x" * 60000}).encode()
    status, body, headers = server.request(path, big)
    assert (status, headers["connection"]) == (413, "close")
    assert json.loads(body)["error"]["type"] == "invalid_request_error"


def test_endless_bodies_end_at_the_limit(server):
    connections, memory = [], server.rss()
    for path in ("/v1/completions", "/tokenize"):
        connection = socket.create_connection(("127.0.0.1", server.port), timeout=10)
        head = "HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
        connection.sendall(f"POST {path} {head}".encode())
        connections.append(connection)

    def flood(connection):
        sent = 0
        try:
            while True:
                connection.sendall(b"1000\r\n" + b"x" * 4096 + b"\r\n")
                sent += 4096
                time.sleep(0.005 * (sent > FLOOD))  # in the end it is enough that it never ends
        except OSError:
            return

    flooding = [threading.Thread(target=flood, args=[connection]) for connection in connections]
    for thread in flooding:
        thread.start()
    for connection, thread in zip(connections, flooding, strict=True):
        assert connection.recv(4096).startswith(b"HTTP/1.1 413 ")
        thread.join(30)
        assert not thread.is_alive(), "the connection was not closed"
        connection.close()
    assert server.rss() - memory < 16 * 2**20


def test_trailers_without_end(server):
    connection = socket.create_connection(("127.0.0.1", server.port), timeout=10)
    head = b"POST /v1/completions HTTP/1.1\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
    connection.sendall(head + b"2\r\n{}\r\n0\r\nX: ")
    sent = 0
    try:
        while sent < 256 * 2**20:
            sent += connection.send(b"a" * 65536)
    except OSError:
        pass
    assert sent < 64 * 2**20
    connection.close()


@pytest.mark.parametrize(
    ("given", "echoed"),
    [("abc-123", True), ("a" * 128, True), ("a" * 129, False), ("a b", False), ("ä", False), ("", False)],
)
def test_request_ids(server, given, echoed):
    body = {"model": "demo", "prompt": "x", "max_tokens": 1}
    answers = [
        server.request("/v1/completions", body, headers={"X-Request-Id": given}),
        server.request("/v1/completions", {**body, "stream": True}, headers={"X-Request-Id": given}),
        server.request("/v1/completions", {"prompt": 5}, headers={"X-Request-Id": given}),
        server.request("/health", headers={"X-Request-Id": given}),
    ]
    found = [headers["x-request-id"] for _, _, headers in answers]
    assert all((one == given) is echoed and one for one in found)
    if not echoed:
        assert len(set(found)) == 4


def test_ignored_fields_are_told(server):
    body = {"model": "demo", "prompt": "x", "max_tokens": 1, "frobnicate": 1, "user": "u"}
    for stream in (False, True):
        status, _, headers = server.request("/v1/completions", {**body, "stream": stream})
        assert (status, headers["x-ignored-fields"]) == (200, "frobnicate")


def test_wrong_methods(server):
    status, body, headers = server.request("/v1/completions", method="GET")
    assert (status, headers["allow"]) == (405, "POST")
    assert json.loads(body)["error"]["type"] == "invalid_request_error"
    assert server.request("/health", {}, method="POST")[0] == 405


def test_small_routes(server):
    assert server.request("/")[1] == b"hello"
    assert server.json("/version")[0] == 200
    status, document = server.json("/openapi.json")
    assert status == 200
    assert {"/tokenize", "/v1/models", "/v1/completions", "/v1/chat/completions"} <= document["paths"].keys()
    assert server.request("/metric")[1].startswith(b"# HELP")


def test_not_http(server):
    connection = socket.create_connection(("127.0.0.1", server.port), timeout=10)
    connection.sendall(b"\x16\x03\x01\x02 this is not HTTP\r\n\r\n")
    answer = connection.recv(4096)
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert json.loads(answer.split(b"\r\n\r\n")[1])["error"]["type"] == "invalid_request_error"
    connection.close()


def test_pipelined_requests_are_answered_in_order(server):
    connection = socket.create_connection(("127.0.0.1", server.port), timeout=10)
    bodies = [json.dumps({"prompt": f"Number {i}", "max_tokens": 3}).encode() for i in range(3)]
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    connection.sendall(b"".join(head % len(body) + body for body in bodies))
    received = b""
    while received.count(b'"usage"') < 3:
        received += connection.recv(65536)
    places = [received.index(json.dumps(fake_answer(f"Number {i}", 3)).encode()) for i in range(3)]
    assert places == sorted(places)
    connection.close()


def test_metrics_are_read_as_prometheus_reads_them(server):
    text, wanted = server.request("/metrics")[1].decode(), {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if "le" not in sample.labels:
                wanted[sample.name] = wanted.get(sample.name, 0.0) + sample.value
    assert summed_samples(text) == wanted
    assert len(wanted) > 50


def test_metrics_count_what_happened(server):
    before = server.metrics()
    server.request("/v1/completions", {"model": "demo", "prompt": "Count", "max_tokens": 11, "n": 2})
    server.request("/v1/completions", {"model": "demo", "prompt": "Count", "n": 0})
    after = server.metrics()

    def grown(name):
        return after["blade_llm:" + name] - before.get("blade_llm:" + name, 0)

    length = len(tokenizer().encode("Count").ids)
    assert grown("generation_tokens_total") == 22
    assert grown("prompt_tokens_total") == 2 * length
    assert grown("request_success_total") == 2
    assert grown("requests_rejected_total") == 1
    assert grown("time_to_first_token_seconds_count") == 2
    assert grown("inter_token_latency_seconds_count") == 20
    assert grown("request_generation_tokens_sum") == 22
    assert grown("request_prompt_tokens_sum") == 2 * length
    assert grown("e2e_request_latency_seconds_sum") >= grown("request_decode_time_seconds_sum") > 0


def test_an_engine_in_a_thread_of_the_server():
    with LiveServer("real", disable_frontend_multiprocessing=True, device="cpu", kv_cache_gib=0.02) as server:
        assert server.engine_pid is None
        body = {"model": "demo", "prompt": "Once upon", "max_tokens": 5, "ignore_eos": True}
        status, answer = server.json("/v1/completions", body)
        assert (status, answer["usage"]["completion_tokens"]) == (200, 5)
        assert server.stop() == 0
