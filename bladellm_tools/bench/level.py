"""One level of load against one target: send what was planned when it is due, wait for the answers, write them down."""

import asyncio
import contextlib
import time
from collections.abc import Callable
from dataclasses import replace

from bladellm_tools.bench.args import LevelArgs
from bladellm_tools.bench.client import Answer, Client, LiveEvent
from bladellm_tools.bench.eventloop import first_served, raise_file_limit, without_collector
from bladellm_tools.bench.health import HealthProbe
from bladellm_tools.bench.pacing import Pacer, clock
from bladellm_tools.bench.prompts import load_tokenizer, renewed
from bladellm_tools.bench.records import LevelRun, Load, Outcome, PlannedRequest
from bladellm_tools.bench.target import Target

INTERRUPTED = "interrupted"
GONE_AFTER_REFUSALS = 10
"""Failed connections in a row, with nothing heard in between, after which a server counts as gone."""
WATCH_SECONDS = 0.1
FAILURE_PAUSE_SECONDS = 0.1
"""How long a closed loop's stream rests after a failure, so that it does not spin on a server that refuses it."""
LONGEST_STAGGER_SECONDS = 2.0
STAGGER_SECONDS = 0.02
LEAD_SECONDS = 0.05
"""Between the start of a level and its time 0, for opening what must be open."""


async def run_level(
    target: Target,
    plan: list[PlannedRequest],
    load: Load,
    level: LevelArgs,
    repeat: int,
    seed: int,
    on_event: Callable[[LiveEvent], None] | None = None,
    stop: asyncio.Event | None = None,
) -> LevelRun:
    """Run one repeat of one level. Whatever the server does ends up in the records; only cancellation raises.

    `stop` ends it early, with what was measured so far.
    """
    raise_file_limit()
    tokenizer = load_tokenizer(target.tokenizer) if target.tokenizer is not None else None
    with without_collector(), first_served():
        zero = clock() + LEAD_SECONDS
        began = time.time() + LEAD_SECONDS
        client = Client(target, zero, on_event)
        runner = LevelRunner(client, plan, load, level, zero, stop)
        probe = HealthProbe()
        try:
            await runner.run()
        finally:
            probe.stop()
            client.close()
    for answer in runner.answers:
        answer.read_kept()
        answer.reader.finish(answer.failure, tokenizer)
        await asyncio.sleep(0)  # a live view may want to draw
    records = sorted((answer.record for answer in runner.answers), key=lambda record: record.index)
    return LevelRun(
        endpoint=target.name,
        load=load,
        repeat=repeat,
        seed=seed,
        began=began,
        duration=max((record.intended for record in records), default=0.0),
        warmup=level.warmup,
        requests=records,
        client=probe.health(records, load, zero),
        aborted=runner.aborted,
    )


class LevelRunner:
    """Sends the requests of a level and holds their answers; `aborted` says why it ended before its plan did.

    Every request is a task of its own. An open loop starts them when they are due, whatever the server does; a closed
    loop starts the next where one ended.
    """

    def __init__(
        self,
        client: Client,
        plan: list[PlannedRequest],
        load: Load,
        level: LevelArgs,
        zero: float,
        stop: asyncio.Event | None = None,
    ) -> None:
        self.answers: list[Answer] = []
        self.aborted: str | None = None
        self._client = client
        self._plan = plan
        self._load = load
        self._level = level
        self._zero = zero
        self._stop = stop or asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._places = asyncio.Semaphore(level.max_inflight) if level.max_inflight is not None else None
        self._over = asyncio.Event()
        self._idle = asyncio.Event()
        self._measured = 0

    async def run(self) -> None:
        """Send everything, wait for the answers up to the drain limit, and cancel what is left."""
        arrivals = asyncio.create_task(self._arrive_closed() if self._load.concurrency else self._arrive_open())
        try:
            await self._until_sent(arrivals)
            await self._drain()
        finally:
            self._over.set()
            left = [task for task in (arrivals, *self._tasks) if not task.done()]
            for task in left:
                task.cancel()
            await asyncio.gather(*left, return_exceptions=True)
            self._settle_unsent()
        if not arrivals.cancelled():
            arrivals.result()

    async def _until_sent(self, arrivals: asyncio.Task[None]) -> None:
        """Wait until the last request has left or the server is gone."""
        while not arrivals.done() and self.aborted is None:
            await asyncio.wait({arrivals}, timeout=WATCH_SECONDS)
            self.aborted = INTERRUPTED if self._stop.is_set() else self._gone(GONE_AFTER_REFUSALS)
        arrivals.cancel()
        self._over.set()

    async def _drain(self) -> None:
        """Wait for the answers that are still open, not for ever."""
        limit = self._level.drain_limit
        end = self._client.now() + limit
        while self._tasks and self._client.now() < end and not self._is_silent() and not self._stop.is_set():
            self._idle.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._idle.wait(), WATCH_SECONDS)
        if self._stop.is_set():
            self.aborted = INTERRUPTED
        self.aborted = self.aborted or self._gone(min(GONE_AFTER_REFUSALS, len(self.answers)))
        if self._tasks and self.aborted is None:
            count = len(self._tasks)
            self.aborted = f"{count} answers had not ended {limit:g} s after the last request (--drain_limit)"

    async def _arrive_open(self) -> None:
        pacer = Pacer()
        try:
            for planned in self._plan:
                due = planned.send_at or 0.0
                await pacer.until(self._zero + due)
                self._start(planned, due)
        finally:
            pacer.close()

    async def _arrive_closed(self) -> None:
        """Start the streams one after the other, and wait until the first of them has nothing more to ask."""
        streams = self._load.concurrency or 1
        apart = min(STAGGER_SECONDS, LONGEST_STAGGER_SECONDS / streams)
        pacer = Pacer()
        try:
            for number in range(streams):
                await pacer.until(self._zero + number * apart)
                self._follow()
            await self._over.wait()
        finally:
            pacer.close()

    def _follow(self) -> None:
        """A stream of the closed loop is free: ask the next, or end the loop."""
        if self._over.is_set():
            return
        now = self._client.now()
        if self._has_enough(now):
            self._over.set()
            return
        self._measured += now >= self._level.warmup
        self._start(self._take_planned(), now)

    def _has_enough(self, now: float) -> bool:
        level = self._level
        if level.num_requests is not None:
            return self._measured >= level.num_requests
        return now >= level.warmup + level.duration and self._measured >= level.min_requests

    def _take_planned(self) -> PlannedRequest:
        """The next request of the plan; a loop faster than the plan goes round it again with renewed prompts."""
        index = len(self.answers)
        planned = self._plan[index % len(self._plan)]
        if index < len(self._plan):
            return planned
        return replace(planned, index=index, prompt=renewed(planned.prompt, index))

    def _start(self, planned: PlannedRequest, intended: float) -> None:
        answer = self._client.expect(planned, intended)
        self.answers.append(answer)
        task = asyncio.create_task(self._ask(planned, answer))
        self._tasks.add(task)
        task.add_done_callback(self._end)

    def _end(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not self._tasks:
            self._idle.set()

    async def _ask(self, planned: PlannedRequest, answer: Answer) -> None:
        if self._places is None:
            await self._client.ask(planned, answer)
        else:
            # The record keeps the intended time, so waiting here is lateness of the client.
            async with self._places:
                await self._client.ask(planned, answer)
        if self._load.concurrency:
            loop = asyncio.get_running_loop()
            if answer.failure is None:
                loop.call_soon(self._follow)
            else:
                loop.call_later(FAILURE_PAUSE_SECONDS, self._follow)

    def _gone(self, refusals: int) -> str | None:
        """Why the server counts as gone, if it does."""
        refused = self._client.refused
        if refused and refused >= refusals:
            return f"the server takes no connections: the last {refused} requests could not be sent"
        if self._is_silent():
            return f"the server sent nothing for {self._level.drain_limit:g} s (--drain_limit)"
        return None

    def _is_silent(self) -> bool:
        client = self._client
        return client.open > 0 and client.now() - client.last_sign > self._level.drain_limit

    def _settle_unsent(self) -> None:
        """Write down the requests that never left: those waiting for a place, and those due after the abort."""
        for answer in self.answers:
            if answer.record.sent is None:
                answer.failure = (Outcome.CANCELLED, "not sent: it still waited for a place (--max_inflight)")
        if self.aborted in (None, INTERRUPTED) or self._load.concurrency:
            return
        for planned in self._plan[len(self.answers) :]:
            answer = self._client.expect(planned, planned.send_at or 0.0)
            answer.failure = (Outcome.CONNECT, "not sent: the server was gone")
            self.answers.append(answer)
