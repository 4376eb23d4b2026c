"""Engines on CUDA start fast: they capture a few graphs."""

from collections.abc import Iterator
from dataclasses import replace
from unittest import mock

import pytest

from bladellm_runtime.config import EngineArgs
from bladellm_runtime.engine.step_graphs import graph_sizes
from bladellm_runtime.guided.fsm.backend import FsmBackend
from tests.guided.samples import small_vocabulary

FEW_SIZES = [1, 4, 16]


@pytest.fixture(scope="session", autouse=True)
def few_graphs(device: str) -> Iterator[None]:
    """By default each of some hundred engines would capture 35 batch sizes; tests that ask for sizes get theirs."""
    with mock.patch("bladellm_runtime.engine.build_runner.graph_sizes", few_sizes if device == "cuda" else graph_sizes):
        yield


def few_sizes(args: EngineArgs) -> list[int]:
    asked = args.cuda_graph_batch_sizes or args.cuda_graph_max_batch_size
    return graph_sizes(args if asked else replace(args, cuda_graph_batch_sizes=FEW_SIZES))


@pytest.fixture(scope="session")
def fsm() -> FsmBackend:
    """Automata over a small vocabulary."""
    return FsmBackend(small_vocabulary())
