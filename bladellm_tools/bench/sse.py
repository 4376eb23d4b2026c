"""Server-sent events out of raw bytes, at the cost of one split a read (WHATWG HTML, section 9.2, server-sent events).

Only the data of events is wanted: comments, event names, ids and retry times are dropped. Two things are more lenient
than the standard: an event that the end of the stream cuts short counts, and text that is no field is remembered.
"""

MAX_EVENT_BYTES = 2 * 1024**2
MAX_STRAY_BYTES = 200
FIELDS = (b"event", b"id", b"retry", b"")
"""Fields that are known and not wanted; a comment is a field without a name."""


class EventTooLongError(ValueError):
    """A server sent more than `MAX_EVENT_BYTES` without ending an event."""


class SseSplitter:
    """Cuts a byte stream into events, whatever the pieces it comes in.

    `stray` is the beginning of text that is not in the format at all, such as an HTML page.
    """

    def __init__(self) -> None:
        self._rest = b""
        self.stray = b""

    def feed(self, part: bytes) -> list[bytes]:
        """The data of the events that `part` completes. Raises `EventTooLongError`."""
        buffer = self._rest + part if self._rest else part
        held = b""
        if b"\r" in buffer:
            if buffer.endswith(b"\r"):  # perhaps half of a line end
                buffer, held = buffer[:-1], b"\r"
            buffer = buffer.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        blocks = buffer.split(b"\n\n")
        self._rest = blocks.pop() + held
        if len(self._rest) > MAX_EVENT_BYTES:
            raise EventTooLongError(f"an event of more than {MAX_EVENT_BYTES} bytes")
        return [data for block in blocks if (data := self._data(block)) is not None]

    def finish(self) -> list[bytes]:
        """The data of an event that the end of the stream left without its empty line."""
        rest, self._rest = self._rest.replace(b"\r", b"\n"), b""
        return [data for block in rest.split(b"\n\n") if (data := self._data(block)) is not None]

    def _data(self, block: bytes) -> bytes | None:
        """The data of one event, its lines joined; None for an event without any."""
        if block.startswith(b"data: ") and b"\n" not in block:
            return block[6:]
        lines = [data for line in block.split(b"\n") if line and (data := self._line(line)) is not None]
        return b"\n".join(lines) if lines else None

    def _line(self, line: bytes) -> bytes | None:
        name, _, value = line.partition(b":")
        if name == b"data":
            return value.removeprefix(b" ")
        if name not in FIELDS:
            self.stray = (self.stray + line)[:MAX_STRAY_BYTES]
        return None
