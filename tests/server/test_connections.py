"""What clients do with their connections: pipelining, leaving, asking for other protocols."""

import json
import socket

import pytest

from tests.support.live import LiveServer, fake_answer, fake_command, until

UPGRADE = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAEAAEAAAAIAAAAA\r\n"
ROUTE = b"/v1/completions"


@pytest.fixture(scope="module")
def server():
    with LiveServer(fake_command(step_seconds=0.01)) as live:
        yield live


def request(prompt, max_tokens=3, headers=b"", **fields):
    body = json.dumps({"prompt": prompt, "max_tokens": max_tokens, **fields}).encode()
    head = b"POST %b HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n%b\r\n"
    return head % (ROUTE, len(body), headers) + body


def connect(server):
    return socket.create_connection(("127.0.0.1", server.port), timeout=10)


def read_answers(connection, count):
    received = b""
    while received.count(b'"usage"') < count and b"error" not in received:
        part = connection.recv(65536)
        assert part, received
        received += part
    return received


@pytest.mark.parametrize("size", [1 << 20, 100])
def test_a_wish_for_http_2_is_ignored_and_the_body_read(server, size):
    """Java's client sends it with the first request of each connection, and curl with --http2."""
    data = request("First", headers=UPGRADE) + request("Second") + request("Third", headers=UPGRADE)
    with connect(server) as connection:
        for start in range(0, len(data), size):
            connection.sendall(data[start : start + size])
        received = read_answers(connection, 3)
    assert received.count(b"HTTP/1.1 200 ") == 3
    places = [received.index(json.dumps(fake_answer(word, 3)).encode()) for word in ("First", "Second", "Third")]
    assert places == sorted(places)


def test_a_body_is_no_request_whatever_it_holds(server):
    inner = request("Inner")
    headers = b"Content-Type: application/json\r\nContent-Length: %d\r\nConnection: upgrade\r\nUpgrade: x\r\n\r\n"
    with connect(server) as connection:
        connection.sendall(b"POST /tokenize HTTP/1.1\r\nHost: x\r\n" + headers % len(inner) + inner)
        connection.sendall(request("Outer", headers=b"Connection: close\r\n"))
        received = b"".join(iter(lambda: connection.recv(65536), b""))
    assert received.count(b"HTTP/1.1 ") == 2
    assert received.startswith(b"HTTP/1.1 400 ")
    assert json.dumps(fake_answer("Outer", 3)).encode() in received


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_ends_its_pipelined_requests(server, stream):
    before = server.metrics()
    with connect(server) as connection:
        connection.sendall(request("Leave", 4000, stream=stream) + request("Next", 4000, stream=stream))
        until(lambda: server.metrics()["blade_llm:num_requests_running"], what="a running request")
    until(lambda: not server.metrics()["blade_llm:num_requests_open"], what="the end of the requests")
    left = "blade_llm:client_disconnects_total"
    assert server.metrics()[left] == before[left] + 1
    assert "Traceback" not in server.log()
