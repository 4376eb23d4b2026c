"""A whole server in a process of its own, on a free port, for tests that talk to it over HTTP."""

import http.client
import json
import math
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

import psutil

from tests.support.fake_tokens import DEMO_MODEL, expected_text, tokenizer
from tests.support.warm_servers import WarmServer

FAKE_COMMAND = [sys.executable, "-m", "tests.support.fake_engine"]
ROOT = Path(__file__).parents[2]
POLL_SECONDS = 0.02
SAMPLE = re.compile(r"([\w:]+)(?:\{.*\})? (\S+)")
BUCKET = re.compile(r'[{,]le="')


def fake_command(**settings: Any) -> list[str]:
    """The command of a fake engine with these `FakeSettings`."""
    return [*FAKE_COMMAND, "--settings", json.dumps(settings)]


def until(condition: Callable[[], Any], seconds: float = 5.0, what: str = "the condition") -> Any:
    """Poll until `condition()` is true, and return its value; fails after `seconds` of polling.

    A poll counts for no more than its pause: a machine so busy that a server takes long to answer one has the longer.
    """
    polls = math.ceil(seconds / POLL_SECONDS)
    for _ in range(polls):
        if value := condition():
            return value
        time.sleep(POLL_SECONDS)
    value = condition()
    assert value, f"{what} did not come about within {seconds} s"
    return value


class LiveServer:
    """Starts a server on port 0 and stops it on leaving the `with` block.

    `engine` is "fake", "real" (the runtime's own engine on the demo model) or an engine command. `args` are fields of
    `ServingArgs`.
    """

    def __init__(self, engine: str | list[str] = "fake", *, wrapper: list[str] | None = None, **args: Any) -> None:
        self.fake = engine != "real"
        self._command = FAKE_COMMAND if engine == "fake" else None if engine == "real" else list(engine)
        self._args = {
            "port": 0,
            "model": str(DEMO_MODEL),
            "served_model_name": ["demo"],
            **args,
        }
        self._wrapper = wrapper or []
        self._log = tempfile.TemporaryFile(mode="w+")  # noqa: SIM115 - closed in stop()
        # A server that a test kills leaves its sockets; engines that outlive it for a moment may be at work there.
        self._folder = tempfile.TemporaryDirectory(prefix="bladellm-test-", ignore_cleanup_errors=True)
        self._process: subprocess.Popen[str] | WarmServer
        self.url = ""
        self.engine_pid: int | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def port(self) -> int:
        return int(self.url.rsplit(":", 1)[1])

    @property
    def launch(self) -> str:
        """The argument of the server process."""
        return json.dumps({"args": self._args, "command": self._command})

    def start(self) -> None:
        environment = {**os.environ, "TMPDIR": self._folder.name}
        if self._wrapper:
            self._process = self._wrapped(environment)
        else:
            self._process = WarmServer(self.launch, self._log, environment)
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, f"the server did not start:\n{self.log()}"
        told = json.loads(line)
        self.url, self.engine_pid = told["url"], told["engine_pid"]

    def _wrapped(self, environment: dict[str, str]) -> "subprocess.Popen[str]":
        return subprocess.Popen(
            [*self._wrapper, sys.executable, "-m", "tests.support.live", self.launch],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )

    def log(self) -> str:
        """What the server and its engine have written to standard error."""
        self._log.seek(0)
        return self._log.read()

    def signal(self, number: int) -> None:
        self._process.send_signal(number)

    def wait(self, seconds: float = 30.0) -> int:
        """The exit code, once the server has ended by itself."""
        return self._process.wait(seconds)

    def hurry(self, seconds: float = 30.0) -> int:
        """The exit code of a server whose engine is dead: the second signal keeps it from answering probes for long."""
        for number in (signal.SIGTERM, signal.SIGINT):  # two of a kind might come as one
            self.signal(number)
        return self.wait(seconds)

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    def stop(self, seconds: float = 15.0) -> int:
        """SIGTERM, wait, and clean up; returns the exit code. However it ended, if by itself, it has left no files."""
        if self.running:
            self.signal(signal.SIGTERM)
        try:
            code = self._process.wait(seconds)
            left = [] if code < 0 else list(Path(self._folder.name).glob("bladellm-*"))
            assert not left, "the server has not cleaned up"
            return code
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            raise
        finally:
            if self._process.stdout is not None:
                self._process.stdout.close()
            if not self._log.closed:
                self._log.close()
            self._folder.cleanup()

    def request(
        self,
        path: str,
        body: Any = None,
        *,
        method: str | None = None,
        headers: dict[str, str] | None = None,
        timeout: float = 30.0,
    ) -> tuple[int, bytes, dict[str, str]]:
        """One request: status, body, and headers by lower-case name. A `body` that is not bytes is sent as JSON."""
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, method=method)
        if data is not None:
            request.add_header("Content-Type", "application/json")
        for name, value in (headers or {}).items():
            request.add_header(name, value)
        try:
            with urllib.request.urlopen(request, timeout=timeout) as response:
                return response.status, response.read(), {k.lower(): v for k, v in response.headers.items()}
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read(), {k.lower(): v for k, v in error.headers.items()}

    def json(self, path: str, body: Any = None, **options: Any) -> tuple[int, Any]:
        """`request`, with the answer parsed as JSON."""
        status, answer, _ = self.request(path, body, **options)
        return status, json.loads(answer)

    def stream(self, path: str, body: dict[str, Any], timeout: float = 30.0) -> list[dict[str, Any]]:
        """A streamed request to its end: the events' objects; asserts status 200 and exactly one closing `[DONE]`."""
        status, answer, headers = self.request(path, {**body, "stream": True}, timeout=timeout)
        assert status == 200, answer
        assert headers["content-type"].startswith("text/event-stream")
        return events(answer)

    def metrics(self, headers: dict[str, str] | None = None) -> dict[str, float]:
        """Every metric of /metrics by sample name, summed over its labels except `le`."""
        status, text, _ = self.request("/metrics", headers=headers)
        assert status == 200, text
        return summed_samples(text.decode())

    def gauges(self) -> tuple[float, float, float]:
        """Requests running, requests waiting, share of the KV cache in use."""
        values = self.metrics()
        names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
        running, waiting, used = (values[f"blade_llm:{name}"] for name in names)
        return running, waiting, used

    def front_end_pids(self) -> list[int]:
        """The first front end's process, then the others'."""
        found = [self.pid]
        for child in psutil.Process(self.pid).children():
            with suppress(psutil.NoSuchProcess):  # it may end while it is looked at; a zombie has no command line
                if "front_end_process" in " ".join(child.cmdline()):
                    found.append(child.pid)
        return found

    def open_fds(self) -> int:
        return len(os.listdir(f"/proc/{self.pid}/fd"))

    def rss(self) -> int:
        """Resident memory of the server process in bytes."""
        with open(f"/proc/{self.pid}/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class OpenStream:
    """A streamed completion that the test reads at its own pace, and may leave."""

    def __init__(self, server: LiveServer, body: dict[str, Any], path: str = "/v1/completions") -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
        payload = json.dumps({"model": "demo", "stream": True, **body})
        self._connection.request("POST", path, payload, {"Content-Type": "application/json"})
        self._response: http.client.HTTPResponse | None = None

    @property
    def response(self) -> http.client.HTTPResponse:
        """The response, waiting for its head."""
        if self._response is None:
            self._response = self._connection.getresponse()
        return self._response

    def read(self, count: int) -> list[dict[str, Any]]:
        """The next `count` events."""
        found: list[dict[str, Any]] = []
        while len(found) < count:
            line = self.response.readline()
            assert line, "the stream ended early"
            if line.startswith(b"data: "):
                found.append(json.loads(line.removeprefix(b"data: ")))
        return found

    def rest(self) -> list[dict[str, Any]]:
        """All further events, to the `[DONE]` that must end the stream."""
        # `read` stops after a line, in front of the empty one that ends its event.
        return events(self.response.read().removeprefix(b"\n"))

    def abandon(self) -> None:
        """Leave while another thread reads, which then finds the stream at its end."""
        self._connection.sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Leave."""
        if self._response is not None:
            self._response.close()
        self._connection.close()


def summed_samples(text: str) -> dict[str, float]:
    """What a page of metrics says by sample name, summed over its labels; without the buckets of histograms.

    Tests poll: prometheus_client's parser would take twice as long as the server takes to answer.
    """
    values: dict[str, float] = {}
    for line in text.splitlines():
        if not line.startswith("#") and not BUCKET.search(line):
            sample = SAMPLE.fullmatch(line)
            assert sample, line
            values[sample[1]] = values.get(sample[1], 0.0) + float(sample[2])
    return values


def events(answer: bytes) -> list[dict[str, Any]]:
    """The objects of a server-sent event stream that ends, as it must, with one `[DONE]`."""
    parts = answer.decode().split("\n\n")
    assert parts[-1] == "", "the stream was cut inside an event"
    lines = [part for part in parts[:-1] if not part.startswith(":")]
    assert all(line.startswith("data: ") for line in lines), answer[:500]
    assert lines, "an empty stream"
    assert lines[-1] == "data: [DONE]", answer[-200:]
    assert "data: [DONE]" not in lines[:-1]
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def completion_text(chunks: list[dict[str, Any]]) -> str:
    """The text of a streamed completion with one choice."""
    return "".join(choice["text"] for chunk in chunks for choice in chunk.get("choices", []))


def fake_answer(prompt: str, count: int, choice: int = 0, adapter: int = 0) -> str:
    """What the fake engine answers to a /v1/completions prompt. adapter: the checksum of one."""
    return expected_text(tokenizer().encode(prompt).ids, count, choice, adapter)


def main() -> int:
    """The server process: serve, and tell the parent the address in one line."""
    from bladellm_runtime.config import ServingArgs
    from bladellm_runtime.errors import UserError
    from bladellm_runtime.server.lifecycle import serve
    from bladellm_runtime.wire.engine_process import DEFAULT_COMMAND, engine_process

    launch = json.loads(sys.argv[1])
    args, command = ServingArgs(**launch["args"]), launch["command"] or DEFAULT_COMMAND

    def on_ready(address: str, client: Any) -> None:
        print(json.dumps({"url": address, "engine_pid": client.process_id}), flush=True)

    try:
        with engine_process(args, command) as engine:
            return serve(args, Path(args.model), on_ready=on_ready, engine=engine)
    except UserError as error:
        print(error, file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
