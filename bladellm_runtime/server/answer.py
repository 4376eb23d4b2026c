"""A generation as an HTTP answer: one body, or a stream of events with one write a step."""

import secrets
from dataclasses import dataclass
from time import monotonic
from typing import Self

from bladellm_runtime.server.chat import ChatCall
from bladellm_runtime.server.choice import Piece, TextWriter
from bladellm_runtime.server.completions import CompletionCall
from bladellm_runtime.server.exchange import BodyWriter, Exchange, Header
from bladellm_runtime.server.generation import Generation
from bladellm_runtime.server.limits import error_of
from bladellm_runtime.server.responses import DONE, Choice, ChunkFormatter, Kind, response_body


@dataclass(frozen=True, slots=True)
class Heading:
    """What is the same in every part of an answer."""

    kind: Kind
    id: str
    created: int
    model: str
    include_usage: bool
    continuous_usage: bool
    headers: tuple[Header, ...]

    @classmethod
    def of(cls, call: ChatCall | CompletionCall, created: int) -> Self:
        """The heading of a new answer to `call`."""
        kind: Kind = "chat" if isinstance(call, ChatCall) else "completion"
        prefix = "chatcmpl" if kind == "chat" else "cmpl"
        ignored = ",".join(call.ignored_fields).encode()
        return cls(
            kind=kind,
            id=f"{prefix}-{secrets.token_hex(12)}",
            created=created,
            model=call.model,
            include_usage=call.include_usage,
            continuous_usage=call.continuous_usage,
            headers=((b"x-ignored-fields", ignored),) if ignored else (),
        )


async def answer_whole(exchange: Exchange, generation: Generation, heading: Heading) -> None:
    """Wait for all choices and send them as one body. Raises `ApiError` when one of them failed."""
    choices: dict[int, Piece] = {}
    while not generation.finished:
        for index, piece in (await generation.next()).items():
            if index in choices:
                choices[index].merge(piece)
            else:
                choices[index] = piece
    if generation.error is not None:
        raise error_of(generation.error)
    answers = [
        Choice(index, piece.text, piece.finish or "stop", piece.logprobs) for index, piece in sorted(choices.items())
    ]
    body = response_body(heading.kind, heading.id, heading.created, heading.model, answers, generation.usage)
    await exchange.respond(200, body, heading.headers)


async def answer_stream(exchange: Exchange, generation: Generation, heading: Heading) -> None:
    """Send pieces as they come, those of one step in one write, and plain tokens of an only choice without pieces.

    The answer begins with its first piece, so that whatever goes wrong before it still has an HTTP status: raises
    `ApiError` then. Later an error becomes the last event before the closing one.
    """
    events = StreamEvents(heading, generation)
    pieces = await generation.next()
    if not pieces and generation.error is not None:
        raise error_of(generation.error)
    await exchange.start_stream(heading.headers)
    writer = exchange.writer
    if writer is not None:
        # Most tokens go this way, at once or at the end of their step; the loop has those for which the client was too
        # slow.
        generation.write_through(lambda: writer.write(lambda: events.of(generation.take())), events.text_writer(writer))
    while not generation.finished:
        chunk = events.of(pieces)
        if chunk:
            # The generation shows how long the client has not read.
            generation.blocked_since = monotonic()
            await exchange.send({"type": "http.response.body", "body": chunk, "more_body": True})
            generation.blocked_since = None
        await generation.news()
        pieces = generation.take()
    generation.blocked_since = monotonic()
    await exchange.end(events.of(pieces) + events.ending())


class StreamEvents:
    """Formats the events of one stream."""

    def __init__(self, heading: Heading, generation: Generation) -> None:
        self._generation = generation
        self._heading = heading
        self._opened: set[int] = set()
        self._format = ChunkFormatter(
            heading.kind,
            heading.id,
            heading.created,
            heading.model,
            include_usage=heading.include_usage,
            continuous_usage=heading.continuous_usage,
        )

    def of(self, pieces: dict[int, Piece]) -> bytes:
        """The events of some pieces; a piece without text, such as half a character, has none."""
        if len(pieces) == 1:
            [(index, piece)] = pieces.items()
            return self._chunk(index, piece)
        return b"".join([self._chunk(index, piece) for index, piece in pieces.items()])

    def text_writer(self, writer: BodyWriter) -> TextWriter | None:
        """Writes an event with a given text, already JSON, as the next of a first choice that has begun; None where an
        event tells more."""
        return None if self._heading.continuous_usage else writer.between(*self._format.around_text(0))

    def ending(self) -> bytes:
        """The events that end the stream: the error or, if asked for, the usage; then `[DONE]`."""
        error = self._generation.error
        if error is not None:
            return self._format.error(error_of(error)) + DONE
        if self._heading.include_usage:
            return self._format.usage(self._generation.usage) + DONE
        return DONE

    def _chunk(self, index: int, piece: Piece) -> bytes:
        opening = b""
        if index not in self._opened:
            self._opened.add(index)
            opening = self._format.first(index)
        if not piece.text and piece.finish is None and not piece.logprobs:
            return opening
        usage = self._generation.usage if self._heading.continuous_usage else None
        return opening + self._format.delta(index, piece.text, piece.logprobs, piece.finish, usage)
