"""`Ranks`: the other ranks as rank 0 has them: started, told what to do, watched, and ended together."""

import logging
import os
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

from bladellm_runtime.config import EngineArgs
from bladellm_runtime.errors import ConfigError
from bladellm_runtime.ranks.channel import ChannelBroken, PlanSender, Secret
from bladellm_runtime.ranks.launch import (
    flags_of,
    meeting_of,
    read_secret,
    start_rank,
)
from bladellm_runtime.ranks.messages import AdapterMoved, CloseRank, Hello, RankOrder, Serve
from bladellm_runtime.ranks.results import ResultReceiver
from bladellm_runtime.ranks.watchdog import Watchdog

WATCH_SECONDS = 0.1
SETTLE_SECONDS = 0.3
"""From the first sign of an end to the verdict: what a rank that ends causes in others may be seen before it."""
STUCK_SECONDS = 2.0
"""How long a call of rank 0 may hang in what the other ranks had to do with, once they are gone."""
EXIT_SECONDS = 3.0
OWN_FLAGS = {
    "model", "tokenizer_dir", "node_rank", "dist_init_addr", "dist_token_file", "cpu_threads", "log_level",
}  # fmt: skip
"""Flags that hosts may have different values of."""

logger = logging.getLogger(__name__)


def end_process(sentence: str) -> None:
    """Say why on standard error, and end this process."""
    logger.error("%s", sentence)
    logging.shutdown()
    os._exit(1)


@dataclass(frozen=True, slots=True)
class Home:
    """What a process that runs rank 0 has for `Ranks`.

    folder: of this user alone, removed by who made it; by default a new one. last_words: called in another thread with
    a sentence when the group has failed and rank 0 hangs in it; not expected to return.
    """

    folder: Path | None = None
    last_words: Callable[[str], None] = end_process


class Ranks:
    """Starts this host's other ranks, waits for those of other hosts, and watches all in a thread.

    When one of them is lost, all are killed, `failure` is set, and `on_failure` is called, which is to make what waits
    for them fail; who is inside `guarded` gets `STUCK_SECONDS` to come out of it before the home's `last_words`.
    """

    def __init__(self, args: EngineArgs, home: Home, model: str) -> None:
        """args: with the model's folder as `model`. model: as in `Hello`. Raises `UserError`."""
        self.failure: str | None = None
        self.on_failure: list[Callable[[], None]] = []
        self.done = 0
        """Orders that rank 0 has finished, to be kept up to date."""
        self._moved: SimpleQueue[AdapterMoved] = SimpleQueue()
        self._home = home
        self._guarded = False
        self._flags = flags_of(args)
        self._model = model
        self._folder = tempfile.TemporaryDirectory(prefix="bladellm-", dir=home.folder)  # made with mode 0700
        self.meeting = meeting_of(args, Path(self._folder.name))
        secret = read_secret(args)
        others = range(1, args.world_size)
        self._dog = Watchdog(others, args.pipeline_parallel_size)
        self._channel, self.results = self._listen(others, secret, args.pipeline_parallel_size > 1)
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._given_up: str | None = None
        self._closing = threading.Event()
        self._decided = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="rank-watch", daemon=True)
        try:
            for rank in args.local_ranks[1:]:
                self._processes[rank] = start_rank(rank, self.meeting, args)
        except BaseException:
            for process in self._processes.values():
                process.kill()
            self._stop_listening()
            raise
        self._watcher.start()

    @property
    def process_ids(self) -> dict[int, int]:
        """The processes of this host's other ranks."""
        return {rank: process.pid for rank, process in self._processes.items()}

    @property
    def sent(self) -> int:
        """Orders so far."""
        return self._channel.sent

    def wait_for_all(self) -> None:
        """Return when every rank has reported. Raises `ChannelBroken` when one is lost before."""
        while self._dog.missing:
            if self.verdict(WATCH_SECONDS):
                raise ChannelBroken("a rank was lost")

    def send(self, order: RankOrder) -> None:
        """Have every rank do something. Raises `ChannelBroken`."""
        self._channel.send(order)

    def adapters_moved(self) -> list[AdapterMoved]:
        """What became of adapters on the other ranks since the last call; once all have said hello."""
        self._hear()  # the watching thread looks ten times a second, and requests wait for this
        return [self._moved.get_nowait() for _ in range(self._moved.qsize())]

    def serve(self) -> None:
        """The start is over. Raises `ChannelBroken`."""
        self.send(Serve())
        self._dog.serving = True

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """While this thread does what can hang when a rank is lost; not nested."""
        self._guarded = True
        try:
            yield
        finally:
            self._guarded = False

    def verdict(self, patience: float = 0.0) -> str | None:
        """Why the group has ended; waits up to `patience` seconds for the watching thread to find out."""
        self._decided.wait(patience)
        return self.failure

    def give_up(self, reason: str) -> str:
        """End the group because rank 0 cannot go on: the others may wait for what never comes. Returns `failure`."""
        self._given_up = reason
        # By the watching thread: what `on_failure` calls may wait for what this one still holds.
        self._decided.wait(STUCK_SECONDS)
        return self.failure or f"the engine stopped: {reason}"

    def close(self) -> None:
        """Let the ranks finish, wait for their processes, and kill those that take too long. May be called again."""
        if self._closing.is_set():
            return
        self._closing.set()
        self._watcher.join(STUCK_SECONDS)
        if self.failure is None:
            with suppress(ChannelBroken):
                self.send(CloseRank())
            deadline = time.monotonic() + EXIT_SECONDS
            for process in self._processes.values():
                with suppress(subprocess.TimeoutExpired):
                    process.wait(max(deadline - time.monotonic(), 0.0))
        self._channel.end()
        for process in self._processes.values():
            process.kill()
            process.wait()
            if process.stdin is not None:
                with suppress(BrokenPipeError):
                    process.stdin.close()
        self._stop_listening()
        self._folder.cleanup()

    def _listen(self, others: range, secret: Secret | None, pipeline: bool) -> tuple[PlanSender, ResultReceiver | None]:
        with ExitStack() as opened:
            try:
                channel = opened.enter_context(closing(PlanSender(self.meeting.plans, others, secret)))
                results = ResultReceiver(self.meeting.results, secret) if pipeline else None
            except ChannelBroken as error:
                raise ConfigError(f"{error}; --dist_init_addr must be a free port of this host") from error
            opened.pop_all()
        return channel, results

    def _stop_listening(self) -> None:
        self._channel.close()
        if self.results is not None:
            self.results.close()

    def _watch(self) -> None:
        told = time.monotonic()
        while not self._closing.wait(WATCH_SECONDS):
            verdict = self._look()
            if verdict is not None:
                self._fail(verdict)
                return
            if self._dog.missing and time.monotonic() - told > 60:
                told = time.monotonic()
                logger.warning("still waiting for %s", ", ".join(f"rank {rank}" for rank in self._dog.missing))

    def _look(self) -> str | None:
        problem = self._given_up or self._hear()
        if problem is None and self._dog.trouble(self._exits()):
            time.sleep(SETTLE_SECONDS)
            problem = self._hear()
        return problem or self._dog.verdict(time.monotonic(), self.sent, self.done, self._exits())

    def _hear(self) -> str | None:
        """Take the reports; returns what is wrong with the flags of a rank."""
        problems = []
        for report in self._channel.reports():
            self._dog.hear(report, time.monotonic())
            match report:
                case Hello():
                    problems.append(self._differs(report))
                case AdapterMoved():
                    self._moved.put(report)
        return next(filter(None, problems), None)

    def _differs(self, hello: Hello) -> str | None:
        for name, value in self._flags.items():
            if name not in OWN_FLAGS and hello.flags.get(name) != value:
                own, theirs = (
                    f"without --{name}" if flag is None else f"with --{name} {flag}"
                    for flag in (value, hello.flags.get(name))
                )
                return f"rank {hello.rank} was started {theirs} and rank 0 {own}; give the hosts the same flags"
        if hello.model != self._model:
            return (
                f"rank {hello.rank} has another --model than rank 0, or one that was split in another way; "
                "give the hosts the same model"
            )
        return None

    def _exits(self) -> dict[int, int | None]:
        codes = {rank: process.poll() for rank, process in self._processes.items()}
        ended: dict[int, int | None] = {rank: code for rank, code in codes.items() if code is not None}
        remote = (rank for rank in self._dog.pulsing if rank not in codes)
        return ended | {rank: None for rank in remote if not self._channel.reaches(rank)}

    def _fail(self, verdict: str) -> None:
        self.failure = f"the engine stopped: {verdict}"
        logger.debug("%s", self.failure)
        stuck = threading.Thread(target=self._speak_last, args=(self.failure,), name="last-words", daemon=True)
        stuck.start()
        self._channel.end()
        for process in self._processes.values():
            process.kill()
        self._decided.set()
        for callback in self.on_failure:
            callback()

    def _speak_last(self, sentence: str) -> None:
        time.sleep(STUCK_SECONDS)
        if self._guarded and not self._closing.is_set():
            self._home.last_words(sentence)
