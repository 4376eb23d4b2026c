"""A forgotten context holds nobody up."""

import subprocess
import sys

import pytest

from bladellm_runtime.wire import contexts
from bladellm_runtime.wire.contexts import end_context, open_context
from bladellm_runtime.wire.transport import open_socket

FORGET = """
import gc, sys
import zmq
from bladellm_runtime.wire.contexts import open_context
from bladellm_runtime.wire.transport import open_socket

class Owner:
    def __init__(self, open):
        self.context = open()
        self.sockets = [open_socket(self.context) for _ in range(3)]
        self.itself = self

owner = Owner(zmq.Context if sys.argv[1] == "forgotten" else open_context)
del owner
gc.collect()
print("collected", flush=True)
"""


def collected(kind: str, seconds: float) -> bool:
    """Whether a collection of garbage with a context and its sockets ends within so many seconds."""
    try:
        done = subprocess.run([sys.executable, "-c", FORGET, kind], capture_output=True, timeout=seconds, check=True)
    except subprocess.TimeoutExpired as expired:
        return b"collected" in (expired.stdout or b"")
    return b"collected" in done.stdout


def test_the_collector_does_not_wait_for_a_forgotten_context():
    assert collected("kept", 60)


@pytest.mark.slow
def test_the_collector_waits_for_a_context_that_nobody_keeps():
    """Why contexts are kept; where this fails, `contexts` is needed no more."""
    assert not collected("forgotten", 20)


def test_an_ended_context_has_no_open_sockets_and_is_kept_no_more():
    context = open_context()
    socket = open_socket(context)
    assert context in contexts._open
    end_context(context, linger_ms=0)
    assert socket.closed
    assert context.closed
    assert context not in contexts._open
    end_context(context)
