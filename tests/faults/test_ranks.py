"""Ranks that die, hang or fail, behind the real server: all ends within 10 s, told to every stream, nothing is left."""

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator

import psutil
import pytest

from tests.conftest import DEMO
from tests.engine.reference import load
from tests.faults.test_engine import ask
from tests.lora.folders import save_adapter
from tests.support.faulty_engine import TRIGGER
from tests.support.live import LiveServer, OpenStream, until

SECONDS = 10.0
FLAGS = {"device": "cpu", "dtype": "float32", "kv_cache_gib": 0.05, "tensor_parallel_size": 2}
ENDLESS = {"prompt": "Once upon a time", "max_tokens": 3500, "temperature": 0, "ignore_eos": True}

Deed = Callable[[LiveServer, list[psutil.Process]], None]


def to_rank(number: int) -> Deed:
    return lambda _, ranks: os.kill(ranks[0].pid, number)


def to_engine(number: int) -> Deed:
    return lambda server, _: os.kill(server.engine_pid or 0, number)


DEEDS: dict[str, tuple[Deed, str]] = {
    "killed rank": (to_rank(signal.SIGKILL), "rank 1 was killed by signal 9"),
    "halted rank": (to_rank(signal.SIGSTOP), "rank 1 has not answered for"),
    "hung up rank": (to_rank(signal.SIGHUP), "rank 1 was killed by signal 1"),
    "killed engine": (to_engine(signal.SIGKILL), "the engine process was killed by signal 9"),
}


def faulty(fault: str, **flags: object) -> LiveServer:
    return LiveServer([sys.executable, "-m", "tests.support.faulty_ranks", fault], **FLAGS, **flags)


def rank_processes(server: LiveServer) -> list[psutil.Process]:
    found = psutil.Process(server.engine_pid).children()
    return [process for process in found if "rank" in " ".join(process.cmdline())]


@pytest.fixture
def processes() -> Iterator[list[psutil.Process]]:
    """Those of a test's server; none may be there in the end."""
    watched: list[psutil.Process] = []
    yield watched
    _, left = psutil.wait_procs(watched, timeout=3.0)
    for process in left:
        process.kill()
    assert not left


def assert_ended(server: LiveServer, streams: list[OpenStream], started: float) -> None:
    for stream in streams:
        assert stream.rest()[-1]["error"]["code"] == "engine_dead"
        stream.close()
    assert server.json("/health")[0] == 503
    assert time.monotonic() - started < SECONDS
    assert server.hurry() == 1


def assert_ends_by(deed: str, server: LiveServer, ranks: list[psutil.Process]) -> None:
    """Do it while three streams run: all of them are told, and the log has one sentence."""
    streams = [OpenStream(server, ENDLESS) for _ in range(3)]
    for stream in streams:
        stream.read(2)
    act, sentence = DEEDS[deed]
    started = time.monotonic()
    act(server, ranks)
    assert_ended(server, streams, started)
    assert sentence in server.log()
    assert "Traceback" not in server.log()


def sampled(names: dict[str, object]) -> list[object]:
    return [name if name == "killed rank" else pytest.param(name, marks=pytest.mark.slow) for name in names]


@pytest.mark.parametrize("deed", sampled(DEEDS))
def test_a_lost_rank_ends_everything_and_every_stream_is_told(deed, processes):
    with LiveServer("real", **FLAGS) as server:
        ranks = rank_processes(server)
        assert len(ranks) == 1
        processes += [psutil.Process(server.engine_pid), *ranks]
        assert_ends_by(deed, server, ranks)


@pytest.mark.slow
@pytest.mark.parametrize("deed", DEEDS)
def test_a_rank_lost_by_an_idle_server_is_noticed(deed, processes):
    with LiveServer("real", **FLAGS) as server:
        ranks = rank_processes(server)
        processes += [psutil.Process(server.engine_pid), *ranks]
        act, sentence = DEEDS[deed]
        started = time.monotonic()
        act(server, ranks)
        until(lambda: server.json("/health")[0] == 503, SECONDS, "bad health")
        assert_ended(server, [], started)
        assert sentence in server.log()


@pytest.mark.slow
@pytest.mark.parametrize("busy", [True, False])
@pytest.mark.parametrize("halted", [True, False])
def test_nothing_outlives_a_killed_front_end(busy, halted, processes):
    with LiveServer("real", **FLAGS) as server:
        ranks = rank_processes(server)
        processes += [psutil.Process(server.engine_pid), *ranks]
        stream = OpenStream(server, ENDLESS)
        if busy:
            stream.read(2)
        if halted:
            ranks[0].suspend()
        server.signal(signal.SIGKILL)
        server.wait()
        _, left = psutil.wait_procs(processes, timeout=SECONDS)
        assert not left


@pytest.mark.slow
def test_a_stopped_server_ends_its_ranks_in_order(processes):
    with LiveServer("real", **FLAGS) as server:
        processes += [psutil.Process(server.engine_pid), *rank_processes(server)]
        stream = OpenStream(server, {**ENDLESS, "max_tokens": 40})
        stream.read(1)
        server.signal(signal.SIGTERM)
        assert "error" not in stream.rest()[-1]
        assert server.wait() == 0
        assert "killed" not in server.log()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "sentence"),
    [
        ("exhausted", "the engine stopped: rank 1: a step of 10 tokens ran out of memory; lower --max_gpu"),
        ("illegal", "the engine stopped: rank 1: the GPU failed"),
        ("deaf", "the engine stopped: rank 1 has done nothing for 6 seconds, although it had to"),
    ],
)
def test_a_rank_that_cannot_do_its_step_ends_the_group(fault, sentence, processes):
    with faulty(fault) as server:
        processes += [psutil.Process(server.engine_pid), *rank_processes(server)]
        stream = OpenStream(server, ENDLESS)
        stream.read(1)
        started = time.monotonic()
        status, answer = ask(server, [TRIGGER, *range(400, 408)], max_tokens=3000)
        assert (status, answer["error"]["code"]) == (503, "engine_dead")
        assert_ended(server, [stream], started)
        assert sentence in server.log()
        assert "Traceback" not in server.log()


@pytest.mark.slow
@pytest.mark.parametrize("streams", [2, 0])
def test_a_rank_lost_while_it_reads_an_adapter_ends_the_group(streams, tmp_path, processes):
    """Beside streams, and where requests for the adapter are all there is."""
    save_adapter(tmp_path / "adapter", load(DEMO)[0])
    with faulty("killed_reading", enable_lora=True, lora_dir=str(tmp_path)) as server:
        processes += [psutil.Process(server.engine_pid), *rank_processes(server)]
        running = [OpenStream(server, ENDLESS) for _ in range(streams)]
        for stream in running:
            stream.read(2)
        started = time.monotonic()
        waiting = [OpenStream(server, {**ENDLESS, "model": "adapter"}) for _ in range(2)]
        for stream in waiting:
            assert stream.response.status == 503
            assert json.loads(stream.response.read())["error"]["code"] == "engine_dead"
        assert_ended(server, running, started)
        assert "rank 1 was killed by signal 9" in server.log()
        assert "Traceback" not in server.log()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "sentence"),
    [
        ("dead", "rank 1 exited with 3"),
        (
            "other_flags",
            "rank 1 was started with --max_running_requests 7 and rank 0 without --max_running_requests; give",
        ),
    ],
)
def test_a_rank_that_cannot_start_is_told_in_one_sentence(fault, sentence):
    with pytest.raises(AssertionError, match=sentence), faulty(fault):
        pass
