"""`Follower`: what a rank besides the first does: it carries out orders, and drops the results of steps."""

from collections import deque
from contextlib import ExitStack
from typing import Any

from bladellm_runtime.engine.core import OVERLAP_DEPTH
from bladellm_runtime.engine.kernel_compiles import KERNEL_COMPILES
from bladellm_runtime.engine.runner import ModelRunner
from bladellm_runtime.ranks.channel import PlanReceiver
from bladellm_runtime.ranks.messages import CloseRank, RankOrder, RunStep, Serve, UseMixedGraphs, read_step
from bladellm_runtime.ranks.pulse import Pulses

POLL_SECONDS = 0.002
"""How long to wait for an order before looking whether a step has ended."""


class Follower:
    """Runs on rank 0's orders until told to close. As there, two steps are in flight at most."""

    def __init__(self, runner: ModelRunner, port: PlanReceiver, pulses: Pulses) -> None:
        self._runner = runner
        self._port = port
        self._pulses = pulses
        self._steps: deque[Any] = deque()
        self._starting = ExitStack()
        self._eager = ExitStack()

    def run(self) -> None:
        """Follow. Raises what a step raises, and `ChannelBroken`."""
        # The kernels of the warm-up may be compiled.
        self._starting.enter_context(KERNEL_COMPILES.expected())
        while True:
            order = self._port.receive(POLL_SECONDS if self._steps else None)
            if order is not None:
                self._pulses.on_device = False
                self._pulses.begun += 1
                if isinstance(order, CloseRank):
                    break
                self._follow(order)
            elif self._runner.finished(self._steps[0]):
                self._collect()
            self._pulses.done = self._pulses.begun - len(self._steps)
            self._pulses.on_device = self._runner.on_gpu and bool(self._steps)
        self._collect_all()
        self._runner.close()

    def _follow(self, order: RankOrder) -> None:
        match order:
            case RunStep():
                if len(self._steps) == OVERLAP_DEPTH:
                    self._collect()
                self._steps.append(self._runner.launch(read_step(order)))
            case UseMixedGraphs(on):
                self._collect_all()
                self._eager.close()
                if not on:
                    self._eager.enter_context(self._runner.without_mixed_graphs())
            case Serve():
                self._starting.close()
                self._pulses.serving = True

    def _collect(self) -> None:
        self._runner.collect(self._steps[0])
        self._steps.popleft()

    def _collect_all(self) -> None:
        while self._steps:
            self._collect()
