"""`Constraints`: what constrained requests get before they are scheduled, and the token masks of every step."""

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, wait

import numpy as np
from numpy.typing import NDArray

from bladellm_runtime.engine.constraint_matcher import ConstraintMatcher
from bladellm_runtime.engine.preparation import RefusedError
from bladellm_runtime.errors import UserError
from bladellm_runtime.guided.backend import Compiled
from bladellm_runtime.guided.compiler import Compiler
from bladellm_runtime.guided.constraint import ConstraintError
from bladellm_runtime.request import Constraint, ConstraintKind
from bladellm_runtime.scheduler.plan import TokenMasks
from bladellm_runtime.scheduler.prepared import ConstrainedRow, Prepared
from bladellm_runtime.wire.messages import AddRequest, EngineStats

CONSTRAINT_REFUSED = "constraint_refused"
ANY_OBJECT = Constraint(ConstraintKind.JSON, '{"type":"object"}', "response_format")
WARM_UP_TEXT = '{"name": "x", "values": [1, -2.5e3, true, null, {}], "more": {"a\\n": "two words"}}'
ALL_TOKENS = -1

logger = logging.getLogger(__name__)


class Constraints:
    """A `Preparer` of matchers, all used from the thread of the steps; compilation has threads of its own.

    The compiler is made by `make` in the background, from `begin` or the first constraint on. That takes seconds, and
    native code keeps other threads waiting for most of one: `wait` for it before requests are served. Where it fails,
    constraints are refused and everything else is served.
    """

    def __init__(self, make: Callable[[], Compiler]) -> None:
        """make: raises `UserError` where there can be none."""
        self._make = make
        self._making: Future[Compiler] | None = None
        self._closed = threading.Event()
        self._early: dict[int, None] = {}
        self._compiling: dict[int, Future[Compiled]] = {}
        self._given: dict[int, tuple[ConstraintMatcher, Compiled]] = {}
        self._refused = 0
        self._masks = 0
        self._mask_seconds = 0.0

    def begin(self) -> "Future[Compiler]":
        """Start to make the compiler, once."""
        if self._making is None:
            self._making = Future()
            threading.Thread(target=self._make_it, args=(self._making,), name="guided-vocabulary", daemon=True).start()
        return self._making

    def wait(self) -> None:
        """Until the compiler is made, or cannot be. A known reason is told here: a start that fails tells its own."""
        making = self.begin()
        wait([making])
        if isinstance(error := making.exception(), UserError):
            logger.info("constraints will be refused: %s", error)

    def is_needed(self, request: AddRequest) -> bool:
        """`Preparer.is_needed`."""
        return request.constraint is not None

    def prepare(self, request: AddRequest, prepared: Prepared) -> bool:
        """`Preparer.prepare`. Raises `RefusedError`."""
        constraint, request_id = request.constraint, request.request_id
        assert constraint is not None, "is_needed says which requests come here"
        try:
            compiler = self._compiler(constraint)
            if compiler is None:
                self._early[request_id] = None
                return False
            compiled = self._compiled(compiler, constraint, request_id)
            if compiled is None:
                return False
        except ConstraintError as error:
            self._refused += 1
            raise RefusedError(CONSTRAINT_REFUSED, str(error)) from None
        del self._compiling[request_id]
        given = ConstraintMatcher(compiler.matcher(compiled), compiler.backend, constraint.field)
        self._given[request_id] = given, compiled
        prepared.matcher = given
        return True

    def poll(self) -> list[int]:
        """`Preparer.poll`."""
        found = [request_id for request_id, future in self._compiling.items() if future.done()]
        if self._early and self.begin().done():
            found += self._early
            self._early = {}
        return found

    def release(self, request_id: int) -> None:
        """`Preparer.release`: the compiled constraint may be forgotten again, and is if it could not be followed: what
        its matchers share may be worn out."""
        self._early.pop(request_id, None)
        self._compiling.pop(request_id, None)
        given, compiled = self._given.pop(request_id, (None, None))
        if given is None or compiled is None:
            return
        compiler = self._made()
        if given.failure and compiler is not None:
            compiler.discard(compiled)
        given.close()

    def fill(self, rows: Sequence[ConstrainedRow]) -> TokenMasks:
        """The masks of a step's rows, whose matchers were given here and have all tokens before it.

        A matcher that fails allows every token: its request ends with whatever that is.
        """
        start = time.monotonic()
        matchers = [row.matcher for row in rows if isinstance(row.matcher, ConstraintMatcher)]
        assert len(matchers) == len(rows), "a matcher came from elsewhere"
        if not matchers:
            return TokenMasks([], np.empty((0, 0), np.int32))
        backend = matchers[0].backend
        ends = backend.vocabulary.ends
        masks = np.empty((len(rows), len(ends)), np.int32)
        errors = backend.fill_masks([matcher.inner for matcher in matchers], masks, range(len(rows)))
        for row, matcher, mask, error in zip(rows, matchers, masks, errors, strict=True):
            if error is not None:
                matcher.fail(str(error))
                mask[:] = ALL_TOKENS
            elif row.held:
                matcher.only_end_left = not _without(mask & ~ends, row.stops).any()
        self._masks += len(rows)
        self._mask_seconds += time.monotonic() - start
        return TokenMasks([row.row for row in rows], masks)

    def warm_up(self) -> None:
        """Compile what JSON mode needs, and follow a text. Raises `UserError` where there is no compiler."""
        compiler = self.begin().result()
        vocabulary = compiler.backend.vocabulary
        matcher = compiler.matcher(compiler.compile(ANY_OBJECT))
        row = np.empty(vocabulary.words, np.int32)
        for token in vocabulary.encode(WARM_UP_TEXT) if vocabulary.encode is not None else []:
            matcher.fill_mask(row)
            if not matcher.accept(token):
                break

    def add_stats(self, stats: EngineStats) -> None:
        """Fill in the counters."""
        stats.guided_refused = self._refused
        stats.guided_masks, stats.guided_mask_seconds = self._masks, self._mask_seconds
        compiler = self._made()
        if compiler is not None:
            counts = compiler.counts()
            stats.guided_hits, stats.guided_misses = counts.hits + counts.joined, counts.misses
            stats.guided_compile_seconds, stats.guided_cache_bytes = counts.seconds, counts.byte_count

    def close(self) -> None:
        """Let the threads end, those of a compiler that is still being made too."""
        self._closed.set()
        compiler = self._made()
        if compiler is not None:
            compiler.close()

    def _made(self) -> Compiler | None:
        making = self._making
        return making.result() if making is not None and making.done() and making.exception() is None else None

    def _compiled(self, compiler: Compiler, constraint: Constraint, request_id: int) -> Compiled | None:
        """A copy for one request more; None while it is being compiled. Raises `ConstraintError`."""
        future = self._compiling.get(request_id) or compiler.submit(constraint)
        if future.done() and compiler.is_full(future.result()):
            future = compiler.submit(constraint, again=True)  # others that waited for the same copy were faster
        self._compiling[request_id] = future
        return future.result() if future.done() else None

    def _compiler(self, constraint: Constraint) -> Compiler | None:
        """The compiler; None while it is being made. Raises `ConstraintError` where there is none."""
        making = self.begin()
        if not making.done():
            return None
        if making.exception() is not None:
            raise ConstraintError(
                f"{constraint.field} cannot be used: there is no tokenizer here that says what text each token is",
                constraint.field,
            )
        return making.result()

    def _make_it(self, making: "Future[Compiler]") -> None:
        try:
            compiler = self._make()
            making.set_result(compiler)
            if self._closed.is_set():
                compiler.close()
        except Exception as error:  # whatever it is, requests must not wait for ever
            if not isinstance(error, UserError):
                logger.warning("constraints will be refused: %s", error, exc_info=error)
            making.set_exception(error)


def _without(mask: NDArray[np.int32], tokens: Iterable[int]) -> NDArray[np.int32]:
    """The mask, in which these tokens, if it has them, are forbidden from now on."""
    words = mask.view(np.uint32)
    for token in tokens:
        if token // 32 < len(words):
            words[token // 32] &= ~np.uint32(1 << token % 32)
    return mask
