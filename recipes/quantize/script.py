"""How the scripts of this folder end: an error is one line, as in the commands."""

from collections.abc import Callable

from bladellm_runtime.errors import UserError
from bladellm_tools.console import fail

INTERRUPTED = 130


def exit_code(action: Callable[[], object], interrupted: str = "interrupted") -> int:
    """Run an action; returns 0, or the code of its error after a line on standard error."""
    try:
        action()
    except KeyboardInterrupt:
        fail(interrupted)
        return INTERRUPTED
    except UserError as error:
        fail(str(error))
        return error.exit_code
    except OSError as error:
        fail(str(error))
        return 1
    return 0
