"""`breathe`: Python code that compiles lets the engine's thread run after each millisecond of work.

A thread that waits for the interpreter gets it from a busy one after 5 ms only, and the engine's thread gives it away
several times a step. A busy thread that sleeps gives it away at once.
"""

import threading
import time

WORK_SECONDS, PAUSE_SECONDS = 0.001, 0.0003
IDLE_SECONDS = 0.02
"""Longer than this between two calls, and the thread was doing something else, or was made to wait itself."""


class _Turn(threading.local):
    ends = 0.0


_turn = _Turn()


def breathe() -> None:
    """Sleep for a moment if this thread has worked for a millisecond; call it at least every tenth of that."""
    now = time.monotonic()
    if now < _turn.ends:
        return
    if now < _turn.ends + IDLE_SECONDS:
        time.sleep(PAUSE_SECONDS)
        now = time.monotonic()
    _turn.ends = now + WORK_SECONDS
