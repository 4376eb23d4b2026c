"""A request being generated: all its choices together, from submission to the last piece, error or abort."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import monotonic

from bladellm_runtime.lora.names import Adapter
from bladellm_runtime.request import Constraint, FinishReason, SamplingParams
from bladellm_runtime.server.choice import Piece, RunningChoice, TextWriter
from bladellm_runtime.server.limits import Failure
from bladellm_runtime.server.responses import Usage
from bladellm_runtime.server.state import ServerState
from bladellm_runtime.wire.messages import AddRequest

MAX_UNREAD = 65536
"""Tokens and log-probabilities that may wait for a slow reader before its request is aborted."""


@dataclass(frozen=True, slots=True)
class PromptWork:
    """One prompt, ready for the engine: its tokens, parameters that fit it, the text to echo and what its answers must
    satisfy, if any."""

    tokens: list[int]
    params: SamplingParams
    echo: str | None = None
    cache_salt: str = ""
    constraint: Constraint | None = None


class Generation:
    """Choices of one HTTP request in the engine. Used by its handler, ended from outside through `fail`.

    The pieces of a choice that arrive while the handler is busy are merged, so what waits is one piece a choice.
    """

    def __init__(
        self,
        state: ServerState,
        prompts: Sequence[PromptWork],
        adapter: Adapter | None,
        arrival: float,
        drop_connection: Callable[[], None],
    ) -> None:
        self._state = state
        self._prompts = prompts
        self.adapter = adapter
        self._drop_connection = drop_connection
        self._pending: dict[int, Piece] = {}
        self._unread = 0
        self._unfinished = 0
        self._loop = asyncio.get_running_loop()
        self._write: Callable[[], bool] | None = None
        self._text_writer: TextWriter | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._choices: list[RunningChoice] = []
        self._aborted = False
        self.error: Failure | None = None
        self.arrival = arrival
        self.started = False
        """True after the first token."""
        self.blocked_since: float | None = None
        """When the handler began to wait for the client to read, while it does."""

    @property
    def finished(self) -> bool:
        """True when `next` has nothing more to give."""
        return self._ended and not self._pending

    @property
    def _ended(self) -> bool:
        """All choices ended, or the request failed: no more pieces will come."""
        return self._unfinished == 0 or self.error is not None

    @property
    def usage(self) -> Usage:
        """Tokens so far; each prompt counts once, however many choices it has."""
        prompt_tokens = sum(len(prompt.tokens) for prompt in self._prompts)
        # Of a prompt's choices the later ones find in the cache what the first has computed.
        cached_tokens = sum(choice.cached_tokens for choice in self._choices if choice.request.choice == 0)
        return Usage(prompt_tokens, sum(choice.completion_tokens for choice in self._choices), cached_tokens)

    def submit(self) -> None:
        """Hand every choice to the engine; the choices of a prompt follow each other."""
        for prompt in self._prompts:
            self._state.metrics.max_tokens.observe(prompt.params.max_tokens or 0)
            for number in range(prompt.params.n):
                self._submit_choice(prompt, number)
        self._state.generations.add(self)

    async def next(self) -> dict[int, Piece]:
        """The pieces that have come since the last call, by choice, waiting for the first; none at the end."""
        await self.news()
        return self.take()

    def news(self) -> asyncio.Future[None]:
        """Done once there is a piece to take, or the end. A plain future: awaiting it costs no coroutine."""
        self._waiter = self._loop.create_future()
        if self._pending or self._ended:
            self._waiter.set_result(None)
        else:
            self._let_write()
        return self._waiter

    def take(self) -> dict[int, Piece]:
        """The pieces that have come since they were last taken, by choice."""
        pieces, self._pending, self._unread = self._pending, {}, 0
        return pieces

    def write_through(self, write: Callable[[], bool], text_writer: TextWriter | None) -> None:
        """From now on write pieces with `write` at the end of each step, while the handler waits for news.

        `write` takes the pieces and returns True, or returns False if it cannot: then the handler gets its news.
        `text_writer` writes what one token of an only choice says, without a piece.
        """
        self._write = write
        if len(self._choices) == 1:
            self._text_writer = text_writer

    def flush(self) -> None:
        """The step that brought pieces is over."""
        if self._waiter is None or self._waiter.done():
            return  # The handler is busy, and will take them itself.
        if self._ended or self._write is None or not self._write():
            self._wake()
        else:
            self._let_write()

    def fail(self, code: str) -> None:
        """End the request with an error, which the handler reports; the engine is told to stop."""
        self._fail(Failure(code))

    def give_up_reader(self) -> None:
        """End the request of a client that does not read, and its connection, through which nothing can be said."""
        self.fail("slow_reader")
        self._drop_connection()

    def close(self) -> None:
        """Release everything; whatever still runs is aborted."""
        self._abort()
        self._state.generations.discard(self)
        # Both refer back to this object; without them it is freed at once, not by the garbage collector.
        self._choices = []
        self._write = self._text_writer = None

    def _submit_choice(self, prompt: PromptWork, number: int) -> None:
        client = self._state.client
        request = AddRequest(
            client.next_id(),
            prompt.tokens,
            prompt.params,
            number,
            self.arrival,
            prompt.cache_salt,
            prompt.constraint,
            "" if self.adapter is None else self.adapter.key,
        )
        choice = RunningChoice(
            len(self._choices), request, prompt.echo, self._state.tokenizer, self._state.metrics, self._take
        )
        self._choices.append(choice)
        self._unfinished += 1
        client.submit(request, choice.on_delta, choice)

    def _let_write(self) -> None:
        """The handler waits, and nothing is there to be written before the next token."""
        if self._text_writer is not None and self._choices[0].plain:
            self._choices[0].write = self._text_writer

    def _take(self, choice: RunningChoice, piece: Piece, error: Failure | None) -> None:
        """Keep a piece for the handler; called by the choice for every delta."""
        self.started = True
        choice.write = None
        if choice.stopped_early and piece.finish is not None:
            self._state.client.abort([choice.request.request_id])
        if error is not None:
            self._fail(error)
            return
        waiting = self._pending.get(choice.index)
        if waiting is None:
            self._pending[choice.index] = piece
        else:
            waiting.merge(piece)
        if piece.finish is not None:
            self._unfinished -= 1
        self._unread += 1 + _entries(piece)
        if self._unread > MAX_UNREAD:
            self.give_up_reader()
        self._state.touched.append(self)

    def _fail(self, failure: Failure) -> None:
        if not self._ended:
            self.error = failure
            self._abort()
            self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _abort(self) -> None:
        """Tell the engine to stop what still runs, once."""
        running = [choice.request.request_id for choice in self._choices if not choice.finished]
        if running and not self._aborted:
            self._aborted = True
            self._state.client.abort(running)
            self._state.metrics.finished[FinishReason.ABORT.value] += len(running)


def _entries(piece: Piece) -> int:
    """Log-probabilities in a piece, which weigh as much as a token each."""
    return sum(1 + len(entry.top) for entry in piece.logprobs) if piece.logprobs else 0


def expire(state: ServerState) -> None:
    """End the requests whose time is up: too long without a first token, or without being read."""
    now = monotonic()
    for generation in list(state.generations):
        if not generation.started and now - generation.arrival > state.args.max_queue_time:
            generation.fail("queue_timeout")
        blocked = generation.blocked_since
        if blocked is not None and now - blocked > state.args.send_timeout:
            generation.give_up_reader()
