"""What tests of the bench share: a lock for those that measure times."""

import fcntl
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def alone() -> Iterator[None]:
    """No other test with this fixture runs at the same time, in whichever process: two would measure each other.

    Other tests may; client and mock go before them where the system allows it.
    """
    with (Path(tempfile.gettempdir()) / "bladellm-bench-timing.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
