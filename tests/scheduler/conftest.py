"""Granules of a few tokens can be shared: attention reads whole blocks of 128."""

import importlib.util
import sys
from collections.abc import Iterator
from types import ModuleType
from unittest import mock

import pytest

from tests.conftest import ROOT


@pytest.fixture(scope="package", autouse=True)
def any_granule_is_shared() -> Iterator[None]:
    with mock.patch("bladellm_kernels.prefix_groups.ALIGNED", 1):
        yield


@pytest.fixture(scope="module")
def simulate_policy() -> Iterator[ModuleType]:
    """recipes/benchmarks/simulate_policy.py."""
    path = ROOT / "recipes" / "benchmarks" / "simulate_policy.py"
    spec = importlib.util.spec_from_file_location("simulate_policy", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]
