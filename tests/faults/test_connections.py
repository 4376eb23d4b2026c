"""Clients that leave, do not read, or send slowly. Each test is named after its row of the fault table."""

import json
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.faults.conftest import unharmed
from tests.faults.sockets import LONG, connect, disconnects, raw_request, read_to_end, unread_stream
from tests.support.live import (
    LiveServer,
    OpenStream,
    completion_text,
    fake_answer,
    fake_command,
    until,
)

# Row 35: the client leaves.


@pytest.mark.parametrize("stream", [True, False])
def test_row_35_client_leaves_during_decode(server, beside, stream):
    before = disconnects(server)
    connection = connect(server)
    connection.sendall(raw_request({**LONG, "stream": stream, "n": 3}))
    if stream:
        assert b"200 OK" in connection.recv(4096)
    until(lambda: server.gauges()[0] >= 3, what="three running choices")
    connection.close()
    until(lambda: server.gauges()[0] <= 1, 1.0, "only the neighbour running")
    assert disconnects(server) == before + 1


def test_row_35_client_leaves_between_events(server, beside):
    stream = OpenStream(server, LONG)
    assert len(stream.read(5)) == 5
    stream.close()
    until(lambda: server.gauges()[0] <= 1, 1.0, "only the neighbour running")


@pytest.mark.parametrize("stream", [True, False])
def test_row_35_client_leaves_during_prefill(fake_server, beside, stream):
    connection = connect(fake_server)
    connection.sendall(raw_request({**LONG, "prompt": "@fake:slow_prefill:60", "stream": stream}))
    until(lambda: fake_server.gauges()[0] >= 2, what="a second running request")
    connection.close()
    until(lambda: fake_server.gauges()[0] <= 1, 1.0, "only the neighbour running")


@pytest.mark.parametrize("stream", [True, False])
def test_row_35_client_leaves_in_the_queue(narrow_server, stream):
    holder = OpenStream(narrow_server, LONG)
    holder.read(1)
    connection = connect(narrow_server)
    connection.sendall(raw_request({**LONG, "stream": stream}))
    until(lambda: narrow_server.gauges()[:2] == (1, 1), what="one running, one waiting")
    connection.close()
    until(lambda: narrow_server.gauges()[:2] == (1, 0), 1.0, "an empty queue")
    assert completion_text(holder.read(20))
    holder.close()
    until(lambda: narrow_server.gauges() == (0, 0, 0), what="an idle engine")


def test_row_35_client_leaves_before_its_headers_end(server, beside):
    for part in (b"", b"P", b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Le", raw_request(LONG)[:-20]):
        connection = connect(server)
        connection.sendall(part)
        connection.close()


def test_row_35_client_leaves_with_a_reset(server, beside):
    connection = connect(server)
    connection.sendall(raw_request({**LONG, "stream": True}))
    connection.recv(1000)
    # Linger 0: close() sends a reset instead of an end of file.
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    connection.close()
    until(lambda: server.gauges()[0] <= 1, 1.0, "only the neighbour running")


def test_row_35_many_clients_leave_at_random_moments(server, beside):
    def visit(number):
        connection = connect(server)
        connection.sendall(raw_request({**LONG, "stream": number % 2 == 0, "n": 1 + number % 3}))
        time.sleep((number * 7919 % 100) / 400)
        connection.close()

    with ThreadPoolExecutor(12) as pool:
        list(pool.map(visit, range(60)))


# Row 36: the client does not read.


def test_row_36_slow_reader(fake_server, beside):
    readers = [unread_stream(fake_server) for _ in range(3)]
    until(lambda: fake_server.gauges()[0] >= 4, what="three unread streams and the neighbour")
    memory = fake_server.rss()
    until(lambda: fake_server.gauges()[0] <= 1, 12.0, "an end of the unread streams")
    assert fake_server.rss() - memory < 64 * 2**20
    for reader in readers:
        assert not read_to_end(reader).endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
        reader.close()


def test_row_36_reader_that_pauses_gets_everything(fake_server, beside):
    stream = OpenStream(fake_server, {**LONG, "max_tokens": 500})
    text = completion_text(stream.read(3))
    time.sleep(1.0)
    text += completion_text(stream.rest())
    stream.close()
    assert text == fake_answer(LONG["prompt"], 500)


def test_row_36_unread_whole_answers_do_not_hold_connections(fake_server, beside):
    descriptors = fake_server.open_fds()
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.connect(("127.0.0.1", fake_server.port))
    body = {**LONG, "max_tokens": 400, "logprobs": 20}
    connection.sendall(raw_request(body, extra="Connection: close\r\n"))
    until(lambda: fake_server.gauges()[0] >= 2, what="the request running")
    until(lambda: fake_server.gauges()[0] <= 1, 10.0, "the request done")
    until(lambda: fake_server.open_fds() <= descriptors, 10.0, "the connection closed")
    connection.close()


# Row 37: connections that only cost.


def test_row_37_slow_headers(server, beside):
    started = time.monotonic()
    connections = [connect(server) for _ in range(20)]

    def drip():
        for byte in b"GET /health HTTP/1.1\r\nX: " + b"a" * 100:
            for connection in connections:
                try:
                    connection.send(bytes([byte]))
                except OSError:
                    return
            time.sleep(0.1)

    dripping = threading.Thread(target=drip, daemon=True)
    dripping.start()
    for connection in connections:
        assert b" 408 " in read_to_end(connection).split(b"\r\n")[0]
        connection.close()
    assert time.monotonic() - started < 5
    dripping.join()


def test_row_37_idle_connections(server, beside):
    connections = [connect(server) for _ in range(300)]
    assert server.request("/health")[0] == 200
    started = time.monotonic()
    for connection in connections:
        read_to_end(connection)
        connection.close()
    assert time.monotonic() - started < 6


def test_row_37_idle_after_an_answer(server, beside):
    connection = connect(server)
    connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
    started = time.monotonic()
    answer = read_to_end(connection)
    assert answer.startswith(b"HTTP/1.1 200 OK\r\n")
    assert answer.endswith(b'{"status":"ok"}')
    assert time.monotonic() - started < 4
    connection.close()


@pytest.mark.parametrize(
    "head",
    [
        b"X-Long: " + b"a" * 20000,
        b"\r\n".join(b"X-%d: %s" % (i, b"a" * 1000) for i in range(20)),
        b"\r\n".join(b"X-%d: a" % i for i in range(200)),
    ],
)
def test_row_37_headers_too_large(server, beside, head):
    connection = connect(server)
    connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n" + head + b"\r\n\r\n")
    answer = read_to_end(connection)
    assert b" 431 " in answer.split(b"\r\n")[0]
    assert json.loads(answer.split(b"\r\n\r\n")[1])["error"]["type"] == "invalid_request_error"
    connection.close()


def test_row_37_header_without_end(server, beside):
    memory = server.rss()
    connection = connect(server)
    connection.sendall(b"GET /health HTTP/1.1\r\nX: ")
    sent = 0
    try:
        while sent < 256 * 2**20:
            sent += connection.send(b"a" * 65536)
    except OSError:
        pass
    # What the kernel's buffers took before the client saw the connection closed.
    assert sent < 64 * 2**20
    assert server.rss() - memory < 8 * 2**20
    connection.close()


def test_row_37_address_too_long(server, beside):
    connection = connect(server)
    connection.sendall(b"GET /" + b"a" * 30000 + b" HTTP/1.1\r\nHost: x\r\n\r\n")
    assert b" 431 " in read_to_end(connection).split(b"\r\n")[0]
    connection.close()


def test_row_37_slow_body(server, beside):
    connection = connect(server)
    connection.sendall(raw_request(LONG)[:-20])
    answer = read_to_end(connection)
    assert b" 408 " in answer.split(b"\r\n")[0]
    connection.close()


def test_row_37_connection_cap():
    # The neighbour has a connection, and its first answer lasts, while all others come.
    engine = fake_command(step_seconds=0.05)
    with LiveServer(engine, max_connections=20, header_timeout=2.0) as server, unharmed(server):
        connections = [connect(server) for _ in range(40)]
        refused = 0
        for connection in connections:
            head = read_to_end(connection).split(b"\r\n\r\n")[0].split(b"\r\n")
            refused += b" 503 " in head[0]
            assert (b" 503 " in head[0]) == (b"retry-after: 1" in head)
            connection.close()
        assert refused >= 20
        assert server.request("/health")[0] == 200
