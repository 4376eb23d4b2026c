"""The back ends by name, and the vocabulary that they work on from a tokenizer's folder."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from bladellm_runtime.guided.backend import Backend
from bladellm_runtime.guided.fsm.backend import FsmBackend
from bladellm_runtime.guided.llguidance_backend import LlguidanceBackend
from bladellm_runtime.guided.vocabulary import Vocabulary, vocabulary_of
from bladellm_runtime.text.tokenizer import Tokenizer

BACKENDS: dict[str, Callable[[Vocabulary], Backend]] = {"llguidance": LlguidanceBackend, "fsm": FsmBackend}


def load_vocabulary(folder: Path, vocab_size: int, end_ids: Sequence[int]) -> Vocabulary:
    """The vocabulary of a model with `vocab_size` logits and the tokenizer in `folder`; takes seconds.

    end_ids: tokens at which the model's requests end, the tokenizer's own where there are none. Raises
    `CheckpointError` without a usable tokenizer, `ConfigError` without an end token.
    """
    tokenizer = Tokenizer.load(folder)
    vocabulary = vocabulary_of(tokenizer, vocab_size, end_ids)
    # Forced text must not be written with tokens that the model does not have.
    return vocabulary if tokenizer.vocab_size <= vocab_size else replace(vocabulary, encode=None)
