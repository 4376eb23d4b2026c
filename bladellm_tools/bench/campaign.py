"""Carries turns out: servers started and stopped, every level run, results kept whatever happens.

A campaign ends by itself, at a level that `--stop_when` names, or when it is interrupted; it never loses a run, and
stores each before the next where it is given a way to.
"""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from bladellm_runtime.errors import UserError
from bladellm_tools.bench.args import LevelArgs, TargetArgs, WorkloadArgs
from bladellm_tools.bench.endpoints import Endpoint, Server
from bladellm_tools.bench.level import run_level
from bladellm_tools.bench.live import View
from bladellm_tools.bench.loads import amount
from bladellm_tools.bench.metrics import LevelSummary, summarise
from bladellm_tools.bench.records import LevelRun, Load, PlannedRequest
from bladellm_tools.bench.slo import SloLimit
from bladellm_tools.bench.stopping import StopRule
from bladellm_tools.bench.target import Target, resolve_target
from bladellm_tools.bench.turns import Turn
from bladellm_tools.bench.workload import plan_requests

Result = TypeVar("Result")


class InterruptedCampaignError(Exception):
    """Somebody pressed Ctrl-C."""


@dataclass
class Servers:
    """The endpoints' servers, at most one of those that are started here at a time: they may need the same GPU."""

    args: TargetArgs
    ignore_eos: bool
    folder: Path
    _running: Server | None = None
    _target: Target | None = None
    _others: dict[str, Target] = field(default_factory=dict)

    async def target(self, endpoint: Endpoint) -> Target:
        """How to ask an endpoint, its server started if need be. Raises `UserError` when it is not to be had."""
        if endpoint.url is not None:
            if endpoint.name not in self._others:
                self._others[endpoint.name] = await self._resolve(endpoint.name, endpoint.url)
            return self._others[endpoint.name]
        if self._running is None or self._running.endpoint != endpoint or self._running.ended or self._target is None:
            await self.close()
            self._running = server = Server(endpoint, self.folder, self.args.start_timeout)
            await server.start()
            self._target = await self._resolve(endpoint.name, server.url)
        return self._target

    async def _resolve(self, name: str, url: str) -> Target:
        return await resolve_target(self.args, name, url, self.ignore_eos)

    def ended(self, endpoint: Endpoint) -> str | None:
        """Why the server of an endpoint no longer runs, as far as that is known here."""
        return self._running.ended if self._running is not None and self._running.endpoint == endpoint else None

    async def close(self) -> None:
        """Stop the server that was started here."""
        server, self._running, self._target = self._running, None, None
        if server is not None:
            await server.stop()


@dataclass
class Campaign:
    """Measures turns one after the other; `runs` and `notes` are what came of it so far.

    keep: told after every run, to store it; what it raises as `UserError` becomes a note, and it is told no more.
    """

    workload: WorkloadArgs
    level: LevelArgs
    slo: Sequence[SloLimit]
    rules: Sequence[StopRule]
    servers: Servers
    view: View
    stop: asyncio.Event
    keep: Callable[[], None] | None = None
    runs: list[LevelRun] = field(default_factory=list)
    summaries: list[LevelSummary] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    _gone: set[str] = field(default_factory=set)
    _drawn: tuple[object, list[PlannedRequest]] = (None, [])

    async def take(self, turns: Sequence[Turn]) -> None:
        """Take the turns, but those beyond a level at which their endpoint's sweep ends."""
        for turn in turns:
            if turn.endpoint.name not in self._gone and not self.is_over(turn.endpoint, turn.load):
                await self._take_one(turn)

    async def take_level(self, endpoint: Endpoint, load: Load) -> None:
        """All repeats of one level of one endpoint, whatever lighter levels said."""
        for repeat in range(self.level.repeats):
            if endpoint.name not in self._gone:
                await self._take_one(Turn(endpoint, load, repeat))

    async def _take_one(self, turn: Turn) -> None:
        try:
            run = await self.measure(turn, self.level)
        except UserError as error:
            if not self.runs:
                raise
            self._gone.add(turn.endpoint.name)
            self.note(f"{turn.endpoint.name} was measured no further: {error}")
            return
        if run.requests:
            self.runs.append(run)
            self.summaries.append(summarise(run, self.slo))
            self.view.level_ends(self.summaries[-1], self.run_name(turn.repeat))
            self._keep()
        if self.stop.is_set():
            raise InterruptedCampaignError
        reason = self.broken(turn.endpoint, turn.load)
        if reason is not None and turn.repeat + 1 == self.level.repeats:
            self.view.say(f"{turn.endpoint.name}: no level above {turn.load.label}: {reason}")

    def _keep(self) -> None:
        try:
            if self.keep is not None:
                self.keep()
        except UserError as error:
            self.keep = None
            self.note(f"Results are not stored before the end: {error}")

    async def measure(self, turn: Turn, level: LevelArgs) -> LevelRun:
        """One repeat of one level, its server started if need be; the same requests for every endpoint.

        Raises `UserError` where there is no server, `InterruptedCampaignError` when told to stop before it began.
        """
        target = await self._unless_stopped(self.servers.target(turn.endpoint))
        plan = self._plan(level, turn, target.tokenizer)
        self.view.level_begins(turn.endpoint.name, turn.load, self.run_name(turn.repeat), len(plan))
        seed = self.workload.seed
        run = await run_level(target, plan, turn.load, level, turn.repeat, seed, self.view.on_event, self.stop)
        run.aborted = self.servers.ended(turn.endpoint) or run.aborted
        return run

    def _plan(self, level: LevelArgs, turn: Turn, tokenizer: str | None) -> list[PlannedRequest]:
        """What is asked of every endpoint; drawn once for those that take turns with it, which takes seconds."""
        drawn_for = (level, turn.load, turn.repeat, tokenizer)
        if self._drawn[0] != drawn_for:
            self._drawn = drawn_for, plan_requests(self.workload, level, turn.load, turn.repeat, tokenizer)
        return self._drawn[1]

    def run_name(self, repeat: int) -> str:
        """Which repeat, for people."""
        return f"run {repeat + 1}/{self.level.repeats}"

    def is_over(self, endpoint: Endpoint, load: Load) -> bool:
        """Whether a lighter level has ended the endpoint's sweep."""
        lighter = {summary.load for summary in self.summaries if amount(summary.load) < amount(load)}
        return any(self.broken(endpoint, other) is not None for other in lighter)

    def broken(self, endpoint: Endpoint, load: Load) -> str | None:
        """The rule of `--stop_when` that most runs of a level break, or None."""
        runs = [run for run in self.summaries if run.endpoint == endpoint.name and run.load == load]
        for rule in self.rules:
            if 2 * sum(rule.is_broken(run) for run in runs) > len(runs):
                return rule.text
        return None

    def note(self, text: str) -> None:
        """Keep a sentence for the report."""
        self.notes.append(text)
        self.view.say(text)

    async def _unless_stopped(self, work: Coroutine[Any, Any, Result]) -> Result:
        """The result of the work, which an interruption cancels."""
        task = asyncio.ensure_future(work)
        stopped = asyncio.ensure_future(self.stop.wait())
        try:
            await asyncio.wait({task, stopped}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise InterruptedCampaignError
            return task.result()
        finally:
            stopped.cancel()
            task.cancel()
            await asyncio.gather(task, stopped, return_exceptions=True)
