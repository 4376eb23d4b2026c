"""What a probe answers."""

from enum import StrEnum

import msgspec

Rows = tuple[tuple[str, str], ...]


class Status(StrEnum):
    """PASS: fine. WARNING: it will run, with a loss. FAILED: it will not run as asked."""

    PASS = "PASS"
    WARNING = "WARNING"
    FAILED = "FAILED"


class Finding(msgspec.Struct, frozen=True):
    """A probe's verdict; `hint` says what to do about it, `table` holds (name, value) rows worth printing."""

    status: Status
    detail: str
    hint: str = ""
    table: Rows = ()


def passed(detail: str, table: Rows = ()) -> Finding:
    """All is well."""
    return Finding(Status.PASS, detail, "", table)


def warned(detail: str, hint: str = "", table: Rows = ()) -> Finding:
    """It will run, with a loss."""
    return Finding(Status.WARNING, detail, hint, table)


def failed(detail: str, hint: str = "", table: Rows = ()) -> Finding:
    """It will not run as asked."""
    return Finding(Status.FAILED, detail, hint, table)
