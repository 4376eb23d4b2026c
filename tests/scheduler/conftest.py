"""Granules of a few tokens can be shared: attention reads whole blocks of 128."""

from collections.abc import Iterator
from unittest import mock

import pytest


@pytest.fixture(scope="package", autouse=True)
def any_granule_is_shared() -> Iterator[None]:
    with mock.patch("bladellm_kernels.prefix_groups.ALIGNED", 1):
        yield
