"""`Mapper`: a thread that carries out memory jobs beside the steps, first those that a step waits for."""

import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

PAUSE_SECONDS = 5e-5
"""How long a job is left alone that has nothing to do but wait."""
HOLD_SECONDS = 1e-3
"""How long a `hold` keeps a piece of work from being done, at most: longer than a launch of decodes takes the host."""

Key = tuple[str, int]


@dataclass(eq=False, slots=True)
class Job:
    """Work in short pieces, each done by one `next`, which yields True where only waiting is left to do for now.

    `keys` is what the job changes, `shared` what it counts on. Jobs of which one changes what the other changes or
    counts on are carried out in the order they were submitted, one after the other; all others in any order, or in
    turns. `error`: what the work raised, once `done`.
    """

    number: int
    work: Iterator[bool] | None
    keys: frozenset[Key]
    shared: frozenset[Key]
    urgent: bool = False
    done: bool = False
    error: Exception | None = None

    @property
    def succeeded(self) -> bool:
        return self.done and self.error is None


class Mapper:
    """Jobs wait in two queues, each in the order of `submit`: the urgent ones, then the others.

    Whatever an urgent job has to come after is urgent as well, so the head of the first queue, or of the second while
    the first is empty, can always go on. It is looked up anew for every piece of work: an urgent job has to wait for
    one call of the driver. Those calls leave Python's lock to others, so that steps are planned and launched meanwhile.

    What is done between the calls takes it, though, and whenever it changes hands the others lose tens of microseconds.
    Who is in a hurry calls `hold`: then the second queue waits.
    """

    def __init__(self, prepare: Callable[[], None]) -> None:
        """`prepare` is called first in the new thread."""
        self._urgent: deque[Job] = deque()
        self._later: deque[Job] = deque()
        self._submitted = 0
        self._fault: Exception | None = None
        self._closing = False
        self._held_until = 0.0
        self._awaited: set[Job] = set()
        lock = threading.Lock()
        self._changed = threading.Condition(lock)
        """What the thread waits for."""
        self._arrived = threading.Condition(lock)
        """What others wait for: that none of `_awaited` is left, so that they wake once and not for every job."""
        self._thread = threading.Thread(target=self._run, args=(prepare,), name="kv-mapper", daemon=True)
        self._thread.start()

    def submit(self, work: Iterator[bool], keys: Collection[Key], shared: Collection[Key] = ()) -> Job:
        """Queue a job that is not urgent."""
        with self._changed:
            self._submitted += 1
            job = Job(self._submitted, work, frozenset(keys), frozenset(shared))
            self._later.append(job)
            if not self._held():
                self._changed.notify_all()
        return job

    def hold(self) -> None:
        """Put off what is not urgent until `resume`, or for `HOLD_SECONDS` where it was submitted before."""
        self._held_until = time.perf_counter() + HOLD_SECONDS

    def resume(self) -> None:
        """End a `hold`."""
        self._held_until = 0.0
        if self._later:
            with self._changed:
                self._changed.notify_all()

    def urge(self, jobs: Collection[Job]) -> None:
        """Make jobs urgent, and what has to come before them."""
        with self._changed:
            wanted = {job for job in jobs if not (job.done or job.urgent)}
            keys: set[Key] = set()
            shared: set[Key] = set()
            for job in reversed(self._later if wanted else ()):
                before = not (keys.isdisjoint(job.keys | job.shared) and shared.isdisjoint(job.keys))
                if before or job in wanted:
                    job.urgent = True
                    keys |= job.keys
                    shared |= job.shared
            if wanted:
                hurried = [job for job in self._later if job.urgent]
                self._later = deque(job for job in self._later if not job.urgent)
                self._urgent = deque(sorted([*self._urgent, *hurried], key=lambda job: job.number))
                self._changed.notify_all()

    def wait(self, jobs: Collection[Job]) -> None:
        """Return when these jobs are done. Raises what `prepare` raised; the errors of jobs are theirs."""
        if not all(job.done for job in jobs):
            with self._changed:
                self._awaited.update(job for job in jobs if not job.done)
                self._arrived.wait_for(lambda: not self._awaited)
        if self._fault is not None:
            raise self._fault

    def close(self) -> None:
        """Finish all jobs and end the thread; may be called again."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join()

    def _run(self, prepare: Callable[[], None]) -> None:
        try:
            prepare()
        except Exception as error:
            self._fault = error
        while (job := self._head()) is not None:
            self._go_on(job)

    def _head(self) -> Job | None:
        """The job to go on with, once there is one; None when the thread is to end."""
        with self._changed:
            self._changed.wait_for(lambda: self._urgent or self._later or self._closing)
            if self._held():
                # No longer than that for each piece: a host that never rests must not keep jobs waiting for ever.
                self._changed.wait_for(lambda: self._urgent or self._closing or not self._held(), HOLD_SECONDS)
            queue = self._urgent or self._later
            return queue[0] if queue else None

    def _held(self) -> bool:
        return time.perf_counter() < self._held_until

    def _go_on(self, job: Job) -> None:
        """Do one piece of a job."""
        ended, pause = False, False
        try:
            pause = next(job.work) if job.work is not None else False
        except StopIteration:
            ended = True
        except Exception as error:
            job.error, ended = error, True
        if ended or pause:
            with self._changed:
                if ended:
                    self._finish(job)
                elif (self._urgent or self._later)[0] is job:
                    self._changed.wait(PAUSE_SECONDS)

    def _finish(self, job: Job) -> None:
        (self._urgent if job.urgent else self._later).remove(job)
        # The work may be all that keeps an arena alive.
        job.work = None
        job.done = True
        self._awaited.discard(job)
        if not self._awaited:
            self._arrived.notify_all()
