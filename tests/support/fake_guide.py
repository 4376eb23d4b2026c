"""Constraints in the fake engine: the runtime's own compiler, and a random allowed token at every step."""

import random
from concurrent.futures import Future
from pathlib import Path

import numpy as np

from bladellm_runtime.guided.backend import Compiled, Matcher
from bladellm_runtime.guided.compiler import Compiler
from bladellm_runtime.guided.llguidance_backend import LlguidanceBackend
from bladellm_runtime.guided.vocabulary import allowed_tokens, vocabulary_of
from bladellm_runtime.request import Constraint
from bladellm_runtime.text.tokenizer import Tokenizer
from bladellm_runtime.wire.messages import EngineStats

CLOSING = (b'"', b"}", b"]", b",", b":", b"0", b".", b" ")
"""Texts that bring a JSON text nearer to its end."""
CLOSING_SHARE = 0.6


class FakeGuide:
    """The constraints of a fake engine, whose vocabulary is that of the tokenizer in `folder`."""

    def __init__(self, folder: Path, vocab_size: int, end_ids: list[int], cache_bytes: int) -> None:
        self._vocabulary = vocabulary_of(Tokenizer.load(folder), vocab_size, end_ids)
        self._compiler = Compiler(LlguidanceBackend(self._vocabulary), max_bytes=cache_bytes)
        self._row = np.zeros(self._vocabulary.words, np.int32)
        self._closing = {token for token, piece in enumerate(self._vocabulary.pieces) if piece in CLOSING}
        self._masks = 0

    def compiling(self, constraint: Constraint) -> "Future[Compiled]":
        """The compiled constraint, some time later."""
        return self._compiler.submit(constraint)

    def matcher(self, compiled: Compiled) -> Matcher:
        return self._compiler.matcher(compiled)

    def next_token(self, matcher: Matcher, key: int, position: int) -> int:
        """A token that the matcher allows and has taken: an end token where nothing else may follow. Raises
        `MatcherError`."""
        matcher.fill_mask(self._row)
        self._masks += 1
        rng, allowed = random.Random(key * 4096 + position), allowed_tokens(self._row).tolist()
        closing = [token for token in allowed if token in self._closing or token in self._vocabulary.end_ids]
        token = rng.choice(closing if closing and rng.random() < CLOSING_SHARE else allowed)
        assert matcher.accept(token)
        return token

    def count(self, stats: EngineStats) -> None:
        """Fill in what is counted of constraints."""
        counts = self._compiler.counts()
        stats.guided_hits, stats.guided_misses = counts.hits, counts.misses
        stats.guided_refused, stats.guided_compile_seconds = counts.refused, counts.seconds
        stats.guided_cache_bytes, stats.guided_masks = counts.byte_count, self._masks
