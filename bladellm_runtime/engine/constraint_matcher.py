"""`ConstraintMatcher`: one request's matcher of guided decoding, as the scheduler sees it."""

from bladellm_runtime.guided.backend import Backend, Matcher, MatcherError
from bladellm_runtime.scheduler.prepared import Progress


class ConstraintMatcher:
    """`TokenMatcher` over a back end's matcher. `field` is the request field that errors name."""

    def __init__(self, matcher: Matcher, backend: Backend, field: str) -> None:
        self._matcher: Matcher | None = matcher
        self._field = field
        self._end_ids = frozenset(backend.vocabulary.end_ids)
        self.backend = backend
        self.failure = ""
        self.only_end_left = False

    @property
    def inner(self) -> Matcher:
        """The back end's matcher. Raises `ValueError` once closed."""
        if self._matcher is None:
            raise ValueError(f"the request of this {self._field} has ended")
        return self._matcher

    def accept(self, token: int) -> Progress:
        """`TokenMatcher.accept`."""
        if self.failure:
            return Progress.FAILED
        try:
            accepted = self.inner.accept(token)
        except MatcherError as error:
            self.fail(str(error))
            return Progress.FAILED
        if not accepted:
            self.fail(f"token {token} is not allowed here")
            return Progress.FAILED
        if token in self._end_ids:
            return Progress.ENDED
        return Progress.COMPLETE if self.inner.is_done else Progress.GOES_ON

    def fail(self, reason: str) -> None:
        """Note why the constraint cannot be followed any further, in one clause."""
        self.failure = f"{self._field} could not be followed to the end of the answer: {reason}"

    def close(self) -> None:
        """Let go of the back end's matcher, which keeps its constraint in memory."""
        self._matcher = None
