"""The default back end: llguidance (lexer by derivatives, Earley parser, masks over a token trie), all kinds.

https://github.com/guidance-ai/llguidance. It lets other Python threads run while it compiles and fills masks, never
raises, and bounds its own work; its limits below keep one constraint from costing much time or memory.
"""

import os
import re
from collections.abc import Sequence

import llguidance
import numpy as np

from bladellm_runtime.guided.backend import Matcher, MatcherError
from bladellm_runtime.guided.constraint import ConstraintError
from bladellm_runtime.guided.llguidance_grammar import Grammar, grammar_of
from bladellm_runtime.guided.llguidance_tokenizer import tokenizer_of
from bladellm_runtime.guided.schema_strings import URI_CHARS
from bladellm_runtime.guided.short_strings import PLAIN, Follower, ShortStrings
from bladellm_runtime.guided.vocabulary import Masks, Row, Vocabulary
from bladellm_runtime.request import Constraint

_BASE_BYTES, _BYTES_A_SOURCE_BYTE = 64 * 1024, 96
"""What a compiled constraint is counted with, on the safe side: the library does not tell, and resident memory grew by
0 to 150 kB a schema over hundreds of schemas, each followed for 40 tokens."""
_SHORT_STRING_BYTES = 400 * 1024
"""More for strings of limited length and the second matcher: it grew by 520 kB a schema, and 320 without the latter."""
_MOST_THREADS, _MOST_COPIES = 32, 16
"""A copy of a constraint costs a compilation and memory; with four rows each, 16 do for a step of 64."""
_SLICES = [
    *(f"{PLAIN}{{1,{most}}}" for most in (1, 2, 3, 4, 6, 8, 10, 15, 30)),
    f"{PLAIN}+",
    "[a-zA-Z0-9]+",
    f"[{URI_CHARS}]+",
]
"""Parts of the vocabulary allowed as a whole where any text of such characters is: in strings with a `maxLength`, in
formats, and for `.`, which is why line separators are left out."""
_NO_FORCING = '%llguidance {"no_forcing": true}\n'
"""For vocabularies without their tokenizer: do not narrow forced text to the tokens that it would write."""


class LlguidanceBackend:
    """`Backend` over one vocabulary."""

    name = "llguidance"

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary
        self._tokenizer = tokenizer_of(vocabulary, _SLICES)
        threads = max(1, min(_MOST_THREADS, len(os.sched_getaffinity(0)) * 4 // 5))
        self._executor = llguidance.LLExecutor(threads)
        self._short_strings = ShortStrings(vocabulary)
        self.copies = min(_MOST_COPIES, threads)
        self._openers = [vocabulary.pieces.index(piece) for piece in (b"{", b"[") if piece in vocabulary.pieces]

    def compile(self, constraint: Constraint, deadline: float) -> "LlguidanceCompiled":
        """`Backend.compile`; the library's own limits keep it far below any useful deadline."""
        grammar = grammar_of(constraint)
        try:
            return self._compiled(grammar, constraint)
        except ConstraintError:
            if grammar.simpler is None:
                raise
        return self._compiled(grammar.simpler, constraint)

    def _compiled(self, grammar: Grammar, constraint: Constraint) -> "LlguidanceCompiled":
        text = grammar.text if self.vocabulary.encode is not None else _NO_FORCING + grammar.text
        matcher = llguidance.LLMatcher(self._tokenizer, text, log_level=0, limits=_limits(grammar.max_symbols))
        problem = matcher.get_error() or "; ".join(matcher.get_grammar_warnings())
        if problem:
            raise ConstraintError(f"{constraint.field} cannot be used: {_clause(problem)}", constraint.field)
        follower = self._follower(grammar) if grammar.has_short_strings else None
        compiled = LlguidanceCompiled(matcher, self.vocabulary, len(text), follower)
        try:
            self._try(compiled)
        except MatcherError as error:
            raise ConstraintError(
                f"{constraint.field} cannot be satisfied or is too complex: {error}", constraint.field
            ) from None
        return compiled

    def _follower(self, grammar: Grammar) -> Follower | None:
        """What fills the rows of short strings; None where the library cannot."""
        shared = self._short_strings
        if not shared.is_usable:
            return None
        limits = _limits(grammar.max_symbols)
        first = llguidance.LLMatcher(shared.tokenizer, _NO_FORCING + grammar.text, log_level=0, limits=limits)
        return None if first.is_error() else Follower(first, shared)

    def _try(self, compiled: "LlguidanceCompiled") -> None:
        """The first row, and those inside an object or array, where what is too large fails. Raises MatcherError.

        `accept` would hold the interpreter's lock for as long as that takes; the masks of draft tokens do not.
        """
        matcher = compiled.matcher()
        rows = np.empty((2, self.vocabulary.words), np.int32)
        matcher.fill_mask(rows[0])
        for token in self._openers:
            if rows[0, token // 32] >> (token % 32) & 1:
                drafts = [(matcher.inner, 0, [token])]
                self._executor.unsafe_compute_mask_ptr_with_draft_token(drafts, rows.ctypes.data, rows.strides[0], 2)
                matcher.check()

    def fill_masks(self, matchers: Sequence[Matcher], masks: Masks, rows: Sequence[int]) -> list[MatcherError | None]:
        """`Backend.fill_masks`, over the machine's cores."""
        own = [matcher for matcher in matchers if isinstance(matcher, LlguidanceMatcher)]
        going = [(matcher, row) for matcher, row in zip(own, rows, strict=True) if not matcher.is_done]
        # A thread gets rows beside each other: those behind one lock, which wait for each other in any case.
        pairs = [(matcher.filler(), row) for matcher, row in sorted(going, key=lambda pair: pair[0].lexer)]
        if pairs:
            self._executor.unsafe_compute_mask_ptr(pairs, masks.ctypes.data, masks.strides[0], len(masks))
        return [matcher.checked(masks[row]) for matcher, row in zip(own, rows, strict=True)]


class LlguidanceCompiled:
    """A grammar with its lexer; matchers share what the lexer learns, behind a lock: `deep_copy` does not copy it."""

    def __init__(
        self, matcher: llguidance.LLMatcher, vocabulary: Vocabulary, source_bytes: int, follower: Follower | None
    ) -> None:
        self._first, self._vocabulary, self._follower = matcher, vocabulary, follower
        self.byte_count = _BASE_BYTES + _BYTES_A_SOURCE_BYTE * source_bytes
        self.byte_count += _SHORT_STRING_BYTES if follower is not None else 0

    def matcher(self) -> "LlguidanceMatcher":
        """A matcher at the beginning of a text."""
        follower = self._follower and self._follower.at_the_beginning()
        return LlguidanceMatcher(self._first.deep_copy(), self._vocabulary, id(self), follower)


class LlguidanceMatcher:
    """One sequence's place in the grammar. Those of equal `lexer` share one."""

    def __init__(
        self, matcher: llguidance.LLMatcher, vocabulary: Vocabulary, lexer: int, follower: Follower | None
    ) -> None:
        self.inner, self._vocabulary, self.lexer, self.follower = matcher, vocabulary, lexer, follower
        self._count, self._ended = 0, False

    def fill_mask(self, row: Row) -> None:
        """`Matcher.fill_mask`."""
        if not self.is_done:
            self.filler().unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
        error = self.checked(row)
        if error is not None:
            raise error

    def filler(self) -> llguidance.LLMatcher:
        """The library's matcher that fills the next row, for `checked` to complete."""
        follower = self.follower
        return self.inner if follower is None else follower.filler(self.inner)

    def checked(self, row: Row) -> MatcherError | None:
        """Complete the row that `filler` filled, and take unusable tokens out of it; what is wrong, if anything."""
        if self.follower is not None and not self.is_done and not self.follower.complete(row):
            self.inner.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
        if self.inner.is_error():
            return MatcherError(_clause(self.inner.get_error()))
        if self.is_done:
            row[:] = self._vocabulary.ends
            return None
        np.bitwise_and(row, self._vocabulary.usable, out=row)
        return None if row.any() and not self.inner.is_stopped() else MatcherError("no token can follow")

    def accept(self, token: int) -> bool:
        """`Matcher.accept`."""
        if self._ended or not 0 <= token < len(self._vocabulary.pieces):
            return False
        if token in self._vocabulary.end_ids:
            self._ended = self.may_end  # the library is not told: it takes no end token once nothing else can follow
            return self._ended
        if not self._vocabulary.pieces[token]:
            return False
        taken = self.inner.try_consume_tokens([token])
        self.check()
        self._count += taken
        if taken and self.follower is not None:
            self.follower.accept(token)
        return bool(taken)

    @property
    def is_done(self) -> bool:
        """`Matcher.is_done`."""
        return self._ended or (self.inner.is_stopped() and not self.inner.is_error() and self.may_end)

    @property
    def may_end(self) -> bool:
        """`Matcher.may_end`."""
        return self.inner.is_accepting()

    def rollback(self, count: int) -> None:
        """`Matcher.rollback`."""
        if not 0 <= count <= self._count + self._ended:
            raise ValueError(f"cannot undo {count} of {self._count + self._ended} tokens")
        if not count:
            return
        count -= self._ended
        self._ended = False
        if count:
            self.inner.rollback(count)
            self.check()
            self._count -= count
            if self.follower is not None:
                self.follower.rollback(count)

    def check(self) -> None:
        """Raises `MatcherError` if the library has given up."""
        if self.inner.is_error():
            raise MatcherError(_clause(self.inner.get_error()))


def _limits(symbols: int) -> llguidance.LLParserLimits:
    """About 14,000 lexer steps and 20,000 items a millisecond, so that a row costs 10 ms at most; an optional property
    takes 4 items of its object's row; a lexer state takes 1 to 2 kB."""
    return llguidance.LLParserLimits(
        initial_lexer_fuel=1_000_000,
        step_lexer_fuel=100_000,
        step_max_items=50_000,
        max_items_in_row=2_000,
        max_lexer_states=20_000,
        max_grammar_size=symbols,
        verbose_errors=False,
    )


def _clause(problem: str) -> str:
    """The library's message as one short clause."""
    said = re.split(r"<backtrace>|^\s*\d+ \| ", problem.replace("<non-verbose/>", ""), flags=re.MULTILINE)[0]
    lines = [line.strip() for line in said.splitlines()]
    text = re.sub(r"^at \d+\(\d+\): |failed to compile JSON schema: ", "", " ".join(line for line in lines if line))
    return text[:200] or "it is too complex"
