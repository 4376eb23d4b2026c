"""The client: one streamed request, its parts stamped as they arrive and read when there is time."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import orjson

from bladellm_tools.bench.answer import AnswerReader, error_text, shorten
from bladellm_tools.bench.connection import ConnectionPool
from bladellm_tools.bench.pacing import clock
from bladellm_tools.bench.records import Outcome, PlannedRequest, RequestRecord
from bladellm_tools.bench.target import Target

KEPT_BYTES = 256 * 1024**2
PART_OVERHEAD_BYTES = 100
"""Of a time stamp, a bytes object and their places in lists."""
SUCCESS = 200
MAX_ERROR_BODY_BYTES = 4096

Failure = tuple[Outcome, str]


@dataclass(frozen=True, slots=True)
class LiveEvent:
    """What a live view is told, on the event loop and therefore to be handled in microseconds.

    Of "first_token" and "ended" events, the record has its times so far; token counts and the outcome OK are settled
    after the level.
    """

    kind: Literal["sent", "first_token", "ended"]
    at: float
    record: RequestRecord


class Memory:
    """How many raw bytes a level may still keep for later."""

    def __init__(self, left: int = KEPT_BYTES) -> None:
        self.left = left


class Answer:
    """The body of one answer: read at once up to the first token, then kept raw while memory allows.

    Reading JSON while other streams wait for their time stamps would make their times later than they were.
    """

    def __init__(self, record: RequestRecord, memory: Memory, keep_text: bool = False) -> None:
        self.record = record
        self.reader = AnswerReader(record, keep_text)
        self.failure: Failure | None = None
        self._memory = memory
        self._times: list[float] = []
        self._parts: list[bytes] = []
        self._kept = 0

    def take(self, now: float, part: bytes) -> None:
        """One part, and when it came."""
        size = len(part) + PART_OVERHEAD_BYTES
        if self.record.times and self._memory.left >= size:
            self._memory.left -= size
            self._kept += size
            self._times.append(now)
            self._parts.append(part)
        else:
            self.read_kept()
            self.reader.feed(now, part)

    def read_kept(self) -> None:
        """Read what was kept, and free its memory."""
        for now, part in zip(self._times, self._parts, strict=True):
            self.reader.feed(now, part)
        self._times.clear()
        self._parts.clear()
        self._memory.left += self._kept
        self._kept = 0


class Receiver:
    """Takes one answer off the connection; `client` learns that the server lives."""

    def __init__(self, client: "Client", answer: Answer) -> None:
        self._client = client
        self._answer = answer
        self._error_body = b""

    def take_head(self, now: float, status: int) -> None:
        """The status line and the headers are there."""
        client, record = self._client, self._answer.record
        record.headers = client.last_sign = now - client.zero
        record.status = status
        client.refused = 0

    def take_body(self, now: float, part: bytes) -> None:
        """A part of the body, at the `clock()` time `now`."""
        client, answer = self._client, self._answer
        client.last_sign = now - client.zero
        if answer.record.status != SUCCESS:
            self._error_body += part[: MAX_ERROR_BODY_BYTES - len(self._error_body)]
            return
        waiting = not answer.record.times
        answer.take(client.last_sign, part)
        if waiting and answer.record.times:
            client.tell("first_token", answer.record)

    def finish(self) -> None:
        """The answer has ended as HTTP has it."""
        status = self._answer.record.status or 0
        if status != SUCCESS:
            self._answer.failure = (Outcome.HTTP_ERROR, http_error_text(status, self._error_body))


class Client:
    """Asks one target. Times in records are seconds after `zero`.

    `open` is how many requests wait for the end of their answer, `last_sign` when the server last sent anything (or
    was last asked after a time of rest), `refused` how many connections failed since an answer last began.
    """

    def __init__(
        self,
        target: Target,
        zero: float,
        on_event: Callable[[LiveEvent], None] | None = None,
        memory: Memory | None = None,
    ) -> None:
        self.zero = zero
        self.open = 0
        self.last_sign = 0.0
        self.refused = 0
        self._target = target
        self._pool = ConnectionPool(target.url, target.headers)
        self._on_event = on_event
        self._memory = memory or Memory()

    def close(self) -> None:
        """Hang up."""
        self._pool.close()

    def now(self) -> float:
        """Seconds after `zero`."""
        return clock() - self.zero

    def expect(self, planned: PlannedRequest, intended: float) -> Answer:
        """The empty answer to a request that should leave at `intended`."""
        record = RequestRecord(
            planned.index, intended, asked_tokens=planned.output_len, prompt_tokens=planned.input_len
        )
        return Answer(record, self._memory, keep_text=self._target.tokenizer is not None)

    async def ask(self, planned: PlannedRequest, answer: Answer) -> None:
        """Send one request and take its answer. No server and no network makes this raise; cancellation does."""
        record = answer.record
        receiver = Receiver(self, answer)
        record.sent = self.now()
        if not self.open:
            self.last_sign = record.sent
        self.open += 1
        self.tell("sent", record)
        try:
            async with asyncio.timeout(self._target.timeout):
                await self._pool.post(self._target.body(planned), receiver)
                receiver.finish()
        except asyncio.CancelledError:
            answer.failure = (Outcome.CANCELLED, "it had not ended when the level was over")
            raise
        except Exception as error:
            answer.failure = failure_of(error, answered=record.headers is not None, timeout=self._target.timeout)
        finally:
            record.ended = self.now()
            self.open -= 1
            self._note_ending(answer)
            self.tell("ended", record)

    def _note_ending(self, answer: Answer) -> None:
        """Until the answer is read after the level, its outcome is what the transport knows."""
        answer.record.outcome = Outcome.OK if answer.failure is None else answer.failure[0]
        if answer.record.outcome is Outcome.CONNECT:
            self.refused += 1

    def tell(self, kind: Literal["sent", "first_token", "ended"], record: RequestRecord) -> None:
        """Tell the live view, if there is one."""
        if self._on_event is not None:
            self._on_event(LiveEvent(kind, self.now(), record))


def failure_of(error: Exception, answered: bool, timeout: float) -> Failure:
    """Which outcome an exception of the transport means; `answered`: the head of the answer had come."""
    if isinstance(error, TimeoutError):
        return Outcome.TIMEOUT, f"no end within {timeout:g} s"
    text = shorten(f"{error}".encode(errors="replace")) or type(error).__name__
    if isinstance(error, OSError):
        return (Outcome.CUT if answered else Outcome.CONNECT), text
    return Outcome.GARBAGE, text


def http_error_text(status: int, body: bytes) -> str:
    """`status 503: the server's message`."""
    try:
        parsed = orjson.loads(body)
        message = error_text(parsed.get("error", parsed)) if isinstance(parsed, dict) else shorten(body)
    except orjson.JSONDecodeError:
        message = shorten(body)
    return f"status {status}: {message}" if message else f"status {status}"
