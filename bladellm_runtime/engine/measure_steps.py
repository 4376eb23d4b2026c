"""What steps cost on this device: a few of them, timed at start."""

import logging
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from math import inf
from statistics import median

import numpy as np

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
"""So long after the first prompt no more are started."""
ROUNDS = 3
PROMPTS = (1024, 512, 256)
LONG_PROMPT = 4096
SHORT_PROMPT, SHORT_REQUESTS = 16, 64
"""Many requests with little KV beside those prompts tell what a decode row costs apart from the KV it reads."""

UNUSUAL = 1.5
"""Times what is expected, or one so many-th of it."""

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
    deadline = inf
    for _ in range(min(SHORT_REQUESTS, spec.num_slots // 4)):
        probe.add(SHORT_PROMPT)
    for tokens in _prompts():
        probe.prefill(tokens)
        # Not from the start on: what is done once, in the first step, may take as long.
        deadline = min(deadline, time.monotonic() + SECONDS)
        if time.monotonic() > deadline:
            break
        if tokens == LONG_PROMPT:
            # From here on with few decodes.
            probe.finish()
    probe.finish()
    core.watch = None
    usual = _usual(probe.measured, sizes)
    cost = fit_step_cost(usual, sizes)
    logger.info(
        "a step with prompts takes %.1f ms, %.2f µs a token, %.2f µs more a decode row and %.3f µs a token of its KV; "
        "of %d steps half are within %.1f %% of that",
        cost.step, 1e3 * cost.token, 1e3 * cost.decode_row, 1e3 * cost.decode_kv,
        len(usual), 100 * median(abs(cost.milliseconds(load) / ms - 1) for load, ms in usual),
    )  # fmt: skip
    return cost


def _usual(measured: list[tuple[StepLoad, float]], sizes: Sequence[int]) -> list[tuple[StepLoad, float]]:
    """The steps in which nothing was done for the first time, such as loading a kernel, and whose end was seen in time:
    near the median of those with as many prompt tokens, and not far above the line."""
    like: dict[int, list[float]] = defaultdict(list)
    for load, ms in measured:
        like[load.prefill_tokens].append(ms)
    near = [
        (load, ms) for load, ms in measured
        if 0 < ms <= UNUSUAL * median(like[load.prefill_tokens]) <= UNUSUAL**2 * ms
    ]  # fmt: skip
    line = fit_step_cost(near, sizes)
    return [(load, ms) for load, ms in near if ms <= UNUSUAL * line.milliseconds(load)]


def _prompts() -> Iterator[int]:
    for _ in range(2):
        for _ in range(ROUNDS):
            yield from PROMPTS
        yield LONG_PROMPT


class StepProbe:
    """Requests that decode until `finish`, and how long each step with a prompt took.

    A long prompt may take the host longer to launch, operator by operator, than the step of decodes before takes the
    device: that then seems to have been longer, and the one with the prompt shorter, by as much. So there is another
    step of the same decodes before it, and what that did not take is the prompt's.

    Tokens are random: with rows that are all the same a token was seen to take a GPU 14 µs, and 20 under load.
    """

    def __init__(self, core: EngineCore, limits: SchedulerLimits, spec: KvSpec, adapters: int = 0) -> None:
        self.measured: list[tuple[StepLoad, float]] = []
        """Milliseconds of each."""
        self._decodes: list[float] = []
        """Of the steps since the last one with a prompt."""
        self._core = core
        self._random = np.random.default_rng(0)
        self._vocab_size = limits.vocab_size
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
        if not plan.has_prompts:
            self._decodes.append(1e3 * seconds)
            return
        late = self._decodes[-1] - self._decodes[-2] if len(self._decodes) > 1 else 0.0
        self.measured.append((plan.load, 1e3 * seconds + max(late, 0.0)))
        self._decodes.clear()

    def add(self, tokens: int) -> None:
        """Add a request, as long as one may be; all others end first if there is no place for it."""
        tokens = min(tokens, self._longest)
        if self._used + tokens + self._answer > self._room or len(self._running) == self._slots:
            self.finish()
        self._added += 1
        params = SamplingParams(max_tokens=self._answer, temperature=0.0, ignore_eos=True)
        prompt = self._random.integers(self._vocab_size, size=tokens).tolist()
        request = AddRequest(-1 - self._added, prompt, params, 0, 0.0, cache_salt=f"probe {self._added}")
        self._core.add(request, Prepared(adapter=self._adapters[self._added % len(self._adapters)]))
        self._running.append(request.request_id)
        self._used += tokens + self._answer

    def prefill(self, tokens: int) -> None:
        """Add a request, step until its first token is there, and once more."""
        self.add(tokens)
        newest = self._running[-1]
        while not any(delta.request_id == newest for delta in one_by_one(self._core.step())):
            pass
        self._core.step()

    def finish(self) -> None:
        """End all requests and the steps in flight."""
        self._core.abort(self._running)
        while not self._core.idle:
            self._core.step()
        self._running.clear()
        self._used = 0
