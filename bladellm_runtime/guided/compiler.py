"""`Compiler`: constraints made ready in threads, once each, with a deadline, and kept within a number of bytes.

Neither the event loop nor the engine's loop compiles: they hold a `Future`. A compilation that reaches the deadline is
answered with an error at once; its thread, which may be in native code that nobody can stop, is replaced by another
and ends when it is done. At most `MAX_STUCK` threads can be like that; past them, constraints that are not in the
cache are refused until one is free.
"""

import threading
import time
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field, replace

from bladellm_runtime.guided.backend import Backend, Compiled, Matcher
from bladellm_runtime.guided.constraint import ConstraintError
from bladellm_runtime.request import Constraint

DEADLINE = 5.0
DEFAULT_BYTES = 256 * 2**20
MAX_WAITING = 256
MAX_STUCK = 4
MAX_REFUSALS = 1024
REFUSAL_SECONDS = 60.0
Key = tuple[str, str]
"""Kind and source; the vocabulary and the back end are the compiler's."""


@dataclass
class CompileCounts:
    """Counters since the start, and gauges. `seconds` is the time spent compiling; `joined` waited for another's."""

    hits: int = 0
    misses: int = 0
    joined: int = 0
    refused: int = 0
    expired: int = 0
    evicted: int = 0
    seconds: float = 0.0
    entries: int = 0
    byte_count: int = 0


@dataclass(eq=False)
class _Job:
    """One compilation. `started` is 0 while it waits."""

    constraint: Constraint
    key: Key
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
        self.max_bytes, self.deadline, self.refusal_seconds = max_bytes, deadline, refusal_seconds
        self._counts = CompileCounts()
        self._kept: OrderedDict[Key, Compiled] = OrderedDict()
        self._live: weakref.WeakKeyDictionary[Compiled, weakref.WeakSet[Matcher]] = weakref.WeakKeyDictionary()
        self._refused: OrderedDict[Key, tuple[str, float]] = OrderedDict()
        self._jobs: dict[Key, _Job] = {}
        self._waiting: deque[_Job] = deque()
        self._stuck = 0
        self._closed = False
        self._changed = threading.Condition()
        for _ in range(threads):
            self._start(self._work)
        self._start(self._watch)

    def submit(self, constraint: Constraint) -> "Future[Compiled]":
        """The compiled constraint, some time later. The future's exception is a `ConstraintError`.

        Equal constraints share one compilation, which nobody can cancel. Never waits.
        """
        key = (constraint.kind.value, constraint.source)
        with self._changed:
            known = self._known(key, constraint)
            if known is not None:
                return known
            if key in self._jobs:
                self._counts.joined += 1
                return self._jobs[key].future
            if self._closed or self._stuck >= MAX_STUCK or len(self._waiting) >= MAX_WAITING:
                error = ConstraintError("too many constraints are being compiled; try again later", constraint.field)
                return _failed(error)
            self._counts.misses += 1
            job = self._jobs[key] = _Job(constraint, key)
            self._waiting.append(job)
            self._changed.notify_all()
            return job.future

    def compile(self, constraint: Constraint) -> Compiled:
        """`submit`, waited for. Raises `ConstraintError`."""
        return self.submit(constraint).result()

    def matcher(self, compiled: Compiled) -> Matcher:
        """A matcher that keeps its constraint from being evicted for as long as it lives."""
        matcher = compiled.matcher()
        with self._changed:
            self._live.setdefault(compiled, weakref.WeakSet()).add(matcher)
        return matcher

    def counts(self) -> CompileCounts:
        """A copy of the counters."""
        with self._changed:
            return replace(self._counts, entries=len(self._kept))

    def close(self) -> None:
        """Refuse what waits and let the threads end."""
        with self._changed:
            self._closed = True
            for job in self._waiting:
                self._finish(job, ConstraintError("the engine is shutting down", job.constraint.field))
            self._waiting.clear()
            self._changed.notify_all()

    def _known(self, key: Key, constraint: Constraint) -> "Future[Compiled] | None":
        if key in self._kept:
            self._counts.hits += 1
            self._kept.move_to_end(key)
            done: Future[Compiled] = Future()
            done.set_result(self._kept[key])
            return done
        reason, until = self._refused.get(key, ("", 0.0))
        if time.monotonic() >= until:
            self._refused.pop(key, None)
            return None
        self._counts.hits += 1
        return _failed(ConstraintError(reason, constraint.field))

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
                running = [job for job in self._jobs.values() if job.started]
                ends = min((job.started + self.deadline for job in running), default=None)
                self._changed.wait(None if ends is None else max(0.0, ends - time.monotonic()))
                for job in running:
                    if job.key in self._jobs and time.monotonic() >= job.started + self.deadline:
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
        if self._jobs.pop(job.key, None) is None:
            return
        if isinstance(outcome, ConstraintError):
            self._counts.refused += 1
            self._refused[job.key] = (str(outcome), time.monotonic() + self.refusal_seconds)
            while len(self._refused) > MAX_REFUSALS:
                self._refused.popitem(last=False)
            job.future.set_exception(outcome)
            return
        self._keep(job.key, outcome)
        job.future.set_result(outcome)

    def _keep(self, key: Key, compiled: Compiled) -> None:
        for other in list(self._kept):
            if self._counts.byte_count + compiled.byte_count <= self.max_bytes:
                break
            if self._live.get(self._kept[other]):
                continue
            self._counts.byte_count -= self._kept.pop(other).byte_count
            self._counts.evicted += 1
        if self._counts.byte_count + compiled.byte_count <= self.max_bytes:
            self._kept[key] = compiled
            self._counts.byte_count += compiled.byte_count


def _failed(error: ConstraintError) -> "Future[Compiled]":
    future: Future[Compiled] = Future()
    future.set_exception(error)
    return future
