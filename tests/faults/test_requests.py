"""Rows 1 to 24 of the fault table: bad bodies, bad fields and their limits, over HTTP, beside a running neighbour.

What each value means to the parsers is tested in tests/server; here it is the whole server that must answer, harm
nobody and leak nothing.
"""

import contextlib
import json
import select
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.faults.asking import (
    ACCEPTED,
    BOTH_ROUTES,
    CHAT,
    COMPLETIONS,
    MODEL_LEN,
    VOCAB,
    ask,
    assert_error,
    refused,
    refused_values,
    say,
    text_of,
    undisturbed,
)
from tests.support.live import LiveServer, completion_text, fake_command

pytestmark = pytest.mark.usefixtures("beside")


def refused_body(server: LiveServer, raw: bytes, status: int = 400, **headers: str) -> dict[str, Any]:
    return assert_error(server.request(COMPLETIONS, raw, headers=headers), status)


def test_row_01_not_json(server):
    whole = json.dumps({"model": "demo", "prompt": "Hello", "max_tokens": 4}).encode()
    for raw in (b"not json", whole[:-1], whole[:20], whole + b"}", b"[1, 2]", b"null", b'"text"', b"\x00\x01\x02"):
        assert refused_body(server, raw)["type"] == "invalid_request_error"


def test_row_02_content_type_and_empty_body(server):
    refused_body(server, b"")
    refused_body(server, b" \n ")
    whole = json.dumps({"model": "demo", "prompt": "Hello", "max_tokens": 1}).encode()
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"):
        assert_error(server.request(COMPLETIONS, whole, headers={"Content-Type": kind}), 415)
    kind = "application/json; charset=utf-8"
    assert server.request(COMPLETIONS, whole, headers={"Content-Type": kind})[0] == 200


def test_row_03_body_over_the_limit(server):
    before = server.rss()
    bodies = [
        (b"Content-Length: 10000000000\r\n", b"x" * 65536),
        (b"Transfer-Encoding: chunked\r\n", b"10000\r\n" + b"x" * 65536 + b"\r\n"),
    ]
    with ThreadPoolExecutor(len(bodies)) as pool:
        assert list(pool.map(lambda body: send_until_refused(server, *body), bodies)) == [413, 413]
    assert server.rss() - before < 64 * 2**20


FLOOD = 256 * 2**20


def send_until_refused(server: LiveServer, framing: bytes, block: bytes) -> int:
    """Send an endless body, answer or not, until the server closes the connection; returns the status."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as peer:
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        peer.sendall(head + framing + b"\r\n")
        answer = b""
        deadline, sent = time.monotonic() + 18, 0
        with contextlib.suppress(ConnectionError):
            while time.monotonic() < deadline:
                peer.sendall(block)
                sent += len(block)
                time.sleep(0.005 * (sent > FLOOD))  # in the end it is enough that it never ends
                if select.select([peer], [], [], 0.0)[0]:
                    answer += peer.recv(65536)
        assert time.monotonic() < deadline, "the server went on reading"
    return int(answer.split()[1])


def test_row_04_hostile_json(server):
    for raw in (
        b'{"prompt": ' + b"[" * 10_000 + b"]" * 10_000 + b"}",
        b'{"prompt": "x", "seed": ' + b"1" * 10**6 + b"}",
        b'{"prompt": "x", "n": 1, "n": 2}',
        b'{"prompt": "x", "logit_bias": {"1": 1, "1": 2}}',
        b"[" * 10**6,
        b'{"prompt": "x", "a": [' + b"{}," * 300_000 + b"{}]}",
    ):
        refused_body(server, raw)


def test_row_05_text_that_is_not(server):
    refused_body(server, b'{"model": "demo", "prompt": "\xff\xfe"}')
    refused_body(server, b'{"model": "demo", "prompt": "\\ud800"}')
    refused_body(server, b'{"model": "demo", "prompt": "a", "stop": ["\\udfff"]}')
    for prompt in ("a\0b", "\0", "\u202e\uffff\U0010ffff"):
        assert ask(server, COMPLETIONS, prompt=prompt)[0] == 200


def test_row_06_missing_prompt_or_messages(server):
    refused_values(server, COMPLETIONS, "prompt", [None, [], {}, 5, True])
    refused_values(server, CHAT, "messages", [None, [], {}, "hi", 5])
    for path, param in ((COMPLETIONS, "prompt"), (CHAT, "messages")):
        assert assert_error(server.request(path, {"model": "demo"}), 400)["param"] == param


def test_row_07_unknown_role_and_content(server):
    def message(role: Any, content: Any) -> list[dict[str, Any]]:
        return [{"role": role, "content": content}]

    image = {"type": "image_url", "image_url": {"url": "http://localhost:1/x.png"}}
    for messages, param in (
        (message("robot", "x"), "messages[0].role"),
        (message(None, "x"), "messages[0].role"),
        (message("user", 5), "messages[0].content"),
        (message("user", None), "messages[0].content"),
        (message("user", [image]), "messages[0].content[0].type"),
        (message("user", [{"type": "text"}]), "messages[0].content[0].text"),
        (["x"], "messages[0]"),
    ):
        assert refused(server, CHAT, messages=messages)["param"] == param


def test_row_08_bad_token_ids(server):
    for tokens in ([-1], [VOCAB], [2**63], [2**31], [1, 2.0], [True], [1, "2"], [None], [[1], [VOCAB]], [[1], [1.5]]):
        assert refused(server, COMPLETIONS, prompt=tokens)["param"].startswith("prompt")
    assert ask(server, COMPLETIONS, prompt=[VOCAB - 1, 5, 6])[0] == 200


def test_row_09_empty_prompt(server):
    assert refused(server, COMPLETIONS, prompt="")["param"] == "prompt"
    assert refused(server, COMPLETIONS, prompt=["a", ""])["param"] == "prompt[1]"
    assert refused(server, COMPLETIONS, prompt=[[]])["param"] == "prompt[0]"


def test_row_10_prompt_longer_than_the_model(server):
    for length in (MODEL_LEN, MODEL_LEN + 7, 50_000):
        error = refused(server, COMPLETIONS, prompt=[9] * length)
        assert error["code"] == "context_length_exceeded"
        assert str(MODEL_LEN) in error["message"]
        assert str(length) in error["message"]
    words = " word" * (MODEL_LEN + 100)
    for path, fields in ((COMPLETIONS, {"prompt": words}), (CHAT, {"messages": [{"role": "user", "content": words}]})):
        error = refused(server, path, **fields)
        assert error["code"] == "context_length_exceeded"
        assert str(MODEL_LEN) in error["message"]


def test_row_11_answer_longer_than_the_room_is_cut(server):
    prompt = [9] * (MODEL_LEN - 5)
    for stream in (False, True):
        answer = ask(server, COMPLETIONS, prompt=prompt, max_tokens=50, ignore_eos=True, stream=stream, temperature=0)
        assert text_of(answer)[1] == "length"
    status, body = ask(server, COMPLETIONS, prompt=prompt, max_tokens=50, ignore_eos=True)
    assert (status, body["usage"]["completion_tokens"]) == (200, 5)


def test_row_12_prompt_larger_than_the_kv_cache():
    with LiveServer(fake_command(kv_tokens=256)) as small, undisturbed(small):
        error = refused(small, COMPLETIONS, prompt=[9] * 257, max_tokens=1)
        assert error["code"] == "context_length_exceeded"
        assert "256" in error["message"]
        assert "257" in error["message"]


@BOTH_ROUTES
def test_row_13_max_tokens_out_of_range(server, path):
    refused_values(server, path, "max_tokens", [0, -1, 10**12, "5", 1.5, True, [5]])
    refused_values(server, path, "max_completion_tokens", [0, -1, 10**12, "5"])
    if path == CHAT:  # null means all the room there is, so leave little
        long = [{"role": "user", "content": " word" * (MODEL_LEN - 60)}]
        assert (
            ask(server, path, max_tokens=None, messages=long, ignore_eos=True)[1]["usage"]["total_tokens"] == MODEL_LEN
        )
    else:
        assert ask(server, path, max_tokens=None, ignore_eos=True)[1]["usage"]["completion_tokens"] == 16


@BOTH_ROUTES
def test_row_14_temperature(server, path):
    refused_values(server, path, "temperature", [-0.1, 2.1, 1e308, "1", True, [1]])
    for literal in ("NaN", "Infinity", "-Infinity", "1e999"):
        raw = json.dumps({**ACCEPTED[path], "temperature": 0}).replace('"temperature": 0', f'"temperature": {literal}')
        assert_error(server.request(path, raw.encode()), 400)
    greedy = text_of(ask(server, path, temperature=0, max_tokens=8))
    assert text_of(ask(server, path, temperature=1e-45, max_tokens=8)) == greedy


@BOTH_ROUTES
def test_row_15_top_p_and_min_p(server, path):
    refused_values(server, path, "top_p", [0, 1.0000001, -1, "1"])
    refused_values(server, path, "min_p", [-0.1, 1.1, "0"])
    for name in ("top_p", "min_p"):
        raw = json.dumps({**ACCEPTED[path], name: 0.5}).replace("0.5", "NaN").encode()
        assert_error(server.request(path, raw), 400)
    assert ask(server, path, top_p=1, min_p=0)[0] == 200


@BOTH_ROUTES
def test_row_16_top_k(server, path):
    refused_values(server, path, "top_k", [-2, 1.5, "1", True])
    for value in (0, -1, 1, VOCAB, 10**9):
        assert ask(server, path, top_k=value)[0] == 200


@BOTH_ROUTES
def test_row_17_n(server, path):
    before = server.rss()
    refused_values(server, path, "n", [0, -1, 129, 10**9, 2**62, 1.5, "2"])
    assert server.rss() - before < 32 * 2**20
    status, body = ask(server, path, n=3)
    assert (status, [choice["index"] for choice in body["choices"]]) == (200, [0, 1, 2])


def test_row_18_best_of_and_logprobs(server):
    refused_values(server, COMPLETIONS, "best_of", [0, 2, 129, 10**9, "1"])
    refused_values(server, COMPLETIONS, "logprobs", [-1, 21, 10**9, 1.5, "1"])
    refused_values(server, CHAT, "logprobs", [1, "true"])
    for value in (-1, 21, 10**9, 1.5, "1"):
        assert refused(server, CHAT, logprobs=True, top_logprobs=value)["param"] == "top_logprobs"
    assert refused(server, CHAT, top_logprobs=3)["param"] == "top_logprobs"
    status, body = ask(server, CHAT, logprobs=True, top_logprobs=20)
    assert (status, len(body["choices"][0]["logprobs"]["content"][0]["top_logprobs"])) == (200, 20)


@BOTH_ROUTES
def test_row_19_stop(server, path):
    refused_values(server, path, "stop", ["", [""], list("abcde"), "x" * 900_000, 5, {"a": 1}])
    assert refused(server, path, stop=["a", 5])["param"] == "stop[1]"
    assert_error(server.request(path, {**ACCEPTED[path], "stop": "x" * 10_000_000}), 413)


@BOTH_ROUTES
def test_row_20_stop_string_across_tokens(server, path):
    fields = {"max_tokens": 24, "temperature": 0, "ignore_eos": True}
    whole, _ = text_of(ask(server, path, **fields))
    for start, length in ((5, 4), (9, 11), (len(whole) // 2, 3)):
        stop = whole[start : start + length]
        cut = whole[: whole.index(stop)]
        for stream in (False, True):
            assert text_of(ask(server, path, stop=stop, stream=stream, **fields)) == (cut, "stop")
            kept = ask(server, path, stop=["\0never", stop], stream=stream, include_stop_str_in_output=True, **fields)
            assert text_of(kept) == (cut + stop, "stop")


def test_row_20_stop_string_across_a_character(fake_server):
    said = "Hello 😀 wörld, 你好👩‍👩‍👧 the end"
    for stop in ("😀", "ö", "你", "好👩", "👩‍👧", "d, 你好", "\u200d"):
        cut = said[: said.index(stop)]
        answer = ask(fake_server, COMPLETIONS, prompt=say(said), max_tokens=200, stop=stop, stream=True)
        assert text_of(answer) == (cut, "stop")
    for stop in ("\ufffd", "😁", "the end."):
        answer = ask(fake_server, COMPLETIONS, prompt=say(said), max_tokens=200, stop=stop, stream=True)
        assert text_of(answer) == (said, "stop")


@BOTH_ROUTES
def test_row_21_logit_bias(server, path):
    many = {str(token): 1 for token in range(2000)}
    values = [{str(VOCAB): 1}, {"-1": 1}, {"x": 1}, {"5": 101}, {"5": "1"}, {"5": None}, {"9" * 400: 1}, many, [5]]
    refused_values(server, path, "logit_bias", values)
    raw = json.dumps({**ACCEPTED[path], "logit_bias": {"5": 0.5}}).replace("0.5", "NaN").encode()
    assert_error(server.request(path, raw), 400)
    for entries, status in ((70_000, 400), (150_000, 413)):
        huge = {**ACCEPTED[path], "logit_bias": {str(token): 1 for token in range(entries)}}
        assert_error(server.request(path, huge), status)
    assert ask(server, path, logit_bias={"5": -100, str(VOCAB - 1): -1})[0] == 200


@BOTH_ROUTES
def test_row_22_seed(server, path):
    refused_values(server, path, "seed", [2**64, 2**63, -(2**63) - 1, "1", 1.5, True])
    for value in (-1, 0, 2**63 - 1, -(2**63)):
        assert ask(server, path, seed=value, temperature=1)[0] == 200


@BOTH_ROUTES
def test_row_23_penalties(server, path):
    for name in ("presence_penalty", "frequency_penalty"):
        refused_values(server, path, name, [-2.1, 2.1, "1"])
        assert ask(server, path, **{name: -2})[0] == 200
    refused_values(server, path, "repetition_penalty", [0, -1, 1e9, "1"])
    raw = json.dumps({**ACCEPTED[path], "repetition_penalty": 0.5}).replace("0.5", "NaN").encode()
    assert_error(server.request(path, raw), 400)


@BOTH_ROUTES
def test_row_24_unknown_and_constraint_fields(server, path):
    plain = text_of(ask(server, path, temperature=0))
    assert text_of(ask(server, path, temperature=0, wibble=1, user="me", metadata={"a": 1}, store=True)) == plain
    for name, value in (
        ("guided_unheard_of", 1),
        ("guided_decoding_backend", "outlines"),
        ("structured_outputs", {"regex": "a"}),
        ("response_format", {"type": "grammar"}),
        ("tools", [{"type": "function", "function": {"name": "f"}}]),
        ("logits_processors", ["x"]),
        ("bad_words", ["x"]),
        ("allowed_token_ids", [1]),
    ):
        assert refused(server, path, **{name: value})["param"] == name
    assert text_of(ask(server, path, guided_regex="ab{2}")) == ("abb", "stop")
    assert text_of(ask(server, path, guided_choice=["ab", "ab"])) == ("ab", "stop")
    assert text_of(ask(server, path, guided_regex=None, response_format={"type": "text"}, temperature=0)) == plain


def test_row_24_ignored_fields_are_told(server):
    body = {**ACCEPTED[COMPLETIONS], "wibble": 1, "wobble": 2, "odd\r\nname": 3, "user": "me"}
    for stream in (False, True):
        status, _, headers = server.request(COMPLETIONS, {**body, "stream": stream})
        assert status == 200
        assert headers["x-ignored-fields"] == "wibble,wobble"
    assert "x-ignored-fields" not in server.request(COMPLETIONS, ACCEPTED[COMPLETIONS])[2]


def test_the_neighbour_streams(server):
    """The fixture itself: a plain stream beside the neighbour has an answer and an end."""
    assert completion_text(server.stream(COMPLETIONS, {**ACCEPTED[COMPLETIONS], "max_tokens": 5}))
