"""What steps cost on this device: a few of them, timed at start."""

import logging
import time
from collections.abc import Iterator, Sequence

from bladellm_runtime.engine.core import EngineCore
from bladellm_runtime.kv.spec import KvSpec
from bladellm_runtime.request import SamplingParams
from bladellm_runtime.scheduler.admission import kv_capacity
from bladellm_runtime.scheduler.limits import SchedulerLimits
from bladellm_runtime.scheduler.plan import StepPlan
from bladellm_runtime.scheduler.prepared import NO_ADAPTER, Prepared
from bladellm_runtime.scheduler.step_cost import StepCost, StepLoad, fit_step_cost
from bladellm_runtime.wire.messages import AddRequest, one_by_one

SECONDS = 0.8
"""After this long no more prompts are started."""
ROUNDS = 3
PROMPTS = (1024, 512, 256)
LONG_PROMPT = 4096
SHORT_PROMPT, SHORT_REQUESTS = 16, 64
"""Many requests with little KV beside those prompts tell what a decode row costs apart from the KV it reads."""

UNUSUAL = 1.5

logger = logging.getLogger(__name__)


def measure_step_cost(
    core: EngineCore, limits: SchedulerLimits, spec: KvSpec, sizes: Sequence[int] = (), adapters: int = 0
) -> StepCost:
    """Time prompts beside few and many decodes on an idle engine, and fit the cost of a step to it.

    sizes: token counts, ascending, that steps with prompts are padded to. adapters: slots for them, which requests have
    in turn, as they have none; what is in a slot does not matter to the time.
    Leaves the prompts in the cache and the steps in the counters: both are to be reset.
    """
    probe = StepProbe(core, limits, spec, adapters)
    core.watch = probe.note
    deadline = time.monotonic() + SECONDS
    for _ in range(min(SHORT_REQUESTS, spec.num_slots // 4)):
        probe.add(SHORT_PROMPT)
    for tokens in _prompts():
        probe.prefill(tokens)
        if time.monotonic() > deadline:
            break
        if tokens == LONG_PROMPT:
            # From here on with few decodes.
            probe.finish()
    probe.finish()
    core.watch = None
    cost = fit_step_cost(_usual(probe.measured, sizes), sizes)
    logger.info(
        "a step with prompts takes %.1f ms, %.2f µs a token, %.2f µs more a decode row and %.3f µs a token of its KV",
        cost.step, 1e3 * cost.token, 1e3 * cost.decode_row, 1e3 * cost.decode_kv,
    )  # fmt: skip
    return cost


def _usual(measured: list[tuple[StepLoad, float]], sizes: Sequence[int]) -> list[tuple[StepLoad, float]]:
    """The steps in which nothing was done for the first time, such as loading a kernel."""
    line = fit_step_cost(measured, sizes)
    return [(load, time) for load, time in measured if time <= UNUSUAL * line.milliseconds(load)]


def _prompts() -> Iterator[int]:
    for _ in range(2):
        for _ in range(ROUNDS):
            yield from PROMPTS
        yield LONG_PROMPT


class StepProbe:
    """Requests that decode until `finish`, and how long each step with a prompt took."""

    def __init__(self, core: EngineCore, limits: SchedulerLimits, spec: KvSpec, adapters: int = 0) -> None:
        self.measured: list[tuple[StepLoad, float]] = []
        """Milliseconds of each."""
        self._core = core
        self._adapters = [*range(adapters), NO_ADAPTER]
        longest = min(limits.max_model_len, kv_capacity(spec))
        self._answer = min(512, longest // 2)
        self._longest = longest - self._answer
        self._slots = spec.num_slots
        self._room = spec.num_granules * spec.granule_tokens // 2
        """KV tokens to use: half of them, so that nothing has to give way."""
        self._running: list[int] = []
        self._used = 0
        self._added = 0

    def note(self, plan: StepPlan, seconds: float) -> None:
        """Take a completed step."""
        if plan.has_prompts:
            self.measured.append((plan.load, 1e3 * seconds))

    def add(self, tokens: int) -> None:
        """Add a request, as long as one may be; all others end first if there is no place for it."""
        tokens = min(tokens, self._longest)
        if self._used + tokens + self._answer > self._room or len(self._running) == self._slots:
            self.finish()
        self._added += 1
        params = SamplingParams(max_tokens=self._answer, temperature=0.0, ignore_eos=True)
        request = AddRequest(-1 - self._added, [0] * tokens, params, 0, 0.0, cache_salt=f"probe {self._added}")
        self._core.add(request, Prepared(adapter=self._adapters[self._added % len(self._adapters)]))
        self._running.append(request.request_id)
        self._used += tokens + self._answer

    def prefill(self, tokens: int) -> None:
        """Add a request and step until its first token is there."""
        self.add(tokens)
        newest = self._running[-1]
        while not any(delta.request_id == newest for delta in one_by_one(self._core.step())):
            pass

    def finish(self) -> None:
        """End all requests and the steps in flight."""
        self._core.abort(self._running)
        while not self._core.idle:
            self._core.step()
        self._running.clear()
        self._used = 0
