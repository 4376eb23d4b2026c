"""Signals that stop a server, however many come and whichever of its processes get them."""

import http.client
import json
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import psutil
import pytest

from tests.support.cases import drawn_of
from tests.support.live import LiveServer, OpenStream, fake_command

ENDLESS = {"prompt": "Once upon a time", "max_tokens": 3500, "temperature": 0, "ignore_eos": True}


@pytest.mark.turns("stops")
@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "flags", [{"frontend_processes": 2}, pytest.param({"tensor_parallel_size": 2}, marks=pytest.mark.slow)]
)
def test_a_signal_to_all_processes_lets_requests_finish(flags, number):
    """As service managers send it: to the engine, its ranks and all front ends, the first one last here."""
    with LiveServer("real", device="cpu", kv_cache_gib=0.05, **flags) as server:
        streams = [OpenStream(server, {**ENDLESS, "max_tokens": 100}) for _ in range(4)]
        for stream in streams:
            stream.read(1)
        processes = psutil.Process(server.pid).children(recursive=True)
        assert len(processes) == 2
        for process in processes:
            process.send_signal(number)
        server.signal(number)
        for stream in streams:
            assert stream.rest()[-1]["choices"][0]["finish_reason"] == "length"
        assert server.wait() == 0
        assert "killed" not in server.log()
        assert not psutil.wait_procs(processes, 5)[1]


@pytest.mark.turns("stops")
@pytest.mark.parametrize("front_ends", [1, 2])
def test_signals_that_come_until_the_end_change_nothing(front_ends):
    """Those that come when nothing is left to do but to end are no second opinion."""
    with LiveServer(fake_command(step_seconds=0.01), frontend_processes=front_ends) as server:
        stream = OpenStream(server, ENDLESS)
        stream.read(1)
        ended = threading.Event()

        def insist() -> None:
            process = psutil.Process(server.pid)
            while not ended.is_set():
                with suppress(psutil.NoSuchProcess):  # it has ended, which is not known yet
                    for number in (signal.SIGTERM, signal.SIGINT):
                        process.send_signal(number)
                time.sleep(0.0005)

        with ThreadPoolExecutor(1) as pool:
            insisting = pool.submit(insist)
            try:
                assert stream.rest()[-1]["error"]["code"] == "server_shutting_down"
                code = server.wait()
            finally:
                ended.set()
            insisting.result()
        assert (code, server.log().count("Traceback")) == (0, 0)


@pytest.mark.parametrize("path", drawn_of(["/v1/completions", "/tokenize"], 1))
def test_a_client_that_still_sends_its_body_is_told_that_the_server_ends(path):
    with LiveServer() as server:
        client = http.client.HTTPConnection("127.0.0.1", server.port, timeout=20)
        client.putrequest("POST", path)
        client.putheader("Content-Type", "application/json")
        client.putheader("Content-Length", "1000")
        client.endheaders(b'{"model"')
        server.request("/health")  # the head of the one before has been read
        server.signal(signal.SIGTERM)
        response = client.getresponse()
        assert (response.status, response.headers["Retry-After"], response.headers["Connection"]) == (503, "1", "close")
        assert json.load(response)["error"]["code"] == "server_shutting_down"
        assert server.wait() == 0
        assert "ASGI" not in server.log()
        client.close()
