"""The default back end: llguidance (lexer by derivatives, Earley parser, masks over a token trie), all kinds.

https://github.com/guidance-ai/llguidance. It lets other Python threads run while it compiles and fills masks, never
raises, and bounds its own work; its limits below keep one constraint from costing much time or memory.
"""

import json
import re
from collections.abc import Sequence

import llguidance
import numpy as np
import orjson

from bladellm_runtime.guided import json_schema, regex_syntax
from bladellm_runtime.guided.backend import Matcher, MatcherError
from bladellm_runtime.guided.constraint import ConstraintError
from bladellm_runtime.guided.vocabulary import Masks, Row, Vocabulary
from bladellm_runtime.request import Constraint, ConstraintKind

MAX_WRITTEN_SCHEMA = 2**20
_LIMITS = llguidance.LLParserLimits(
    initial_lexer_fuel=1_000_000,
    step_lexer_fuel=100_000,
    step_max_items=50_000,
    max_items_in_row=2_000,
    max_lexer_states=20_000,
    max_grammar_size=250_000,
    verbose_errors=False,
)
"""About 14,000 lexer steps and 20,000 items a millisecond, so that a row costs 10 ms at most; an optional property
takes 4 items of its object's row; a lexer state takes 1 to 2 kB."""
_BASE_BYTES, _BYTES_A_SOURCE_BYTE = 64 * 1024, 96
"""What a compiled constraint is counted with, on the safe side: the library does not tell, and resident memory grew by
0 to 150 kB a schema over hundreds of schemas, each followed for 40 tokens."""
_SCHEMA_OPTIONS = {
    "lenient": False,
    "coerce_one_of": False,
    # No \u: a key written "\u0061" is the key "a" again, and would replace a value that was checked.
    "json_allowed_escapes": 'nrbtf\\"',
    "json_allow_general_unicode_escapes": False,
}
_PLAIN = r'[^"\\\x00-\x1F\x7F\x{85}\x{2028}\x{2029}]'
_SLICES = [r"[\x20\x0A\x0D\x09]+", *(f"{_PLAIN}{{1,{most}}}" for most in (1, 2, 3, 4, 6, 8, 10, 15, 30)), f"{_PLAIN}+"]
"""Parts of the vocabulary allowed as a whole where any text of so many characters is: in strings with a `maxLength`,
and for `.`, which is why line separators are left out."""
_NO_FORCING = '%llguidance {"no_forcing": true}\n'
"""For vocabularies without their tokenizer: do not narrow forced text to the tokens that it would write."""
_LITERALS = re.compile(r'"(?:\\.|[^"\\\n])*+"?|//[^\n]*|/(?:\\.|[^/\\\n])++/?|#[^\n]*')
"""Each piece of the text is read once, closed or not: `re` lets no other thread run, so it must take linear time."""


class LlguidanceBackend:
    """`Backend` over one vocabulary."""

    name = "llguidance"

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary
        wrapper = llguidance.TokenizerWrapper(_Pieces(vocabulary))
        self._tokenizer = llguidance.LLTokenizer(
            wrapper, n_vocab=len(vocabulary.pieces), eos_token=list(vocabulary.end_ids), slices=_SLICES
        )
        self._executor = llguidance.LLExecutor()
        self._openers = [vocabulary.pieces.index(piece) for piece in (b"{", b"[") if piece in vocabulary.pieces]

    def compile(self, constraint: Constraint, deadline: float) -> "LlguidanceCompiled":
        """`Backend.compile`; the library's own limits keep it far below any useful deadline."""
        grammar = _grammar(constraint)
        if self.vocabulary.encode is None:
            grammar = _NO_FORCING + grammar
        matcher = llguidance.LLMatcher(self._tokenizer, grammar, log_level=0, limits=_LIMITS)
        problem = matcher.get_error() or "; ".join(matcher.get_grammar_warnings())
        if problem:
            raise ConstraintError(f"{constraint.field} cannot be used: {_clause(problem)}", constraint.field)
        compiled = LlguidanceCompiled(matcher, self.vocabulary, len(grammar))
        try:
            self._try(compiled)
        except MatcherError as error:
            raise ConstraintError(
                f"{constraint.field} cannot be satisfied or is too complex: {error}", constraint.field
            ) from None
        return compiled

    def _try(self, compiled: "LlguidanceCompiled") -> None:
        """The first row, and the one inside an object or array, where what is too large fails. Raises MatcherError."""
        matcher, row = compiled.matcher(), np.empty(self.vocabulary.words, np.int32)
        matcher.fill_mask(row)
        for token in self._openers:
            if row[token // 32] >> (token % 32) & 1 and matcher.accept(token):
                matcher.fill_mask(row.copy())
                matcher.rollback(1)

    def fill_masks(self, matchers: Sequence[Matcher], masks: Masks, rows: Sequence[int]) -> list[MatcherError | None]:
        """`Backend.fill_masks`, over the machine's cores."""
        own = [matcher for matcher in matchers if isinstance(matcher, LlguidanceMatcher)]
        going = [(matcher, row) for matcher, row in zip(own, rows, strict=True) if not matcher.is_done]
        pairs = [(matcher.inner, row) for matcher, row in going]
        if pairs:
            self._executor.unsafe_compute_mask_ptr(pairs, masks.ctypes.data, masks.strides[0], len(masks))
        return [matcher.checked(masks[row]) for matcher, row in zip(own, rows, strict=True)]


class LlguidanceCompiled:
    """A grammar with its lexer; matchers share what the lexer learns."""

    def __init__(self, matcher: llguidance.LLMatcher, vocabulary: Vocabulary, source_bytes: int) -> None:
        self._first, self._vocabulary = matcher, vocabulary
        self.byte_count = _BASE_BYTES + _BYTES_A_SOURCE_BYTE * source_bytes

    def matcher(self) -> "LlguidanceMatcher":
        """A matcher at the beginning of a text."""
        return LlguidanceMatcher(self._first.deep_copy(), self._vocabulary)


class LlguidanceMatcher:
    """One sequence's place in the grammar."""

    def __init__(self, matcher: llguidance.LLMatcher, vocabulary: Vocabulary) -> None:
        self.inner, self._vocabulary = matcher, vocabulary
        self._count, self._ended = 0, False

    def fill_mask(self, row: Row) -> None:
        """`Matcher.fill_mask`."""
        if not self.is_done:
            self.inner.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
        error = self.checked(row)
        if error is not None:
            raise error

    def checked(self, row: Row) -> MatcherError | None:
        """What is wrong with the row that the library filled, if anything; takes unusable tokens out of it."""
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
        self._check()
        self._count += taken
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
            self._check()
            self._count -= count

    def _check(self) -> None:
        if self.inner.is_error():
            raise MatcherError(_clause(self.inner.get_error()))


class _Pieces:
    """The vocabulary as llguidance asks for it."""

    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.tokens = vocabulary.pieces
        self.eos_token_id = vocabulary.end_ids[0]
        self.special_token_ids = [token for token, piece in enumerate(self.tokens) if not piece]
        self._encode = vocabulary.encode

    def __call__(self, text: bytes | str) -> list[int]:
        """The tokenizer's own tokens of a text, which the library allows where the text is forced."""
        return self._encode(text if isinstance(text, str) else text.decode()) if self._encode else []


def regex_of(constraint: Constraint) -> regex_syntax.Node:
    """The tree of a REGEX or CHOICE constraint. Raises `ConstraintError`."""
    if constraint.kind is ConstraintKind.CHOICE:
        return regex_syntax.Alternate(tuple(map(regex_syntax.literal, json.loads(constraint.source))))
    try:
        return regex_syntax.full_match(constraint.source)
    except regex_syntax.RegexError as error:
        raise ConstraintError(f"{constraint.field} cannot be used: {error}", constraint.field) from None


def _grammar(constraint: Constraint) -> str:
    """The constraint in llguidance's dialect of Lark."""
    if constraint.kind is ConstraintKind.JSON:
        return _schema_grammar(constraint)
    if constraint.kind is ConstraintKind.GRAMMAR:
        outside = _LITERALS.sub("", constraint.source)
        if re.search(r"<[^<>\n]*>", outside) or "x-guidance" in constraint.source:
            raise ConstraintError(
                f"{constraint.field} names tokens (<...>) or x-guidance, which are not supported", constraint.field
            )
        return constraint.source
    try:
        return f"start: /{regex_syntax.written(regex_of(constraint))}/"
    except regex_syntax.RegexError as error:
        raise ConstraintError(f"{constraint.field} cannot be used: {error}", constraint.field) from None


def _schema_grammar(constraint: Constraint) -> str:
    try:
        schema = json_schema.prepared(orjson.loads(constraint.source))
    except json_schema.SchemaError as error:
        raise ConstraintError(f"{constraint.field} cannot be used: {error}", constraint.field) from None
    text = orjson.dumps(schema | {"x-guidance": _SCHEMA_OPTIONS}).decode()
    if len(text) > MAX_WRITTEN_SCHEMA:
        raise ConstraintError(f"{constraint.field} has too large patterns", constraint.field)
    return f"start: %json {text}"


def _clause(problem: str) -> str:
    """The library's message as one short clause."""
    said = re.split(r"<backtrace>|^\s*\d+ \| ", problem.replace("<non-verbose/>", ""), flags=re.MULTILINE)[0]
    lines = [line.strip() for line in said.splitlines()]
    text = re.sub(r"^at \d+\(\d+\): |failed to compile JSON schema: ", "", " ".join(line for line in lines if line))
    return text[:200] or "it is too complex"
