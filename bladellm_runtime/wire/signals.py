"""The signals that stop a server: the process that was started handles them, and tells those it has started."""

import signal

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def leave_signals_to_starter() -> None:
    """Ignore them in this process: whoever sends one to all processes, as service managers do, means to stop once."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
