"""The engine loop: messages in, steps, one message out a step, a heartbeat when idle."""

import logging
import threading
import time

from bladellm_runtime.engine.core import EngineCore
from bladellm_runtime.wire.messages import (
    AbortRequests,
    AddRequest,
    AttachFrontEnd,
    Delta,
    FrontMessage,
    MoveAdapter,
    RequestComing,
    RequestDelta,
    Shutdown,
    StepOutput,
)
from bladellm_runtime.wire.transport import HEARTBEAT_SECONDS, EnginePort

BLOCKED_SECONDS = 0.01
POLL_SECONDS = 0.001
"""The shortest time that a port can wait for messages."""
NAP_SECONDS = 0.0002
"""How often it is asked within a shorter one."""
STALL_SECONDS = 30.0

logger = logging.getLogger(__name__)


class EngineStalledError(RuntimeError):
    """Requests wait although nothing runs: a fault of the scheduler, reported instead of hanging for ever."""


class EngineLoop:
    """Serves one or several front ends from one `EngineCore` until a `Shutdown` message or `stop()`."""

    def __init__(self, core: EngineCore, port: EnginePort) -> None:
        self._core = core
        self._port = port
        self._stop = threading.Event()
        self._last_sent = 0.0
        self._last_progress = time.monotonic()

    def stop(self) -> None:
        """Ask the loop to end after the step in flight; callable from another thread."""
        self._stop.set()

    def run(self) -> None:
        """Loop until stopped. Raises whatever a step raises: the caller reports it and ends the process."""
        while not self._stop.is_set():
            deltas: list[Delta] = [*self._receive(self._patience())]
            while not self._stop.is_set() and (spare := self._core.spare_seconds()) > 0:
                deltas += self._receive_within(spare)
            deltas += self._step()
            now = time.monotonic()
            if deltas or now - self._last_sent >= HEARTBEAT_SECONDS:
                self._port.send(StepOutput(deltas, self._core.stats(now)))
                self._last_sent = now
        self._core.close()

    def _patience(self) -> float:
        """How long to wait for messages: not at all while steps can run."""
        if self._core.idle:
            return HEARTBEAT_SECONDS
        return BLOCKED_SECONDS if self._core.blocked or self._core.preparing else 0.0

    def _receive_within(self, seconds: float) -> list[RequestDelta]:
        """What comes within `seconds` or less, however short that is."""
        if seconds >= POLL_SECONDS:
            return self._receive(POLL_SECONDS)
        time.sleep(min(seconds, NAP_SECONDS))
        return self._receive(0.0)

    def _receive(self, timeout: float) -> list[RequestDelta]:
        deltas: list[RequestDelta] = []
        for message in self._port.receive(timeout):
            deltas += self._handle(message)
        return deltas

    def _handle(self, message: FrontMessage) -> list[RequestDelta]:
        match message:
            case AddRequest():
                return self._core.add(message)
            case RequestComing():
                self._core.announce()
                return []
            case MoveAdapter():
                return self._core.move_adapter(message)
            case AbortRequests(request_ids):
                return self._core.abort(request_ids)
            case AttachFrontEnd(front_end):
                self._port.attach(message)
                return self._core.abort_front_end(front_end)
            case Shutdown():
                self.stop()
                return []

    def _step(self) -> list[Delta]:
        now = time.monotonic()
        if self._core.idle:
            self._last_progress = now
            return []
        deltas = self._core.step()
        if not self._core.blocked:
            self._last_progress = now
        elif now - self._last_progress > STALL_SECONDS:
            raise EngineStalledError(f"requests wait but no step could be planned for {STALL_SECONDS:g} s")
        return deltas
