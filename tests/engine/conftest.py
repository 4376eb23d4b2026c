"""Engines start fast: on CUDA they capture a few graphs, and what they read of a tokenizer is read once."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from unittest import mock

import pytest

from bladellm_runtime.config import EngineArgs
from bladellm_runtime.engine.step_graphs import graph_sizes
from bladellm_runtime.guided import backends
from bladellm_runtime.guided.backend import Backend
from bladellm_runtime.guided.fsm.backend import FsmBackend
from bladellm_runtime.guided.vocabulary import Vocabulary
from bladellm_runtime.text.tokenizer import Tokenizer
from tests.conftest import DEMO
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


@pytest.fixture(scope="package", autouse=True)
def demo_tokenizer_is_read_once() -> Iterator[None]:
    """Some three hundred engines of the repository's model share its tokenizer, and the back ends of constraints: each
    would take longer over them than over its weights. tests/guided and tests/server have those made anew."""
    load, tokenizer = backends.load_vocabulary, Tokenizer.load(DEMO)
    vocabularies: dict[tuple[object, ...], Vocabulary] = {}

    def load_vocabulary(folder: Path, vocab_size: int, end_ids: Sequence[int]) -> Vocabulary:
        if folder != DEMO:
            return load(folder, vocab_size, end_ids)
        key = vocab_size, *end_ids
        return vocabularies.get(key) or vocabularies.setdefault(key, load(DEMO, vocab_size, end_ids))

    def sharing(backend: Callable[[Vocabulary], Backend]) -> Callable[[Vocabulary], Backend]:
        kept = cache(lambda key: backend(vocabularies[key]))

        def make(vocabulary: Vocabulary) -> Backend:
            keys = [key for key, known in vocabularies.items() if known is vocabulary]
            return kept(keys[0]) if keys else backend(vocabulary)

        return make

    def load_tokenizer(folder: Path) -> Tokenizer:
        return tokenizer if folder == DEMO else Tokenizer.load(folder)

    shared = {name: sharing(backend) for name, backend in backends.BACKENDS.items()}
    with (
        mock.patch("bladellm_runtime.engine.build.load_vocabulary", load_vocabulary),
        mock.patch("bladellm_runtime.engine.build.BACKENDS", shared),
        mock.patch("bladellm_runtime.llm.Tokenizer", mock.Mock(load=load_tokenizer)),
    ):
        yield


@pytest.fixture(scope="session")
def fsm() -> FsmBackend:
    """Automata over a small vocabulary."""
    return FsmBackend(small_vocabulary())
