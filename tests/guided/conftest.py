"""One small vocabulary and its back ends for the whole room; compilers that end with their test."""

from collections.abc import Iterator

import pytest

from bladellm_runtime.guided.compiler import Compiler
from bladellm_runtime.guided.fsm.backend import FsmBackend
from bladellm_runtime.guided.llguidance_backend import LlguidanceBackend
from bladellm_runtime.guided.vocabulary import Vocabulary
from tests.guided.samples import small_vocabulary


@pytest.fixture(scope="session")
def vocabulary() -> Vocabulary:
    return small_vocabulary()


@pytest.fixture(scope="session")
def llguidance(vocabulary: Vocabulary) -> LlguidanceBackend:
    return LlguidanceBackend(vocabulary)


@pytest.fixture(scope="session")
def fsm(vocabulary: Vocabulary) -> FsmBackend:
    return FsmBackend(vocabulary)


@pytest.fixture
def compiler(llguidance: LlguidanceBackend) -> Iterator[Compiler]:
    made = Compiler(llguidance)
    yield made
    made.close()
