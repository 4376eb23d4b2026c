"""Options and fixtures every test shares."""

import signal
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
DEMO = ROOT / "recipes" / "models" / "demo"
TESTBED = ROOT.parent / "shared" / "testbed"
ALONE = "alone"
"""The fixture of tests that measure times: two of them would measure each other."""

# A shell's background jobs ignore interrupts, and so would every command that a test starts and interrupts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--device", default="cpu", choices=("cpu", "cuda"), help="device of the engines under test")
    parser.addoption("--testbed", default=str(TESTBED), help="folder with the larger trained models")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Who runs what with `--dist loadgroup`: a file's tests one process, so that what they share is made once.

    Tests that must not run beside each other go to one as well, before all others: they take longest.
    """
    for item in items:
        name = ALONE if ALONE in getattr(item, "fixturenames", ()) else str(item.path)
        item.add_marker(pytest.mark.xdist_group(name))
    items.sort(key=lambda item: ALONE not in getattr(item, "fixturenames", ()))


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
