"""`Follower`: what a rank besides the first does: it carries out orders, and drops or reports the results of steps."""

import time
from collections import deque
from contextlib import ExitStack
from typing import Any

from bladellm_runtime.engine.kernel_compiles import KERNEL_COMPILES
from bladellm_runtime.engine.runner import ModelRunner
from bladellm_runtime.lora.loader import AdapterLoader
from bladellm_runtime.lora.policy import Move
from bladellm_runtime.ranks.channel import ChannelBroken, PlanReceiver
from bladellm_runtime.ranks.messages import (
    AdapterMoved,
    CloseRank,
    DropAdapter,
    LoadAdapter,
    RankOrder,
    RunStep,
    SampleStep,
    Serve,
    UseMixedGraphs,
    read_masks,
    read_step,
)
from bladellm_runtime.ranks.pulse import Pulses
from bladellm_runtime.ranks.results import ResultSender
from bladellm_runtime.scheduler.plan import StepPlan

POLL_SECONDS = 0.002
"""How long to wait for an order before looking whether a step has ended."""
NAP_SECONDS = 0.0002
"""The same where the results are waited for."""


class Follower:
    """Runs on rank 0's orders until told to close."""

    def __init__(
        self,
        runner: ModelRunner,
        port: PlanReceiver,
        pulses: Pulses,
        in_flight: int,
        results: ResultSender | None = None,
        loader: AdapterLoader | None = None,
        rank: int = 1,
    ) -> None:
        """in_flight: steps, at most, as on rank 0. results: where to report them; dropped when None. loader: of
        adapters, None where there are no slots for any. rank: this one, which reports what became of them."""
        self._runner = runner
        self._port = port
        self._pulses = pulses
        self._in_flight = in_flight
        self._results = results
        self._loader = loader
        self._rank = rank
        self._loading = 0
        """Adapters whose outcome is to be reported."""
        self._steps: deque[tuple[int, Any]] = deque()
        self._plan: StepPlan | None = None
        """Of the step launched last."""
        self._unsampled = False
        """Whether the masks of the step launched last are to come: nothing else comes before them."""
        self._starting = ExitStack()

    def run(self) -> None:
        """Follow. Raises what a step raises, and `ChannelBroken`."""
        # The kernels of the warm-up may be compiled.
        self._starting.enter_context(KERNEL_COMPILES.expected())
        while True:
            order = self._port.receive(self._patience())
            if order is not None:
                self._pulses.on_device = False
                self._pulses.begun += 1
                if isinstance(order, CloseRank):
                    break
                self._follow(order)
            elif self._steps and not self._waits_for_masks() and self._runner.finished(self._steps[0][1]):
                self._collect()
            elif self._results is not None:
                time.sleep(NAP_SECONDS)
            self._report_adapters()
            self._pulses.done = self._pulses.begun - len(self._steps)
            self._pulses.on_device = self._runner.on_gpu and bool(self._steps) and not self._waits_for_masks()
        self._collect_all()
        if self._loader is not None:
            self._loader.close()
        self._runner.drain()
        self._runner.close()

    def _patience(self) -> float | None:
        if not self._steps:
            return POLL_SECONDS if self._loading else None
        return POLL_SECONDS if self._results is None else 0.0

    def _waits_for_masks(self) -> bool:
        """Whether no other step is left to collect than the one whose masks are to come."""
        return self._unsampled and len(self._steps) == 1

    def _follow(self, order: RankOrder) -> None:
        match order:
            case RunStep():
                if len(self._steps) == self._in_flight:
                    self._collect()
                self._plan = read_step(order, self._plan)
                self._steps.append((order.step, self._runner.launch(self._plan)))
                self._unsampled = bool(order.constrained)
            case SampleStep():
                step, launched = self._steps.pop()
                if step != order.step:
                    raise ChannelBroken(f"masks of step {order.step} came when step {step} had been launched")
                self._steps.append((step, self._runner.sample(launched, read_masks(order))))
                self._unsampled = False
            case LoadAdapter(adapter, slot, read, dropped, evicted) if self._loader is not None:
                self._loader.begin(Move(adapter, slot, read, dropped, evicted))
                self._loading += 1
            case DropAdapter(adapter) if self._loader is not None:
                self._loader.drop(adapter)
            case UseMixedGraphs(on):
                self._collect_all()
                self._runner.use_mixed_graphs(on)
            case Serve():
                self._starting.close()
                self._pulses.serving = True

    def _report_adapters(self) -> None:
        for outcome in [] if self._loader is None else self._loader.poll():
            self._loading -= 1
            error = None if outcome.error is None else str(outcome.error)
            self._port.send(AdapterMoved(self._rank, outcome.adapter, error))

    def _collect(self) -> None:
        step, launched = self._steps[0]
        result = self._runner.collect(launched)
        if self._results is not None:
            self._results.send(step, result)
        self._steps.popleft()

    def _collect_all(self) -> None:
        while self._steps:
            self._collect()
