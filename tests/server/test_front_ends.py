"""A server of several front-end processes: they share port, engine, limits and metrics, and outlive each other."""

import asyncio
import os
import shutil
import signal
import socket
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import openai
import psutil
import pytest
import uvloop

from bladellm_runtime.config import ServingArgs
from bladellm_runtime.errors import ConfigError, UserError
from bladellm_runtime.server import front_ends
from bladellm_runtime.server.front_ends import FrontEnds
from tests.server.openai_support import decode, greedy
from tests.support.fake_tokens import DEMO_MODEL
from tests.support.front_ends import keep_one_that_served, loading_server
from tests.support.late import start_too_late
from tests.support.live import LiveServer, OpenStream, completion_text, fake_answer, fake_command, until


def connections_of(pid: int, port: int) -> int:
    """Connections to the port that a process holds."""
    found = psutil.Process(pid).net_connections("tcp")
    return sum(item.laddr.port == port and item.status == psutil.CONN_ESTABLISHED for item in found)


def streams_by_front_end(server: LiveServer, count: int, tokens: int = 2000) -> dict[int, list[OpenStream]]:
    """Streams that have begun, by the process that serves them; at least `count`, and one in every process."""
    found: dict[int, list[OpenStream]] = {pid: [] for pid in server.front_end_pids()}
    while sum(map(len, found.values())) < count or not all(found.values()):
        before = {pid: connections_of(pid, server.port) for pid in found}
        stream = OpenStream(server, {"prompt": "long", "max_tokens": tokens, "ignore_eos": True})
        stream.read(1)
        (pid,) = [pid for pid in found if connections_of(pid, server.port) > before[pid]]
        found[pid].append(stream)
        assert sum(map(len, found.values())) < 60, "one process takes all connections"
    return found


def close_all(streams: dict[int, list[OpenStream]]) -> None:
    for stream in [stream for several in streams.values() for stream in several]:
        stream.close()


COMMAND = fake_command(step_seconds=0.01, kv_tokens=2**20)


@pytest.fixture
def server():
    """One that the test may end."""
    with LiveServer(COMMAND, frontend_processes=2) as live:
        yield live


@pytest.fixture(scope="module")
def lasting_server():
    with LiveServer(COMMAND, frontend_processes=2) as live:
        yield live
        assert live.stop() == 0


@pytest.fixture(scope="module")
def guarded_server():
    with LiveServer(frontend_processes=2, max_connections=20, api_key=["secret"]) as live:
        yield live


async def ask(client: openai.AsyncOpenAI, prompt: str, count: int) -> str:
    stream = await client.completions.create(
        model="demo", prompt=prompt, max_tokens=count, stream=True, extra_body={"ignore_eos": True}
    )
    return "".join([chunk.choices[0].text async for chunk in stream])


def test_64_streams_of_the_openai_client_each_get_their_answer_and_every_process_serves_some(lasting_server):
    async def body() -> list[str]:
        async with openai.AsyncOpenAI(base_url=lasting_server.url + "/v1", api_key="none", max_retries=0) as client:
            answers = asyncio.gather(*(ask(client, f"Stream {i}", 40 + i) for i in range(64)))
            held, pids = set(), set(lasting_server.front_end_pids())
            while not answers.done():
                await asyncio.sleep(0.05)
                held |= {pid for pid in pids if connections_of(pid, lasting_server.port) > 0}
            assert held == pids
            return await answers

    assert asyncio.run(body()) == [fake_answer(f"Stream {i}", 40 + i) for i in range(64)]
    until(lambda: lasting_server.metrics()["blade_llm:request_success_total"] == 64)


def test_a_burst_of_connections_spreads(lasting_server):
    """Evenly, where no process is kept waiting for the processor: tests/server/test_app_parts.py has that."""
    streams = [
        OpenStream(lasting_server, {"prompt": "long", "max_tokens": 2000, "ignore_eos": True}) for _ in range(60)
    ]
    until(lambda: lasting_server.gauges()[0] == 60)
    held = [connections_of(pid, lasting_server.port) for pid in lasting_server.front_end_pids()]
    for stream in streams:
        stream.close()
    assert min(held) > 0
    until(lambda: lasting_server.gauges()[0] == 0)


def test_metrics_are_sums_over_the_processes_and_never_go_back(server):
    def ask_one(number: int) -> None:
        server.stream("/v1/completions", {"prompt": f"Count {number}", "max_tokens": 30, "ignore_eos": True})

    names = (
        "generation_tokens_total",
        "request_success_total",
        "request_generation_tokens_count",
        "engine_steps_total",
    )
    last = dict.fromkeys(names, 0.0)
    with ThreadPoolExecutor(9) as pool:
        asked = [pool.submit(ask_one, number) for number in range(40)]
        while not all(future.done() for future in asked):
            values = server.metrics()
            now = {name: values.get(f"blade_llm:{name}", 0.0) for name in names}
            assert [name for name in names if now[name] < last[name]] == []
            last = now
            time.sleep(0.02)
        assert [future.result() for future in asked] == [None] * 40
    until(lambda: server.metrics()["blade_llm:request_success_total"] == 40)
    for _ in range(10):
        values = server.metrics()
        assert values["blade_llm:request_success_total"] == 40
        assert values["blade_llm:request_generation_tokens_count"] == 40
        assert values["blade_llm:generation_tokens_total"] == 40 * 30
        assert values["blade_llm:iteration_tokens_total_count"] <= values["blade_llm:engine_steps_total"]
        assert values["blade_llm:num_requests_open"] == 0


def test_limits_hold_for_all_processes_together():
    with LiveServer(frontend_processes=2, max_running_requests=16, max_queue_size=8) as server:
        streams = streams_by_front_end(server, 2)
        left = 24 - sum(map(len, streams.values()))
        extra = [OpenStream(server, {"prompt": "more", "max_tokens": 2000}) for _ in range(left)]
        until(lambda: server.metrics()["blade_llm:num_requests_open"] == 24)
        for _ in range(8):
            status, answer = server.json("/v1/completions", {"prompt": "too many", "max_tokens": 1})
            assert (status, answer["error"]["code"]) == (429, "queue_full")
        close_all(streams)
        for stream in extra:
            stream.close()
        until(lambda: server.metrics()["blade_llm:num_requests_open"] == 0)


def test_connections_are_limited_for_all_processes_together(guarded_server):
    server = guarded_server
    opened = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(20)]
    until(lambda: sum(connections_of(pid, server.port) for pid in server.front_end_pids()) == 20)
    answers = [server.json("/health") for _ in range(6)]
    assert [(status, answer["error"]["message"]) for status, answer in answers] == [
        (503, "The server has as many connections as it takes; try again later")
    ] * 6
    for connection in opened:
        connection.close()
    until(lambda: server.request("/health")[0] == 200)


def test_keys_are_asked_for_by_all_processes(guarded_server):
    server, key = guarded_server, {"Authorization": "Bearer secret"}
    assert [server.request("/v1/models")[0] for _ in range(8)] == [401] * 8
    assert [server.request("/v1/models", headers=key)[0] for _ in range(8)] == [200] * 8
    # A reason nobody has had yet is not in the text, and the first look may come before other processes told theirs.
    until(lambda: server.metrics(key).get("blade_llm:requests_rejected_total") == 8)


def test_a_killed_front_end_costs_its_own_requests_alone_and_is_replaced(lasting_server):
    server = lasting_server
    streams = streams_by_front_end(server, 6)
    first, other = server.front_end_pids()
    kept = len(streams[first])
    counted = server.metrics()["blade_llm:client_disconnects_total"]
    os.kill(other, signal.SIGKILL)
    with pytest.raises(AssertionError, match="the stream ended early"):
        streams[other][0].read(10**6)
    until(lambda: server.gauges()[0] == kept, what="the end of the dead front end's requests in the engine")
    assert server.metrics()["blade_llm:num_requests_open"] == kept
    for stream in streams[first]:
        assert len(completion_text(stream.read(50)).strip()) > 0
    replacement = until(lambda: [pid for pid in server.front_end_pids()[1:] if pid != other], 20)
    os.kill(replacement[0], signal.SIGKILL)
    until(lambda: [pid for pid in server.front_end_pids()[1:] if pid not in (other, *replacement)], 20)
    close_all(streams)
    again = streams_by_front_end(server, 2)
    assert all(again.values()), "the new one serves"
    close_all(again)
    until(lambda: server.metrics()["blade_llm:client_disconnects_total"] >= counted + kept + 2)
    until(lambda: server.gauges()[0] == 0)


def test_the_engine_itself_serves_several_front_ends_and_drops_the_requests_of_a_dead_one():
    ask = {"prompt": "Once upon a time", "max_tokens": 20, "temperature": 0, "ignore_eos": True}
    expected = decode(greedy(ask["prompt"], 20))
    with LiveServer("real", frontend_processes=2) as server:
        with ThreadPoolExecutor(8) as pool:
            answers = list(pool.map(lambda _: completion_text(server.stream("/v1/completions", ask)), range(16)))
        assert answers == [expected] * 16
        streams = streams_by_front_end(server, 4)
        first, other = server.front_end_pids()
        os.kill(other, signal.SIGKILL)
        until(lambda: server.gauges()[0] == len(streams[first]), 10, "the end of the dead front end's requests")
        assert streams[first][0].read(5)
        close_all(streams)
        until(lambda: server.gauges()[0] == 0)


@pytest.mark.slow
def test_a_front_end_that_hangs_is_replaced():
    command = fake_command(step_seconds=0.0005, kv_tokens=2**20, max_model_len=2**18)
    with LiveServer(command, frontend_processes=2) as server:
        streams = streams_by_front_end(server, 2, 2**17)
        first, other = server.front_end_pids()
        os.kill(other, signal.SIGSTOP)
        until(lambda: server.front_end_pids()[1:] not in ([other], []), 60, "its replacement")
        assert server.json("/health") == (200, {"status": "ok"})
        assert streams[first][0].read(3)
        close_all(streams)


@pytest.mark.turns("stops")
def test_sigterm_lets_all_processes_finish_their_requests(server):
    streams = streams_by_front_end(server, 4, 150)
    pids = server.front_end_pids()
    with ThreadPoolExecutor(1) as pool:
        ended = pool.submit(server.stop, 40)
        for stream in [stream for several in streams.values() for stream in several]:
            last = stream.rest()[-1]
            assert last["choices"][0]["finish_reason"] == "length"
        assert ended.result() == 0
    assert not any(psutil.pid_exists(pid) for pid in pids)


@pytest.mark.turns("stops")
def test_a_second_signal_ends_the_requests_of_all_processes(server):
    streams = streams_by_front_end(server, 4)
    server.signal(signal.SIGTERM)
    until(lambda: server.request("/ready")[0] == 503, what="/ready at 503")
    server.signal(signal.SIGTERM)
    for stream in [stream for several in streams.values() for stream in several]:
        assert stream.rest()[-1]["error"]["code"] == "server_shutting_down"
    assert server.wait(10) == 0


def test_every_process_reports_a_dead_engine(server):
    streams = streams_by_front_end(server, 4)
    os.kill(server.engine_pid, signal.SIGKILL)
    for stream in [stream for several in streams.values() for stream in several]:
        assert stream.rest()[-1]["error"]["code"] == "engine_dead"
    answers = [server.json("/health") for _ in range(12)]
    assert answers == [(503, {"status": "engine_dead"})] * 12
    pids = server.front_end_pids()
    assert server.hurry(20) == 1
    assert not any(psutil.pid_exists(pid) for pid in pids)


@pytest.mark.turns("stops")
def test_all_processes_end_with_the_first(server):
    processes = [psutil.Process(pid) for pid in (*server.front_end_pids(), server.engine_pid)]
    server.signal(signal.SIGKILL)
    assert not psutil.wait_procs(processes, 10)[1]


def test_a_front_end_that_cannot_start_ends_the_server_with_its_sentence(tmp_path):
    model = Path(shutil.copytree(DEMO_MODEL, tmp_path / "model"))
    (model / "generation_config.json").write_text('{"temperature": -1}')
    server = LiveServer(frontend_processes=2, model=str(model))
    with pytest.raises(AssertionError, match="the server did not start") as caught:
        server.start()
    assert str(caught.value).count("generation_config.json: temperature must be between") == 1
    assert server.wait() == 1
    server.stop()


def test_front_ends_that_end_before_they_are_told_anything_end_the_start_or_are_replaced(tmp_path, monkeypatch):
    started = tmp_path / "started"
    count_and_end = f"echo >> {started}; exit 7"
    monkeypatch.setattr(front_ends, "COMMAND", ["sh", "-c", count_and_end])
    monkeypatch.setattr(front_ends, "RESTART_SECONDS", 0.01)
    start_too_late(monkeypatch)

    async def body():
        several = FrontEnds(ServingArgs(), tmp_path, listener, 2)
        await several.start()
        with pytest.raises(UserError, match="front end 1 exited with 7 before it could serve"):
            await asyncio.wait_for(several._serving[1], 20)
        await several.close(5)
        several = FrontEnds(ServingArgs(), tmp_path, listener, 2)
        keeper = keep_one_that_served(several)
        await asyncio.wait({keeper}, timeout=0)
        while len(started.read_text()) < 4:
            await asyncio.wait({keeper}, timeout=0.01)
            assert not keeper.done(), "nobody starts front end 1 any more"
        keeper.cancel()

    with socket.socket() as listener, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(body())


def test_an_engine_that_dies_before_all_front_ends_serve_ends_the_start():
    code = """
import json, sys, time
from bladellm_runtime.wire.transport import EnginePort
from tests.support.fake_engine import FakeSettings, fake_ready
port = EnginePort(json.loads(sys.stdin.readline())["address"])
port.send(fake_ready(FakeSettings()))
port.receive(2.0)
sys.exit(7)
"""
    server = LiveServer([sys.executable, "-c", code], frontend_processes=2)
    with pytest.raises(AssertionError, match="the engine process exited with 7"):
        server.start()
    assert server.wait() == 1
    server.stop()


def test_a_signal_during_the_start_ends_all_processes():
    with loading_server(frontend_processes=3) as (server, started):
        server.send_signal(signal.SIGTERM)
        _, log = server.communicate(timeout=20)
        assert server.returncode == 130
        assert log.strip() == "stopped by a signal before the model was loaded"
        assert not psutil.wait_procs(started, 5)[1]


def test_one_process_for_all_excludes_several_front_ends():
    with pytest.raises(ConfigError, match="--frontend_processes 2 cannot be used with --disable_frontend_multi"):
        ServingArgs(disable_frontend_multiprocessing=True, frontend_processes=2)
    assert ServingArgs().frontend_processes == 1
