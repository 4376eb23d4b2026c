"""Options and fixtures every test shares."""

import faulthandler
import gc
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from bladellm_runtime.garbage import keep_objects
from bladellm_runtime.wire.contexts import _open
from tests.support.cases import resting
from tests.support.devices import lacking

ROOT = Path(__file__).parent.parent
DEMO = ROOT / "recipes" / "models" / "demo"
TESTBED = ROOT.parent / "shared" / "testbed"
TIMED = ("tests/bench/test_commands.py", "tests/bench/test_selftests_load.py")
"""Files whose tests measure times, one after another (fixture `alone`)."""

STUCK_SECONDS = 180
"""A process that is so much longer at a test, or between two, than the test's timeout has its threads written to
standard error and is ended: the timeout does not reach what waits in native code, nor what happens between tests."""

EXAMPLES = 30
"""Of each property in the default run, which draws others every time; Hypothesis' own number with the slow tests."""

STANDARD_ERROR = pytest.StashKey[int]()
COUNTED = pytest.StashKey[float]()
"""When the process would be ended, by `time.monotonic`."""

# A shell's background jobs ignore interrupts, and so would every command that a test starts and interrupts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--device", default="cpu", choices=("cpu", "cuda"), help="device of the engines under test")
    parser.addoption("--testbed", default=str(TESTBED), help="folder with the larger trained models")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests that measure times come first: they take longest, and share a process. Those whose GPU is not to be had are
    skipped. Without the slow tests, those not drawn of a family that takes turns are slow."""
    items.sort(key=lambda item: not item.nodeid.startswith(TIMED))
    for item in items:
        if reason := lacking(item):
            item.add_marker(pytest.mark.skip(reason=reason))
    if "not slow" in str(config.getoption("markexpr")):
        for item in resting(items):
            item.add_marker(pytest.mark.slow)


def pytest_configure(config: pytest.Config) -> None:
    """Keep the standard error of the process, which is not that of a test: tests' is caught. Without the slow tests,
    properties are tried with fewer random examples, unless they say how many."""
    config.stash[STANDARD_ERROR] = os.dup(2)
    if "not slow" in str(config.getoption("markexpr")):
        settings.register_profile("sampled", max_examples=EXAMPLES)
        settings.load_profile("sampled")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> None:
    """Count from here until the next test, or the end. It takes a thread: not for each of a second's tests."""
    own = item.get_closest_marker("timeout")
    timeout = own.args[0] if own and own.args else item.config.getoption("timeout") or item.config.getini("timeout")
    end = time.monotonic() + float(timeout or 0) + STUCK_SECONDS
    counted = item.config.stash.get(COUNTED, 0.0)
    if not counted <= end < counted + 1.0:
        item.config.stash[COUNTED] = end
        left = end - time.monotonic()
        faulthandler.dump_traceback_later(left, exit=True, file=item.config.stash[STANDARD_ERROR])


@pytest.hookimpl(tryfirst=True)
def pytest_collection(session: pytest.Session) -> None:
    """What collecting tests makes stays: collections of garbage would go through it again and again, for seconds."""
    if not session.config.pluginmanager.hasplugin("dsession"):  # that only hands out what its workers collect
        gc.disable()


def pytest_collection_finish() -> None:
    """Collections of garbage need not walk the tests and modules, which stay: it would take each of them 0.4 s. They
    are as seldom as in a server: a tenth of the time of tests of the engine went into them."""
    keep_objects()
    gc.enable()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """`--dist loadfile`, but the files that measure times go to one process together: two would wait for each other."""
    if config.getoption("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class TimedFilesTogether(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return TIMED[0] if nodeid.startswith(TIMED) else super()._split_scope(nodeid)

    return TimedFilesTogether(config, log)


@pytest.fixture(autouse=True)
def ended_contexts() -> Iterator[None]:
    """No test may leave a ZMQ context open that it opened: whoever opens one ends it, also when something fails."""
    before = len(_open)
    yield
    assert len(_open) <= before, "the test, or what it tests, has left ZMQ contexts open"


@pytest.fixture(scope="session")
def device(request: pytest.FixtureRequest) -> str:
    """Where the engines under test run: `--device cpu` (default) or `cuda`."""
    return str(request.config.getoption("--device"))


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """The small trained Llama that the repository ships."""
    return DEMO


@pytest.fixture(scope="session")
def target_model(request: pytest.FixtureRequest) -> Path:
    """A 26M-parameter trained Llama kept beside the checkout; the test skips where it is absent."""
    folder = Path(request.config.getoption("--testbed")) / "target"
    if not (folder / "config.json").exists():
        pytest.skip("the testbed's target model is not beside the checkout")
    return folder
