"""Partitions of warps for `gluon_support`: one runs until it waits for a barrier that another one has to reach."""

import threading
from collections.abc import Callable


class Partitions:
    """Threads of which one at a time runs. AssertionError where all of them wait, and `when_stuck` does not help: it
    returns whether something came that one of them may wait for."""

    def __init__(self, when_stuck: Callable[[], bool]) -> None:
        self._turn = threading.Condition()
        self._when_stuck = when_stuck
        self._alive = self._blocked = 0
        self._errors: list[BaseException] = []

    def run(self, works: list[Callable[[], None]]) -> None:
        """All of them to their ends; raises what the first one to fail raised."""
        self._alive = len(works)
        threads = [threading.Thread(target=self._work, args=(work,)) for work in works]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self._errors:
            raise self._errors[0]

    def wait_until(self, ready: Callable[[], bool]) -> None:
        """Let others run until then."""
        while not ready():
            self._blocked += 1
            if self._blocked == self._alive and self._when_stuck():
                self.progress()
                continue
            assert self._blocked < self._alive, "the phase never ends: every partition waits"
            self._turn.wait()
            assert not self._errors, "another partition failed"

    def progress(self) -> None:
        """What others wait for may be there now."""
        self._blocked = 0
        self._turn.notify_all()

    def _work(self, work: Callable[[], None]) -> None:
        with self._turn:
            try:
                if not self._errors:
                    work()
            except BaseException as error:
                self._errors.append(error)
            self._alive -= 1
            self.progress()
