"""`RankedRunner`: rank 0's runner, which has the other ranks do the same; the engine core knows no difference."""

import concurrent.futures
import logging
import secrets
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from bladellm_runtime.distributed.communicator import MeetingError, abort
from bladellm_runtime.engine.rank_place import RankPlace
from bladellm_runtime.engine.runner import ModelRunner
from bladellm_runtime.engine.running_step import RunningStep
from bladellm_runtime.engine.step_errors import DeviceLostError, GroupLostError, StepMemoryError
from bladellm_runtime.errors import UserError
from bladellm_runtime.ranks.channel import ChannelBroken
from bladellm_runtime.ranks.group import Ranks
from bladellm_runtime.ranks.messages import AdapterMoved, RankOrder, UseMixedGraphs, sample_message, step_message
from bladellm_runtime.scheduler.plan import StepPlan, StepResult, TokenMasks
from bladellm_runtime.wire.messages import EngineStats

VERDICT_SECONDS = 1.5
"""How long to wait for the reason when something fails that others have part in."""
WAIT_SECONDS = 0.1
NAP_SECONDS = 0.00005
"""How often a GPU is asked for its step: waiting for the event would take the core as well, and outlast the group."""

logger = logging.getLogger(__name__)

Launched = concurrent.futures.Future[RunningStep] | RunningStep


class RankedRunner:
    """Sends every plan to the other ranks just before its own launch, and nothing is waited for.

    A step without a result ends the group: what the others did of it is not known. So does the loss of a rank. Both
    are raised as `GroupLostError`.
    """

    def __init__(self, runner: ModelRunner, ranks: Ranks, place: RankPlace) -> None:
        self._runner = runner
        self._ranks = ranks
        self._place = place
        self._in_flight: deque[int] = deque()
        ranks.on_failure.append(abort)

    @property
    def queued(self) -> Callable[[], object]:
        """As the runner's."""
        return self._runner.queued

    @queued.setter
    def queued(self, call: Callable[[], object]) -> None:
        self._runner.queued = call

    @property
    def shared_rows(self) -> int:
        """As the runner's."""
        return self._runner.shared_rows

    @property
    def mixed_sizes(self) -> Sequence[int]:
        """As the runner's."""
        return self._runner.mixed_sizes

    def use_mixed_graphs(self, on: bool) -> None:
        """As the runner's, on every rank."""
        self.send(UseMixedGraphs(on))
        self._runner.use_mixed_graphs(on)

    def launch(self, plan: StepPlan) -> Launched:
        """Start a step on all ranks."""
        choose_seeds(plan)
        with self._lost_group():
            self._ranks.send(step_message(plan))
            self._in_flight.append(plan.step)
            return self._runner.launch(plan)

    def sample(self, launched: Launched, masks: TokenMasks) -> Launched:
        """Start the rest of the step launched last on all ranks: only this one knows the constraints."""
        with self._lost_group():
            self._ranks.send(sample_message(self._in_flight[-1], masks))
            return self._runner.sample(launched, masks)

    def collect(self, launched: Launched) -> StepResult:
        """Wait for the result of rank 0, or of a pipeline's last stage, as long as all ranks are well."""
        with self._lost_group():
            while not self._runner.finished(launched):
                self._check()
                _wait(launched)
            result = self._runner.collect(launched)
            if self._ranks.results is not None:
                while not self._ranks.results.wait(WAIT_SECONDS):
                    self._check()
                result = self._ranks.results.take(self._in_flight[0])
        self._check()
        self._in_flight.popleft()
        self._ranks.done = self._ranks.sent - len(self._in_flight)
        return result

    def finished(self, launched: Launched) -> bool:
        """As the runner's, of the oldest step in flight."""
        results = self._ranks.results
        return self._runner.finished(launched) and (results is None or results.wait(0.0))

    def recover(self) -> None:
        """Never called: no `StepMemoryError` leaves this runner."""
        raise RuntimeError("a step of several ranks cannot be given up")

    def add_stats(self, stats: EngineStats) -> None:
        """As the runner's. Raises `GroupLostError`: an idle engine learns of it here."""
        self._check()
        self._runner.add_stats(stats)

    def send(self, order: RankOrder) -> None:
        """Have the other ranks do something behind what they were told before."""
        with self._lost_group():
            self._ranks.send(order)

    def adapters_moved(self) -> list[AdapterMoved]:
        """What became of adapters on the other ranks since the last call. Raises `GroupLostError`."""
        self._check()
        return self._ranks.adapters_moved()

    def serve(self) -> None:
        """The start is over, on every rank."""
        with self._lost_group():
            self._ranks.serve()

    def close(self) -> None:
        """End the other ranks, then as the runner's. Raises `GroupLostError`, its part done as by `abandon`."""
        try:
            with self._lost_group():
                self._runner.drain()
        except GroupLostError:
            self.abandon()
            raise
        self._ranks.close()
        self._runner.close()
        self._place.leave()

    def abandon(self) -> None:
        """End the other ranks, whose group is lost; this one's runner is left alone as far as it may hang."""
        self._ranks.close()
        self._runner.abandon()

    def _check(self) -> None:
        if self._ranks.failure is not None:
            raise GroupLostError(self._ranks.failure)

    @contextmanager
    def _lost_group(self) -> Iterator[None]:
        """Raises what goes wrong inside as the loss of the group, for the reason that started it."""
        self._check()
        try:
            with self._ranks.guarded():
                yield
        except Exception as error:  # those of torch's groups that are gone are of many types
            lost = lost_group(error, self._ranks)
            if lost is not None:
                raise lost from error
            if isinstance(error, UserError):
                raise
            logger.exception("rank 0 failed in what all ranks do")
            raise GroupLostError(self._ranks.give_up(f"{type(error).__name__}: {error}")) from error


def choose_seeds(plan: StepPlan) -> None:
    """Give requests without a seed one, so that all ranks draw the same."""
    for index, load in enumerate(plan.loads):
        if load.params.seed is None:
            params = replace(load.params, seed=secrets.randbits(63))
            plan.loads[index] = replace(load, params=params)


def lost_group(error: BaseException, ranks: Ranks) -> GroupLostError | None:
    """What an error of rank 0 stands for, None where that is the error itself."""
    if isinstance(error, GroupLostError) or not isinstance(error, Exception):
        return None
    if isinstance(error, StepMemoryError):
        return GroupLostError(str(error))
    if isinstance(error, UserError) and not isinstance(error, DeviceLostError | MeetingError):
        return None
    verdict = ranks.verdict(VERDICT_SECONDS)
    if verdict is None and isinstance(error, ChannelBroken):
        verdict = f"the engine stopped: {error}"
    return None if verdict is None else GroupLostError(verdict)


def _wait(launched: Launched) -> None:
    """Wait for a step, or a moment."""
    if isinstance(launched, RunningStep):
        time.sleep(NAP_SECONDS)
    else:
        concurrent.futures.wait([launched], timeout=WAIT_SECONDS)
