"""Processes that end, hang, or live long. Each test is named after its row of the fault table."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import aiohttp
import pytest

from tests.faults.conftest import unharmed
from tests.faults.sockets import LONG, SHORT, unread_stream
from tests.support.live import (
    LiveServer,
    OpenStream,
    completion_text,
    fake_answer,
    fake_command,
    until,
)

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
        assert server.hurry() == 1


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
        assert server.stop() == -signal.SIGKILL


def alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


# Row 49: asked to stop.


@pytest.mark.turns("stops")
@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
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


# 100,000 requests take 48 s with two free cores, and no time is measured here.
@pytest.mark.parametrize("count", [1000, pytest.param(100_000, marks=[pytest.mark.slow, pytest.mark.timeout(400)])])
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
