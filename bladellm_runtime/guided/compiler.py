"""`Compiler`: constraints made ready in threads, once each, with a deadline, and kept within a number of bytes.

Neither the event loop nor the engine's loop compiles: they hold a `Future`. A compilation that reaches the deadline is
answered with an error at once; its thread, which may be in native code that nobody can stop, is replaced by another
and ends when it is done. At most `MAX_STUCK` threads can be like that; past them, constraints that are not in the
cache are refused until one is free. Further copies of a constraint that many requests have (`CompiledCache`) are
compiled in the same way; where one cannot be made, its requests share those that are there.
"""

import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field, replace

from bladellm_runtime.guided.backend import Backend, Compiled, Matcher
from bladellm_runtime.guided.compiled_cache import MATCHERS_A_COPY, CompiledCache, Key
from bladellm_runtime.guided.constraint import ConstraintError
from bladellm_runtime.request import Constraint

DEADLINE = 5.0
DEFAULT_BYTES = 256 * 2**20
MAX_WAITING = 256
MAX_STUCK = 4
MAX_REFUSALS = 1024
REFUSAL_SECONDS = 60.0
COPY_SECONDS = 0.05
"""A request does not wait for a copy of a constraint that took longer to compile."""


@dataclass
class CompileCounts:
    """Counters since the start, and gauges. `seconds` is the time spent compiling; `joined` waited for another's;
    `copies` were compiled of constraints that were there already."""

    hits: int = 0
    misses: int = 0
    joined: int = 0
    copies: int = 0
    refused: int = 0
    expired: int = 0
    evicted: int = 0
    seconds: float = 0.0
    entries: int = 0
    byte_count: int = 0


@dataclass(eq=False)
class _Job:
    """One compilation, for which `waiting` requests wait. `started` is 0 while it waits itself; `instead` is what its
    requests get where it fails, of a further copy."""

    constraint: Constraint
    key: Key
    instead: Compiled | None = None
    waiting: int = 1
    future: "Future[Compiled]" = field(default_factory=Future)
    started: float = 0.0
    expired: bool = False

    def __post_init__(self) -> None:
        self.future.set_running_or_notify_cancel()  # several may wait for it: nobody can cancel it


class Compiler:
    """Compiled constraints of one back end; safe to use from several threads.

    `max_bytes` bounds what is kept: the least recently used without a live matcher go first, and what finds no room
    beside live ones is compiled but not kept. Refusals are remembered for `refusal_seconds`.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        max_bytes: int = DEFAULT_BYTES,
        deadline: float = DEADLINE,
        refusal_seconds: float = REFUSAL_SECONDS,
        threads: int = 2,
    ) -> None:
        self.backend = backend
        self.deadline, self.refusal_seconds = deadline, refusal_seconds
        self._counts = CompileCounts()
        self._cache = CompiledCache(max_bytes)
        self._refused: OrderedDict[Key, tuple[str, float]] = OrderedDict()
        self._jobs: dict[Key, list[_Job]] = {}
        self._waiting: deque[_Job] = deque()
        self._stuck = 0
        self._closed = False
        self._changed = threading.Condition()
        for _ in range(threads):
            self._start(self._work)
        self._start(self._watch)

    def submit(self, constraint: Constraint, again: bool = False) -> "Future[Compiled]":
        """The compiled constraint, some time later. The future's exception is a `ConstraintError`.

        Equal constraints share one compilation, which nobody can cancel; of a constraint whose copies all have many
        matchers, it is a further copy, while that may be made. Never waits. again: for a request that has been counted,
        as one whose copy `is_full` by now.
        """
        key = (constraint.kind.value, constraint.source)
        with self._changed:
            reason = self._refusal(key)
            if reason is not None:
                self._counts.hits += 1
                return _failed(ConstraintError(reason, constraint.field))
            kept, jobs = self._cache.take(key), self._jobs.get(key, [])
            missing = self._cache.missing_copies(key)
            if kept is not None and not missing:
                return self._hit(kept, again)
            job = min(jobs, key=lambda job: job.waiting, default=None)
            if job is not None and (kept is None or job.waiting < MATCHERS_A_COPY or len(jobs) >= missing):
                self._counts.joined += not again
                job.waiting += 1
                return job.future
            if self._closed or self._stuck >= MAX_STUCK or len(self._waiting) >= MAX_WAITING:
                if kept is not None:
                    return self._hit(kept, again)
                error = ConstraintError("too many constraints are being compiled; try again later", constraint.field)
                return _failed(error)
            return self._add(_Job(constraint, key, kept)).future

    @property
    def max_bytes(self) -> int:
        """What is kept has no more bytes, by `Compiled.byte_count`."""
        return self._cache.max_bytes

    def compile(self, constraint: Constraint) -> Compiled:
        """`submit`, waited for. Raises `ConstraintError`."""
        return self.submit(constraint).result()

    def is_full(self, compiled: Compiled) -> bool:
        """Whether so many matchers follow this copy that the next request had better `submit` once more."""
        with self._changed:
            return self._cache.is_full(compiled)

    def matcher(self, compiled: Compiled) -> Matcher:
        """A matcher that keeps its constraint from being evicted for as long as it lives."""
        matcher = compiled.matcher()
        with self._changed:
            self._cache.follow(compiled, matcher)
        return matcher

    def discard(self, compiled: Compiled) -> None:
        """Forget a constraint whose matcher failed: the next request compiles it anew."""
        with self._changed:
            self._cache.discard(compiled)

    def counts(self) -> CompileCounts:
        """A copy of the counters."""
        with self._changed:
            cache = self._cache
            return replace(self._counts, entries=len(cache), byte_count=cache.byte_count, evicted=cache.evicted)

    def close(self) -> None:
        """Refuse what waits and let the threads end."""
        with self._changed:
            self._closed = True
            for job in self._waiting:
                self._finish(job, ConstraintError("the engine is shutting down", job.constraint.field))
            self._waiting.clear()
            self._changed.notify_all()

    def _refusal(self, key: Key) -> str | None:
        """Why a constraint was refused, while that is remembered."""
        reason, until = self._refused.get(key, ("", 0.0))
        if time.monotonic() < until:
            return reason
        self._refused.pop(key, None)
        return None

    def _hit(self, kept: Compiled, again: bool) -> "Future[Compiled]":
        self._counts.hits += not again
        done: Future[Compiled] = Future()
        done.set_result(kept)
        return done

    def _add(self, job: _Job) -> _Job:
        self._counts.copies += job.instead is not None
        self._counts.misses += job.instead is None
        self._jobs.setdefault(job.key, []).append(job)
        self._waiting.append(job)
        self._changed.notify_all()
        return job

    def _start(self, work: Callable[[], None]) -> None:
        threading.Thread(target=work, name="guided-compile", daemon=True).start()

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._closed)
                if self._closed:
                    return
                job = self._waiting.popleft()
                job.started = time.monotonic()
                self._changed.notify_all()
            outcome = self._outcome(job)
            with self._changed:
                self._counts.seconds += time.monotonic() - job.started
                if job.expired:
                    self._stuck -= 1
                    return  # the watch has put another thread in this one's place
                self._finish(job, outcome)

    def _outcome(self, job: _Job) -> Compiled | ConstraintError:
        try:
            return self.backend.compile(job.constraint, job.started + self.deadline)
        except ConstraintError as error:
            return error
        except Exception as error:  # a fault of a back end must not end the thread
            name = type(error).__name__
            return ConstraintError(f"{job.constraint.field} cannot be compiled ({name})", job.constraint.field)

    def _watch(self) -> None:
        """Gives up on compilations that are past the deadline."""
        with self._changed:
            while not self._closed:
                running = [job for jobs in self._jobs.values() for job in jobs if job.started]
                ends = min((job.started + self.deadline for job in running), default=None)
                self._changed.wait(None if ends is None else max(0.0, ends - time.monotonic()))
                for job in running:
                    if job in self._jobs.get(job.key, []) and time.monotonic() >= job.started + self.deadline:
                        self._give_up(job)

    def _give_up(self, job: _Job) -> None:
        job.expired = True
        self._stuck += 1
        self._counts.expired += 1
        name = job.constraint.field
        self._finish(job, ConstraintError(f"{name} took more than {self.deadline:g} s to compile; simplify it", name))
        self._start(self._work)

    def _finish(self, job: _Job, outcome: Compiled | ConstraintError) -> None:
        """Keep and hand out an outcome; the lock is held."""
        jobs = self._jobs.get(job.key, [])
        if job not in jobs:
            return
        jobs.remove(job)
        if not jobs:
            del self._jobs[job.key]
        if not isinstance(outcome, ConstraintError):
            quick = time.monotonic() - job.started <= COPY_SECONDS
            self._cache.keep(job.key, outcome, self.backend.copies if quick else 1)
            job.future.set_result(outcome)
        elif job.instead is not None:
            self._cache.stop_copies(job.key)
            job.future.set_result(job.instead)
        else:
            self._refuse(job, outcome)

    def _refuse(self, job: _Job, error: ConstraintError) -> None:
        self._counts.refused += 1
        self._refused[job.key] = (str(error), time.monotonic() + self.refusal_seconds)
        while len(self._refused) > MAX_REFUSALS:
            self._refused.popitem(last=False)
        job.future.set_exception(error)


def _failed(error: ConstraintError) -> "Future[Compiled]":
    future: Future[Compiled] = Future()
    future.set_exception(error)
    return future
