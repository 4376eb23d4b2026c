"""Faults of connections, load, processes and surroundings. Each test is named after its row of the fault table."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import aiohttp
import pytest

from tests.faults.conftest import unharmed, warm_up
from tests.support.live import (
    LiveServer,
    OpenStream,
    completion_text,
    events,
    fake_answer,
    fake_command,
    until,
)

LONG = {"model": "demo", "prompt": "A long story", "max_tokens": 3500, "ignore_eos": True, "temperature": 0}
SHORT = {"model": "demo", "prompt": "A short story", "max_tokens": 4, "ignore_eos": True, "temperature": 0}


def raw_request(body, path="/v1/completions", extra=""):
    payload = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n{extra}"
    return head.encode() + b"Content-Length: %d\r\n\r\n" % len(payload) + payload


def connect(server):
    return socket.create_connection(("127.0.0.1", server.port), timeout=10)


def read_to_end(connection):
    """Everything until the server closes the connection; a reset ends it too."""
    parts = []
    try:
        while part := connection.recv(65536):
            parts.append(part)
    except ConnectionResetError:
        pass
    return b"".join(parts)


def disconnects(server):
    return server.metrics()["blade_llm:client_disconnects_total"]


@pytest.fixture(scope="module")
def narrow_server():
    """One slot, a queue of three, and a second's patience."""
    with LiveServer(fake_command(), max_running_requests=1, max_queue_size=3, max_queue_time=1.0) as server:
        yield server


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


def unread_stream(server):
    """A stream of fat events to a client with a small buffer, which never reads."""
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.connect(("127.0.0.1", server.port))
    connection.sendall(raw_request({**LONG, "logprobs": 20, "stream": True}))
    return connection


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
    with LiveServer(fake_command(), max_connections=20, header_timeout=2.0) as server, unharmed(server):
        connections = [connect(server) for _ in range(40)]
        refused = 0
        for connection in connections:
            refused += b" 503 " in read_to_end(connection).split(b"\r\n")[0]
            connection.close()
        assert refused >= 20
        assert server.request("/health")[0] == 200


# Row 38: more than it can do.


def test_row_38_ten_times_its_capacity():
    with LiveServer(fake_command(step_seconds=0.005), max_running_requests=4, max_queue_size=8) as server:
        warm_up(server)
        descriptors = server.open_fds()
        beside = OpenStream(server, {**LONG, "max_tokens": 300})
        text = completion_text(beside.read(1))
        answers = asyncio.run(flood(server, 120))
        text += completion_text(beside.rest())
        beside.close()
        assert text == fake_answer(LONG["prompt"], 300)
        assert {status for status, _, _ in answers} == {200, 429}
        accepted = [body for status, body, _ in answers if status == 200]
        assert len(accepted) >= 11
        for status, body, headers in answers:
            if status == 429:
                assert int(headers["Retry-After"]) >= 1
                assert json.loads(body)["error"]["code"] == "queue_full"
            else:
                assert json.loads(body)["choices"][0]["text"] == fake_answer("flood", 30)
        until(lambda: server.gauges() == (0, 0, 0), what="an idle engine")
        until(lambda: server.open_fds() <= descriptors, what="closed connections")
        assert server.metrics()["blade_llm:num_requests_open"] == 0


async def flood(server, count):
    body = {**SHORT, "prompt": "flood", "max_tokens": 30}

    async def ask(session):
        async with session.post(server.url + "/v1/completions", json=body) as response:
            return response.status, await response.read(), dict(response.headers)

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        return await asyncio.gather(*(ask(session) for _ in range(count)))


def test_row_38_choices_count_each(narrow_server):
    with unharmed(narrow_server):
        status, body = narrow_server.json("/v1/completions", {**SHORT, "n": 4})
        assert status == 429, body
        status, body = narrow_server.json("/v1/completions", {**SHORT, "n": 3})
        assert (status, len(body["choices"])) == (200, 3)
        status, body = narrow_server.json("/v1/completions", {**SHORT, "n": 5})
        assert (status, body["error"]["param"]) == (400, "n")


@pytest.mark.parametrize("stream", [True, False])
def test_row_38_waited_too_long(narrow_server, stream):
    holder = OpenStream(narrow_server, {**LONG, "max_tokens": 1200})
    text = completion_text(holder.read(1))
    status, body, headers = narrow_server.request("/v1/completions", {**SHORT, "stream": stream})
    assert (status, json.loads(body)["error"]["code"]) == (503, "queue_timeout")
    assert "retry-after" in headers
    text += completion_text(holder.rest())
    assert text == fake_answer(LONG["prompt"], 1200)
    holder.close()
    until(lambda: narrow_server.gauges() == (0, 0, 0), what="an idle engine")


# Row 43: the engine dies.


def test_row_43_engine_killed():
    with LiveServer(fake_command()) as server:
        stream = OpenStream(server, LONG)
        stream.read(3)
        whole = ThreadPoolExecutor(1).submit(server.json, "/v1/completions", LONG)
        until(lambda: server.gauges()[0] == 2, what="two running requests")
        started = time.monotonic()
        os.kill(server.engine_pid, signal.SIGKILL)
        rest = stream.rest()
        stream.close()
        assert rest[-1]["error"]["code"] == "engine_dead"
        status, body = whole.result(5)
        assert (status, body["error"]["code"]) == (503, "engine_dead")
        assert time.monotonic() - started < 2
        assert server.json("/health") == (503, {"status": "engine_dead"})
        assert server.json("/ready") == (503, {"status": "engine_dead"})
        assert server.json("/v1/completions", SHORT)[0] == 503
        assert server.metrics()["blade_llm:engine_up"] == 0
        assert server.wait(10) == 1


def test_row_43_engine_reports_its_own_failure():
    with LiveServer(fake_command()) as server:
        stream = OpenStream(server, LONG)
        stream.read(1)
        status, _ = server.json("/v1/completions", {**SHORT, "prompt": "@fake:fail"})
        assert status == 503
        assert stream.rest()[-1]["error"]["code"] == "engine_dead"
        stream.close()
        assert server.wait(10) == 1


def test_row_43_garbage_from_the_engine_is_dropped(fake_server, beside):
    status, body = fake_server.json("/v1/completions", {**SHORT, "prompt": "@fake:garbage"})
    assert (status, body["choices"][0]["text"]) == (200, fake_answer("@fake:garbage", 4))


# Row 44: the front end dies.


def test_row_44_front_end_killed():
    with LiveServer(fake_command()) as server:
        stream = OpenStream(server, LONG)
        stream.read(1)
        server.signal(signal.SIGKILL)
        server.wait(5)
        until(lambda: not alive(server.engine_pid), 6.0, "the end of the engine")
        stream.close()


def alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


# Row 49: asked to stop.


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_row_49_signal_drains(number):
    with LiveServer(fake_command(step_seconds=0.005)) as server:
        stream = OpenStream(server, {**LONG, "max_tokens": 300})
        text = completion_text(stream.read(2))
        server.signal(number)
        until(lambda: server.request("/ready")[0] == 503, 1.0, "/ready at 503")
        assert server.request("/health")[0] == 200
        status, body = server.json("/v1/completions", SHORT)
        assert (status, body["error"]["code"]) == (503, "server_shutting_down")
        text += completion_text(stream.rest())
        stream.close()
        assert text == fake_answer(LONG["prompt"], 300)
        assert server.wait(5) == 0
        assert not alive(server.engine_pid)


def test_row_49_drain_time_over():
    with LiveServer(fake_command(), shutdown_timeout=0.5) as server:
        stream = OpenStream(server, LONG)
        stream.read(2)
        started = time.monotonic()
        server.signal(signal.SIGTERM)
        assert stream.rest()[-1]["error"]["code"] == "server_shutting_down"
        stream.close()
        assert server.wait(5) == 0
        assert 0.4 < time.monotonic() - started < 4


def test_row_49_second_signal_aborts():
    with LiveServer(fake_command()) as server:
        stream = OpenStream(server, LONG)
        stream.read(2)
        server.signal(signal.SIGTERM)
        until(lambda: server.request("/ready")[0] == 503, 1.0, "/ready at 503")
        started = time.monotonic()
        server.signal(signal.SIGTERM)
        assert stream.rest()[-1]["error"]["code"] == "server_shutting_down"
        stream.close()
        assert server.wait(5) == 0
        assert time.monotonic() - started < 4


def test_row_49_a_client_that_does_not_read_cannot_stop_the_stop():
    with LiveServer(fake_command(), shutdown_timeout=0.3, send_timeout=60.0) as server:
        reader = unread_stream(server)
        until(lambda: server.gauges()[0] == 1, what="the unread stream")
        time.sleep(1.5)
        server.signal(signal.SIGTERM)
        assert server.wait(10) == 0
        reader.close()


# Row 54: surroundings that cannot be written.


def test_row_54_full_disk_and_read_only_folders():
    caches = ("HOME", "XDG_CACHE_HOME", "HF_HOME", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
    settings = [f"{name}=/dev/null/nowhere" for name in caches]
    # Everything written to standard error fails with "no space left on device".
    wrapper = ["env", *settings, "sh", "-c", 'exec "$@" 2>/dev/full', "sh"]
    with LiveServer(fake_command(), wrapper=wrapper, log_level="DEBUG") as server, unharmed(server):
        for prompt in ("@fake:error:invalid_logits", "@fake:garbage", "plain"):
            server.request("/v1/completions", {**SHORT, "prompt": prompt})
        assert server.json("/v1/completions", SHORT)[1]["choices"][0]["text"] == fake_answer(SHORT["prompt"], 4)


# Row 57: keys.


@pytest.fixture(scope="module")
def locked_server(tmp_path_factory):
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text("second-key\n\nthird-key\n")
    with LiveServer(fake_command(), api_key=["first-key"], api_key_file=str(keys)) as server:
        yield server


PATHS = ["/", "/v1/models", "/v1/models/demo", "/metrics", "/metric", "/version", "/openapi.json", "/nowhere"]
ODD_PATHS = ["//v1/models", "/v1/../v1/models", "/V1/MODELS", "/v1/models/", "/%761/models", "/health/../v1/models"]
ODD_PROBES = ["//health", "/HEALTH", "/health/", "/ready/../v1/models", "/health%2f..%2fmetrics", "/v1/../health"]


@pytest.mark.parametrize("path", PATHS + ODD_PATHS + ODD_PROBES)
@pytest.mark.parametrize("method", ["GET", "HEAD", "OPTIONS", "POST", "DELETE"])
def test_row_57_no_key(locked_server, path, method):
    status, body, _ = locked_server.request(path, method=method)
    assert status == 401
    if method != "HEAD":
        error = json.loads(body)["error"]
        assert (error["type"], error["code"]) == ("authentication_error", "invalid_api_key")


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"])
def test_row_57_no_key_with_a_body(locked_server, path):
    assert locked_server.json(path, SHORT)[0] == 401


WRONG_KEYS = [
    *("", "Bearer", "Bearer ", "Bearer wrong", "first-key", "Basic first-key", "Bearer first-key2", "Bearer first-ke"),
    *("Bearer FIRST-KEY", "Bearer first-key second-key", "Bearer " + "x" * 5000, "Bearer first-key,second-key"),
]


@pytest.mark.parametrize("value", WRONG_KEYS)
def test_row_57_wrong_key(locked_server, value):
    assert locked_server.json("/v1/completions", SHORT, headers={"Authorization": value})[0] == 401


@pytest.mark.parametrize("value", ["Bearer first-key", "bearer second-key", "Bearer  third-key"])
def test_row_57_right_key(locked_server, value):
    status, body = locked_server.json("/v1/completions", SHORT, headers={"Authorization": value})
    assert (status, body["choices"][0]["text"]) == (200, fake_answer(SHORT["prompt"], 4))


def test_row_57_probes_need_no_key(locked_server):
    assert locked_server.request("/health")[0] == 200
    assert locked_server.request("/ready")[0] == 200


def test_row_57_refused_clients_harm_nobody(server, beside):
    for path in ODD_PATHS + ODD_PROBES:
        assert server.request(path)[0] in (404, 405, 200)
    for header in ("Bearer " + "x" * 9000, "\xff\xfe"):
        assert server.request("/v1/models", headers={"Authorization": header})[0] == 200


# Row 59: the engine hangs.


def test_row_59_metrics_while_the_engine_is_stuck():
    with LiveServer(fake_command(), engine_timeout=1.0, shutdown_timeout=0.2) as server:
        assert server.metrics()["blade_llm:last_step_age_seconds"] < 1
        stream = OpenStream(server, LONG)
        stream.read(2)
        hanging = OpenStream(server, {**SHORT, "prompt": "@fake:hang"})
        until(lambda: server.metrics()["blade_llm:last_step_age_seconds"] > 1.2, what="an old last step")
        assert server.json("/health") == (503, {"status": "engine_stuck"})
        assert server.json("/ready") == (503, {"status": "engine_stuck"})
        status, body = server.json("/v1/completions", SHORT)
        assert (status, body["error"]["code"]) == (503, "engine_stuck")
        assert server.request("/v1/models")[0] == 200
        assert server.metrics()["blade_llm:engine_up"] == 1
        hanging.close()
        stream.close()
        assert server.stop() == 0
        assert not alive(server.engine_pid)


# Row 60: a long life.


@pytest.mark.parametrize("count", [2000, pytest.param(100_000, marks=pytest.mark.slow)])
def test_row_60_memory_and_descriptors_stay_flat(count):
    with LiveServer(fake_command(step_seconds=0.0005)) as server:
        asyncio.run(live_long(server, 1500))
        until(lambda: server.gauges() == (0, 0, 0), what="an idle engine")
        memory, descriptors = server.rss(), server.open_fds()
        asyncio.run(live_long(server, count))
        until(lambda: server.gauges() == (0, 0, 0), what="an idle engine")
        until(lambda: server.open_fds() <= descriptors, what="closed connections")
        assert server.rss() - memory < memory // 100
        assert server.metrics()["blade_llm:num_requests_open"] == 0


async def live_long(server, count):
    """Requests of all kinds: whole, streamed, refused, failed."""
    failing = {**SHORT, "prompt": "@fake:error:invalid_logits"}
    kinds = [SHORT, {**SHORT, "stream": True}, {**SHORT, "n": 3, "logprobs": 2}, {**SHORT, "max_tokens": -1}, failing]
    numbers = iter(range(count))

    async def work(session):
        for number in numbers:
            body, headers = kinds[number % len(kinds)], {"X-Request-Id": str(2**53 + number)}
            async with session.post(server.url + "/v1/completions", json=body, headers=headers) as response:
                await response.read()
                assert response.status == (200, 200, 200, 400, 500)[number % len(kinds)]
                assert response.headers["X-Request-Id"] == headers["X-Request-Id"]

    async with aiohttp.ClientSession() as session:
        await asyncio.gather(*(work(session) for _ in range(16)))


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


# Starting where it cannot start: one sentence, no traceback, no child left behind.


def test_row_50_port_in_use():
    with LiveServer(fake_command()) as server:
        launch = {"args": {"port": server.port, "model": "x"}, "command": fake_command()}
        command = [sys.executable, "-m", "tests.support.live", json.dumps(launch)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
        assert done.returncode == 1
        assert f"--port {server.port}" in done.stderr
        assert len(done.stderr.strip().split("\n")) == 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_row_50_signal_while_the_model_loads(number):
    sleeper = [sys.executable, "-c", "import sys, time; print('up', file=sys.stderr, flush=True); time.sleep(60)"]
    launch = {"args": {"port": 0, "model": "recipes/models/demo"}, "command": sleeper}
    command = [sys.executable, "-m", "tests.support.live", json.dumps(launch)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stderr.readline() == "up\n"
        children = subprocess.run(["ps", "-o", "pid=", "--ppid", str(process.pid)], capture_output=True, check=False)
        process.send_signal(number)
        _, told = process.communicate(timeout=15)
    assert process.returncode == 130
    assert told.strip() == "stopped by a signal before the model was loaded"
    assert not any(alive(int(pid)) for pid in children.stdout.split())


def test_events_of_the_helper_refuse_a_cut_stream():
    with pytest.raises(AssertionError):
        events(b'data: {"choices":[]}\n\n')
