"""The engine process: reads its arguments from standard input, serves until told to stop or the front end is gone.

Run by the front end as `python -m bladellm_runtime.engine.process`. The first line of standard input is JSON,
`{"address": ..., "args": {...}}`, and may come late; the rest never comes: end of file means that the front end has
died, or does not want the engine.
"""

import logging
import os
import sys
import threading
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from bladellm_runtime.config import EngineArgs
from bladellm_runtime.errors import UserError
from bladellm_runtime.garbage import collect_seldom, keep_objects
from bladellm_runtime.logs import log_to_stderr
from bladellm_runtime.ranks.group import Home
from bladellm_runtime.wire.messages import EngineFailed
from bladellm_runtime.wire.signals import leave_signals_to_starter
from bladellm_runtime.wire.transport import EnginePort, FrontEndGone

if TYPE_CHECKING:
    from bladellm_runtime.engine.loop import EngineLoop

ORPHAN_GRACE_SECONDS = 5.0

KEPT: list[BaseException] = []
"""Errors of a lost device, with all that their frames hold: freeing it would ask the device, and end the process before
the front end has been told why."""

logger = logging.getLogger(__name__)


class Launch(msgspec.Struct, forbid_unknown_fields=True):
    """The first line of standard input."""

    address: str
    args: EngineArgs


def run_engine(
    port: EnginePort, args: EngineArgs, on_loop: "LoopHolder | None" = None, folder: Path | None = None
) -> int:
    """Build the engine, announce it, and serve until the end; returns the exit code. folder: a private one for files.

    A failure is told to the front end as `EngineFailed` and never raised: the process must end in order.
    """
    # Imported here, as they load torch, which a process without an engine does without.
    from bladellm_runtime.engine.build import build_engine
    from bladellm_runtime.engine.loop import EngineLoop
    from bladellm_runtime.engine.step_errors import DeviceLostError

    try:
        engine = build_engine(args, home=Home(folder, partial(last_words, port)))
        port.send(engine.ready)
        loop = EngineLoop(engine.core, port)
        if on_loop is not None:
            on_loop.set(loop)
        keep_objects()
        loop.run()
    except FrontEndGone:
        return 1
    except DeviceLostError as error:
        logger.debug("the device was lost", exc_info=True)
        KEPT.append(error)
        port.send(EngineFailed(str(error), error.exit_code))
        return error.exit_code
    except UserError as error:
        port.send(EngineFailed(str(error), error.exit_code))
        return error.exit_code
    except Exception as error:
        logger.exception("the engine stopped")
        port.send(EngineFailed(f"the engine stopped: {type(error).__name__}: {error}"))
        return 1
    return 0


def last_words(port: EnginePort, sentence: str) -> None:
    """Tell the front end why, and end the process, whose other threads hang."""
    port.end(EngineFailed(sentence))
    end(1)


class LoopHolder:
    """Stops the loop when the front end is gone, also when it goes before the loop exists."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loop: EngineLoop | None = None
        self._gone = False

    def set(self, loop: "EngineLoop") -> None:
        """Hand over the loop once it exists."""
        with self._lock:
            self._loop = loop
            if self._gone:
                loop.stop()

    def watch_stdin(self) -> None:
        """Block until standard input ends, then stop the loop, and after a grace the process."""
        while sys.stdin.buffer.read(4096):
            pass
        with self._lock:
            self._gone = True
            if self._loop is not None:
                self._loop.stop()
        threading.Event().wait(ORPHAN_GRACE_SECONDS)
        # A step that hangs must not leave an orphan holding the GPU.
        os._exit(1)


def import_engine() -> None:
    """Import what `run_engine` needs, torch above all."""
    import bladellm_runtime.engine.build
    import bladellm_runtime.engine.loop  # noqa: F401


def main() -> int:
    """Entry point of the process; returns its exit code."""
    leave_signals_to_starter()
    collect_seldom()
    # The front end has started this process before it looks at its own arguments.
    import_engine()
    line = sys.stdin.buffer.readline()
    if not line:
        return 1
    launch = msgspec.json.decode(line, type=Launch)
    log_to_stderr(launch.args.log_level, "engine")
    holder = LoopHolder()
    threading.Thread(target=holder.watch_stdin, name="front-end-watch", daemon=True).start()
    port = EnginePort(launch.address)
    try:
        folder = Path(launch.address.removeprefix("ipc://")).parent if launch.address.startswith("ipc://") else None
        return run_engine(port, launch.args, holder, folder)
    finally:
        port.close()


def end(code: int) -> None:
    """End the process at once."""
    logging.shutdown()
    # Not sys.exit: the watch thread blocks in a read that interpreter shutdown would wait for.
    os._exit(code)


if __name__ == "__main__":
    end(main())
