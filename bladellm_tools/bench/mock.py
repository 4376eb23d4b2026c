"""A server without a model: it answers completions and chats at exact times, to test load generators with.

One heap of deadlines and one timer drive all streams, and a chunk is one write of bytes made beforehand, so that 512
streams of 20 tokens a second take a fraction of a core. Deadlines are absolute: a late chunk does not delay the next.
"""

import asyncio
import contextlib
import heapq
import json
import os
import signal
import sys
from collections import deque
from collections.abc import Callable
from typing import Any

import orjson

from bladellm_runtime.errors import ConfigError, UserError
from bladellm_tools.bench.args import MockArgs
from bladellm_tools.bench.eventloop import first_served, raise_file_limit, run_loop, without_collector
from bladellm_tools.bench.mock_http import HttpConnection, http_chunk, http_response
from bladellm_tools.bench.pacing import DeadlineTimer, clock

MockSettings = MockArgs
HOST = "127.0.0.1"
MODEL = "mock"
MAX_TOKENS = 10**6
DEFAULT_TOKENS = 16
KEPT_LATENESS = 100_000
STREAM_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
WORD = " token"
ROUTES = {"/v1/completions": False, "/v1/chat/completions": True}


def event(content: Any) -> bytes:
    """One server-sent event in one HTTP chunk."""
    return http_chunk(b"data: " + orjson.dumps(content) + b"\n\n")


def chunk(chat: bool, text: str | None, finish: str | None) -> dict[str, Any]:
    """A chunk of an answer; without text it is the role chunk of a chat."""
    if not chat:
        choice: dict[str, Any] = {"index": 0, "text": text or "", "finish_reason": finish}
    else:
        delta = {"role": "assistant", "content": ""} if text is None else {"content": text}
        choice = {"index": 0, "delta": delta, "finish_reason": finish}
    kind = "chat.completion.chunk" if chat else "text_completion"
    return {"id": "mock-1", "object": kind, "created": 0, "model": MODEL, "choices": [choice]}


class Stream:
    """One answer in progress: when its next write is due, and how many tokens are left."""

    __slots__ = ("chat", "connection", "due", "fault", "left", "opened", "prompt_tokens", "sent")

    def __init__(self, connection: HttpConnection, chat: bool, tokens: int, prompt_tokens: int, fault: str) -> None:
        self.connection = connection
        self.chat = chat
        self.left = tokens
        self.sent = 0
        self.prompt_tokens = prompt_tokens
        self.fault = fault
        self.opened = False
        self.due = 0.0


class MockServer:
    """The server's state: streams by deadline, the queue of the single server, the freezes, its own lateness."""

    def __init__(self, settings: MockSettings) -> None:
        self._settings = settings
        self._began = clock()
        self._heap: list[tuple[float, int, Stream]] = []
        self._order = 0
        self._free_at = 0.0
        self._requests = 0
        self._faults = 0.0
        self._lateness: deque[float] = deque(maxlen=KEPT_LATENESS)
        self._timer = DeadlineTimer(self._on_time)
        text = WORD * settings.tokens_per_chunk
        self._chunks = {chat: event(chunk(chat, text, None)) for chat in (False, True)}

    def handle(self, connection: HttpConnection, method: str, path: str, body: bytes) -> None:
        """Answer one request."""
        if path in ROUTES and method == "POST":
            self._generate(connection, ROUTES[path], body)
        elif path == "/v1/models":
            connection.write(http_response(200, {"object": "list", "data": [{"id": MODEL, "object": "model"}]}))
        elif path == "/health":
            connection.write(http_response(200, {}))
        elif path == "/stats":
            connection.write(http_response(200, self._stats()))
        else:
            connection.write(http_response(404, {"error": {"message": f"no route {path}"}}))

    def _stats(self) -> dict[str, float]:
        """How late chunks left since the last question, in seconds."""
        late = sorted(self._lateness)
        self._lateness.clear()
        shares = {"late_p50": 0.5, "late_p99": 0.99, "late_max": 1.0}
        return {name: late[int(share * (len(late) - 1))] if late else 0.0 for name, share in shares.items()}

    def _generate(self, connection: HttpConnection, chat: bool, body: bytes) -> None:
        try:
            request = orjson.loads(body)
            tokens = request.get("max_tokens") or request.get("max_completion_tokens") or DEFAULT_TOKENS
            prompt_tokens = len(str(request.get("prompt") or request.get("messages")).split())
        except (orjson.JSONDecodeError, AttributeError):
            tokens, prompt_tokens = 0, 0
        if not isinstance(tokens, int) or not 1 <= tokens <= MAX_TOKENS:
            connection.write(http_response(400, {"error": {"message": f"max_tokens must be 1 to {MAX_TOKENS}"}}))
            return
        self._requests += 1
        if self._settings.die_after and self._requests > self._settings.die_after:
            os._exit(1)
        stream = Stream(connection, chat, tokens, prompt_tokens, self._next_fault())
        stream.due = self._begin(clock())
        if stream.fault == "http_500":
            connection.write(http_response(500, {"error": {"message": "a fault of the mock"}}))
            return
        self._schedule(stream)

    def _next_fault(self) -> str:
        """The fault of this request: spread evenly, so that a share holds of any number of requests."""
        if self._settings.fault == "none":
            return "none"
        self._faults += self._settings.fault_share
        if self._faults < 1 - 1e-9:
            return "none"
        self._faults -= 1
        return self._settings.fault

    def _begin(self, arrival: float) -> float:
        """When a request that arrives now gets its turn: first come, first served, `service_time` each."""
        begin = self._thawed(max(arrival, self._free_at))
        if self._settings.service_time:
            self._free_at = begin + self._settings.service_time
        return begin

    def _thawed(self, time: float) -> float:
        """The time itself, or the end of the freeze it lies in."""
        every, length = self._settings.freeze_every, self._settings.freeze_for
        if not every or not length:
            return time
        phase = (time - self._began) % every
        return time if phase < every - length else time + every - phase

    def _schedule(self, stream: Stream) -> None:
        stream.due = self._thawed(stream.due)
        self._order += 1
        heapq.heappush(self._heap, (stream.due, self._order, stream))
        if self._heap[0][2] is stream:
            self._timer.arm(stream.due)

    def _on_time(self) -> None:
        """Write everything that is due, and sleep until the next."""
        heap, settings = self._heap, self._settings
        while heap and heap[0][0] <= clock():
            due, _, stream = heapq.heappop(heap)
            if stream.connection.closed:
                continue
            self._lateness.append(clock() - due)
            if not stream.opened:
                self._open(stream)
                stream.due += settings.ttft
            elif self._advance(stream):
                stream.due += settings.tbt * settings.tokens_per_chunk
            else:
                continue
            self._order += 1
            stream.due = self._thawed(stream.due)
            heapq.heappush(heap, (stream.due, self._order, stream))
        if heap:
            self._timer.arm(heap[0][0])

    def _open(self, stream: Stream) -> None:
        """The head of the answer; in a chat with the role chunk, which is no token."""
        stream.opened = True
        stream.connection.write(STREAM_HEAD + (event(chunk(True, None, None)) if stream.chat else b""))

    def _advance(self, stream: Stream) -> bool:
        """Write one chunk. Returns whether another will follow."""
        if stream.fault != "none" and (stream.sent or stream.left <= self._settings.tokens_per_chunk):
            self._fail(stream)
            return False
        tokens = min(stream.left, self._settings.tokens_per_chunk)
        stream.sent += tokens
        stream.left -= tokens
        if stream.left:
            stream.connection.write(self._chunks[stream.chat])
            return True
        stream.connection.write(self._ending(stream, tokens))
        return False

    def _ending(self, stream: Stream, tokens: int) -> bytes:
        """The last chunk, the usage and `[DONE]`."""
        last = event(chunk(stream.chat, WORD * tokens, "length"))
        if self._settings.report_usage:
            total = stream.prompt_tokens + stream.sent
            usage = {"prompt_tokens": stream.prompt_tokens, "completion_tokens": stream.sent, "total_tokens": total}
            last += event({**chunk(stream.chat, "", None), "choices": [], "usage": usage})
        return last + http_chunk(b"data: [DONE]\n\n") + http_chunk(b"")

    def _fail(self, stream: Stream) -> None:
        """Go wrong, after the first chunk or instead of the only one; a stall is to do nothing more."""
        if stream.fault == "error_event":
            stream.connection.write(event({"error": {"message": "a fault of the mock"}}) + http_chunk(b""))
        elif stream.fault == "garbage":
            stream.connection.write(http_chunk(b"data: \xff\x00 not JSON\n\n") + http_chunk(b""))
        elif stream.fault == "cut":
            stream.connection.close()


async def serve_mock(settings: MockSettings, port: int, on_ready: Callable[[str], None]) -> None:
    """Serve until SIGINT or SIGTERM. Raises `UserError` when the port is taken."""
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    server = MockServer(settings)
    try:
        listener = await loop.create_server(lambda: HttpConnection(server.handle), HOST, port, backlog=4096)
    except OSError as error:
        raise UserError(f"--port {port} of {HOST} cannot be used: {error.strerror}; take another or 0") from error
    on_ready(f"http://{HOST}:{listener.sockets[0].getsockname()[1]}")
    with without_collector():
        await stop.wait()
    listener.close()


def check_mock(settings: MockSettings) -> None:
    """Raise `ConfigError` for flags that change nothing beside the others, and for a freeze without an end."""
    if bool(settings.freeze_every) != bool(settings.freeze_for):
        raise ConfigError("--freeze_every and --freeze_for act only together; give both, each above 0")
    if settings.freeze_for and settings.freeze_for >= settings.freeze_every:
        raise ConfigError(
            f"--freeze_for {settings.freeze_for:g} leaves no time to answer in; give less than --freeze_every "
            f"{settings.freeze_every:g}"
        )
    if settings.fault == "none" and settings.fault_share != 1:
        raise ConfigError("--fault_share has no effect here: it needs a --fault other than none")


def run_mock(settings: MockSettings, port: int | None = None, on_ready: Callable[[str], None] | None = None) -> int:
    """Serve until interrupted. Returns the exit code."""
    check_mock(settings)
    raise_file_limit()

    def announce(url: str) -> None:
        print(f"mock server at {url} (TTFT {settings.ttft:g} s, TBT {settings.tbt:g} s); Ctrl-C ends it", flush=True)

    with first_served():
        run_loop(serve_mock(settings, settings.port if port is None else port, on_ready or announce))
    return 0


def main() -> int:
    """`python -m bladellm_tools.bench.mock [JSON of the settings]`: prints the URL in one line, and serves."""
    values = json.loads(sys.argv[1]) if len(sys.argv) > 1 else {}
    with contextlib.suppress(KeyboardInterrupt):
        return run_mock(MockSettings(**values), on_ready=lambda url: print(url, flush=True))
    return 0


if __name__ == "__main__":
    sys.exit(main())
