"""Errors a user can cause. Their text is one sentence: the cause, and the flag, file or field to change."""


class UserError(Exception):
    """Something the user can mend. Commands print it as one line, without a traceback, and exit with `exit_code`."""

    exit_code = 1


class ConfigError(UserError):
    """A flag or recipe value that cannot be used."""

    exit_code = 2


class CheckpointError(UserError):
    """A model folder that cannot be loaded; the text names the file and the key."""


class ParameterError(UserError, ValueError):
    """A request field that cannot be used; `param` names the field as the client wrote it."""

    def __init__(self, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


def one_line(error: Exception) -> str:
    """What another library says is wrong, short enough to be part of a sentence."""
    return " ".join(str(error).split())[:200]
