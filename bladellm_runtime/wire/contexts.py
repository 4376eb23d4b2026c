"""ZMQ contexts that only their owners end.

A context that is left to the garbage collector together with its sockets is ended there, before them, and waits for
them for ever, in whichever thread the collector happens to run. One that is opened here is kept until it is ended:
where an owner forgets it, or cannot end it for a thread that still uses a socket, nothing waits.
"""

from typing import Any

import zmq

_open: set[zmq.Context[Any]] = set()


def open_context() -> zmq.Context[Any]:
    """A context of its own, which is kept until `end_context`."""
    context: zmq.Context[Any] = zmq.Context()
    _open.add(context)
    return context


def end_context(context: zmq.Context[Any], linger_ms: int | None = None) -> None:
    """Close the context's sockets, and wait until what they sent has left, or their linger times (or `linger_ms`) are
    over. For the one thread that uses them still."""
    context.destroy(linger=linger_ms)
    _open.discard(context)
