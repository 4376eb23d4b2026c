"""An engine's process, started before it can be told what to serve: it imports what it needs meanwhile."""

import contextlib
import subprocess
import sys
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from bladellm_runtime.config import EngineArgs
from bladellm_runtime.errors import UserError

DEFAULT_COMMAND = (sys.executable, "-m", "bladellm_runtime.engine.process")


class EngineProcess:
    """A child whose standard input gets the launch line, and stays open for as long as this process lives.

    As a context it ends the child where that still runs behind it.
    """

    def __init__(self, command: Sequence[str] = DEFAULT_COMMAND) -> None:
        """Start it in a session of its own, so that Ctrl-C reaches the front end alone, which then drains.

        Raises `UserError` where the command cannot be run.
        """
        try:
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
        except OSError as error:
            raise UserError(f"the engine command {command[0]} cannot be run: {error.strerror}") from error

    @property
    def pid(self) -> int:
        """The process id, also after its end."""
        return self._process.pid

    def write(self, line: bytes) -> None:
        """Tell it something; to one that has ended, nothing, as its exit code says the rest."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError, ValueError):
            self._process.stdin.write(line)
            self._process.stdin.flush()

    def wait(self) -> int:
        """Block until it has ended; its exit code, or less than 0 for the signal that killed it."""
        return self._process.wait()

    def end_input(self) -> None:
        """Close its standard input, upon which it stops."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()

    def kill(self) -> None:
        """End it at once, if it still runs."""
        self._process.kill()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()
        self.end_input()
        self.wait()


def engine_process(
    args: EngineArgs, command: Sequence[str] = DEFAULT_COMMAND
) -> contextlib.AbstractContextManager[EngineProcess | None]:
    """The engine's process, for as long as the context lasts; None where it is to be a thread of this process."""
    return contextlib.nullcontext() if args.disable_frontend_multiprocessing else EngineProcess(command)
