"""The server of tests that ask the engine itself and change nothing of it: its start takes as long as many of them."""

from collections.abc import Iterator

import pytest

from tests.support.live import LiveServer


@pytest.fixture(scope="session")
def real_server(device: str) -> Iterator[LiveServer]:
    """The engine itself on the model of the repository, under two names."""
    flags = {"device": device, "dtype": "float32", "kv_cache_gib": 0.06}
    with LiveServer("real", served_model_name=["demo", "alias"], **flags) as live:
        yield live
