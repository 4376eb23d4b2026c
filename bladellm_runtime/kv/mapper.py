"""`Mapper`: a thread that carries out memory jobs one after the other, beside the steps."""

import threading
from collections import deque
from collections.abc import Callable


class Mapper:
    """Jobs run in the order of `submit`. Errors are kept for the next `wait` that comes after them.

    The driver's calls leave Python's lock to others, so that steps are planned and launched meanwhile.
    """

    def __init__(self, prepare: Callable[[], None]) -> None:
        """`prepare` is called first in the new thread."""
        self._jobs: deque[Callable[[], None]] = deque()
        self._errors: list[Exception] = []
        self._submitted = 0
        self._done = 0
        self._closing = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, args=(prepare,), name="kv-mapper", daemon=True)
        self._thread.start()

    def submit(self, job: Callable[[], None]) -> None:
        """Queue a job."""
        with self._changed:
            self._jobs.append(job)
            self._submitted += 1
            self._changed.notify_all()

    def ticket(self) -> int:
        """Stands for all jobs submitted so far."""
        return self._submitted

    def wait(self, ticket: int) -> list[Exception]:
        """Return when these jobs are done. Returns the errors so far that no earlier call returned."""
        with self._changed:
            self._changed.wait_for(lambda: self._done >= ticket)
            errors, self._errors = self._errors, []
        return errors

    def close(self) -> None:
        """Finish all jobs and end the thread; may be called again."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join()

    def _run(self, prepare: Callable[[], None]) -> None:
        self._guarded(prepare)
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._jobs or self._closing)
                if not self._jobs:
                    return
                job = self._jobs.popleft()
            self._guarded(job)
            # A job may be all that keeps an arena alive.
            del job
            with self._changed:
                self._done += 1
                self._changed.notify_all()

    def _guarded(self, job: Callable[[], None]) -> None:
        try:
            job()
        except Exception as error:
            self._errors.append(error)
