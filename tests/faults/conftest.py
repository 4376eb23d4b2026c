"""The fault tests' server, and a neighbour whose answers must not change whatever a test does beside it.

Every test gets `server`, or the stricter `beside`, once with the fake engine and once, marked slow, with the real
engine on the demo model. A test that needs the fake engine's commands takes `fake_server` and `beside`.
"""

import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.support.live import LiveServer, completion_text, fake_answer, fake_command, until

NEIGHBOUR_TOKENS = 16
GUIDED_CACHE_MIB = 2


@pytest.fixture(scope="session", params=["fake", pytest.param("real", marks=pytest.mark.slow)])
def server(request: pytest.FixtureRequest) -> Iterator[LiveServer]:
    """A live server shared by the tests: 64 slots, a KV cache of 16,384 tokens, a queue of 64, 1 MiB bodies, 2 MiB for
    constraints."""
    fake = fake_command(step_seconds=0.004, kv_tokens=16384, guided_cache_mib=GUIDED_CACHE_MIB)
    engine, extra = (
        (fake, {}) if request.param == "fake" else ("real", {"device": request.config.getoption("--device")})
    )
    if engine == "real":
        extra |= {"kv_cache_gib": 0.0625, "guided_cache_mib": GUIDED_CACHE_MIB}
    limits = {
        "max_running_requests": 64,
        "max_queue_size": 64,
        "max_body_mib": 1.0,
        "header_timeout": 1.0,
        "send_timeout": 2.0,
    }
    with LiveServer(engine, **limits, **extra) as live:
        warm_up(live)
        yield live


@pytest.fixture
def fake_server(server: LiveServer) -> LiveServer:
    """`server`, where its engine takes the fake engine's commands."""
    if not server.fake:
        pytest.skip("needs a command of the fake engine")
    return server


@pytest.fixture
def beside(server: LiveServer) -> Iterator["Neighbour"]:
    """A neighbour streaming all through the test; afterwards its answers must be right and nothing may have leaked."""
    with unharmed(server) as neighbour:
        yield neighbour


@contextmanager
def unharmed(server: LiveServer) -> Iterator["Neighbour"]:
    """`beside` for a server of the test's own."""
    assert_quiet(server)
    descriptors = server.open_fds()
    neighbour = Neighbour(server)
    neighbour.start()
    yield neighbour
    neighbour.finish()
    assert_quiet(server)
    until(lambda: server.open_fds() <= descriptors, 8.0, f"a return to {descriptors} open descriptors")


class Neighbour:
    """Asks one question again and again in a thread, and checks every answer against the one expected."""

    def __init__(self, server: LiveServer) -> None:
        self._server = server
        self._prompt = f"Once upon a time {uuid.uuid4().hex[:8]}"
        self._expected = self._expectation()
        self._stop = threading.Event()
        self._first = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._fault: BaseException | None = None
        self.answers = 0

    def start(self) -> None:
        """Returns once the first answer is under way."""
        self._thread.start()
        until(lambda: self._fault or self._server.gauges()[0] > 0 or self.answers > 0, 10.0, "the neighbour's start")

    def finish(self) -> None:
        """Let the last answer end, and fail if any was wrong."""
        self._stop.set()
        self._thread.join(60)
        assert not self._thread.is_alive(), "the neighbour's answer never ended"
        if self._fault is not None:
            raise AssertionError("the neighbour was harmed") from self._fault
        assert self.answers > 0

    def _expectation(self) -> str:
        if self._server.fake:
            return fake_answer(self._prompt, NEIGHBOUR_TOKENS)
        return self._ask()

    def _ask(self) -> str:
        body = {
            "model": "demo",
            "prompt": self._prompt,
            "max_tokens": NEIGHBOUR_TOKENS,
            "temperature": 0,
            "ignore_eos": True,
        }
        return completion_text(self._server.stream("/v1/completions", body))

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                assert self._ask() == self._expected
                self.answers += 1
        except BaseException as error:
            self._fault = error


def assert_quiet(server: LiveServer) -> None:
    """Nothing runs, nothing waits, no KV cache is held."""
    until(lambda: server.gauges() == (0, 0, 0), 8.0, "an idle engine")


def warm_up(server: LiveServer) -> None:
    """Use every path once, so that what is opened lazily is open before descriptors are counted."""
    body = {"model": "demo", "max_tokens": 2}
    server.stream("/v1/completions", {**body, "prompt": "Hello"})
    server.stream("/v1/chat/completions", {**body, "messages": [{"role": "user", "content": "Hello"}]})
    assert server.json("/v1/completions", {**body, "prompt": "Hello"})[0] == 200
    assert server.json("/tokenize", {"prompt": "Hello"})[0] == 200
    time.sleep(0.1)


@pytest.fixture(scope="module")
def narrow_server():
    """One slot, a queue of three, and a second's patience."""
    with LiveServer(fake_command(), max_running_requests=1, max_queue_size=3, max_queue_time=1.0) as server:
        yield server
