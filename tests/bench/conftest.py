"""What tests of the bench share: a lock for those that measure times."""

import fcntl
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from bladellm_tools.bench import endpoints, reporting


@pytest.fixture
def alone() -> Iterator[None]:
    """No other test with this fixture runs at the same time, in whichever process: two would measure each other.

    Other tests may; client and mock go before them where the system allows it.
    """
    with (Path(tempfile.gettempdir()) / "bladellm-bench-timing.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@pytest.fixture
def soon_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers that are started are asked more often than by default whether they answer."""
    monkeypatch.setattr(endpoints, "POLL_SECONDS", 0.02)


@pytest.fixture
def few_charts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reports without the charts of single levels, which take as long as a level; other tests have those."""
    monkeypatch.setattr(reporting, "run_charts", lambda levels: [])


@pytest.fixture
def no_charts(few_charts: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reports without any chart, for tests of what was measured, not of how it looks."""
    monkeypatch.setattr(reporting, "curve_charts", lambda levels, slo, crossings: [])
