"""`Stage`: what a runner does together with the other stages of a pipeline.

All of it is enqueued in the order of the steps, so that nothing is ever waited for that comes behind what waits:

- the first stage receives sampled tokens, then every stage but the first the hidden states of the one before;
- every stage but the last sends its own on when its layers are done;
- the last one sends the tokens that it sampled, beside what it does next.

Tokens go as the whole of `last_token`, one message a step. The first stage takes those of a step as late as it can:
where a row of the next step has its token from there, or when as many steps as may be in flight are behind it, the
result of which the scheduler had before.
"""

import numpy as np
import torch

from bladellm_runtime.distributed.links import PipelineLinks
from bladellm_runtime.models.decoder import WHOLE, StageEnds
from bladellm_runtime.scheduler.plan import StepPlan

STEPS_IN_FLIGHT = 2
"""Without a pipeline, and with overlap."""


class Stage:
    """The only stage of a model: nothing comes from elsewhere. in_flight: steps launched and not collected, at most."""

    def __init__(self, ends: StageEnds = WHOLE, in_flight: int = STEPS_IN_FLIGHT) -> None:
        self.ends = ends
        self.in_flight = in_flight

    def begin(self, plan: StepPlan, last_token: torch.Tensor) -> None:
        """Before all else of a step: see to it that `last_token` has what its rows read."""

    def receive(self, out: torch.Tensor) -> torch.Tensor:
        """Fill `out` [T, hidden] with what the stage before has left of the step's tokens. Returns it."""
        raise ValueError("nothing comes before the first stage")

    def send(self, hidden: torch.Tensor) -> None:
        """Hand the hidden states [T, hidden] of the step's tokens on."""
        raise ValueError("nothing comes behind the last stage")

    def end(self, last_token: torch.Tensor) -> None:
        """Behind the sampling of a step."""

    def drain(self, last_token: torch.Tensor) -> None:
        """Behind the last step of all: leave nothing on its way."""


class TokenOrder:
    """How many steps' tokens the first stage must have before it begins the next one. Steps count from 1."""

    def __init__(self, slots: int, in_flight: int) -> None:
        self._sampled = np.zeros(slots, dtype=np.int64)
        self._in_flight = in_flight

    def due(self, plan: StepPlan) -> int:
        """The step up to which it must; called once for every plan, in order."""
        due = int(self._sampled[plan.slots[: plan.num_decode]].max(initial=0))
        self._sampled[plan.slots[plan.samples]] = plan.step
        return max(due, plan.step - self._in_flight)


class PipelineStage(Stage):
    """One of several stages."""

    def __init__(self, ends: StageEnds, in_flight: int, links: PipelineLinks, slots: int, device: torch.device) -> None:
        super().__init__(ends, in_flight)
        self._links = links
        self._order = TokenOrder(slots, in_flight)
        self._received = 0
        self._begun = 0
        self._beside = torch.cuda.Stream(device) if device.type == "cuda" else None

    def begin(self, plan: StepPlan, last_token: torch.Tensor) -> None:
        if self.ends.first:
            self._take_tokens(self._order.due(plan), last_token)
            self._begun = plan.step

    def receive(self, out: torch.Tensor) -> torch.Tensor:
        return out if self._links.before is None else self._links.before.receive(out)

    def send(self, hidden: torch.Tensor) -> None:
        if self._links.behind is not None:
            self._links.behind.send(hidden)

    def end(self, last_token: torch.Tensor) -> None:
        if not self.ends.last or self._links.tokens is None:
            return
        if self._beside is None:
            self._links.tokens.send(last_token)
            return
        # The first stage may take them much later, and this one must go on; the next step writes to `last_token`.
        tokens = last_token.clone()
        self._beside.wait_stream(torch.cuda.current_stream(tokens.device))
        tokens.record_stream(self._beside)
        with torch.cuda.stream(self._beside):
            self._links.tokens.send(tokens)

    def drain(self, last_token: torch.Tensor) -> None:
        if self.ends.first:
            self._take_tokens(self._begun, last_token)

    def _take_tokens(self, due: int, last_token: torch.Tensor) -> None:
        """Receive those of all steps up to `due`."""
        while self._links.tokens is not None and self._received < due:
            self._links.tokens.receive(last_token)
            self._received += 1
