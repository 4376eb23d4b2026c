"""The cost of steps measured at start, on a device whose costs are known."""

from types import SimpleNamespace

import pytest

from bladellm_runtime.engine import core as core_module
from bladellm_runtime.engine import measure_steps
from bladellm_runtime.engine.core import EngineCore
from bladellm_runtime.kv.accounting import KvAccounting
from bladellm_runtime.kv.spec import KvGroup, KvSpec
from bladellm_runtime.scheduler.limits import SchedulerLimits
from bladellm_runtime.scheduler.plan import StepPlan
from bladellm_runtime.scheduler.prepared import NO_ADAPTER
from bladellm_runtime.scheduler.scheduler import Scheduler
from bladellm_runtime.scheduler.step_cost import StepCost, StepLoad, chunk_pairs
from tests.engine.test_core import ArithmeticRunner

COST = StepCost(step=2.5, token=0.02, decode_row=0.01, decode_kv=4e-5, prefill_pair=1e-6)
ADAPTERS = 3
ADAPTED = 1.2
"""Milliseconds that a step takes longer where some of its rows have adapters."""
FIRST_STEP = 0.4
"""Seconds of the first step more than the line: what compiling something takes."""
LONGEST_REPLAYED = 1200


class TimedRunner(ArithmeticRunner):
    """Steps take, on a clock of their own, what the line says, one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.now, self._free = 0.0, 0.0
        self.launch_seconds = 0.0
        """Of the host, for a step that is too long to be replayed; the device begins with what is there of it."""
        self.adapters: dict[int, int] = {}
        """Of the request in each slot."""
        self.mixed = 0
        """Steps with as many different adapters as there can be, no adapter among them."""

    def monotonic(self) -> float:
        return self.now

    def launch(self, plan: StepPlan):
        extra = FIRST_STEP if plan.step == 1 else 0.0
        self.adapters |= {load.slot: load.adapter for load in plan.loads}
        present = {self.adapters[slot] for slot in plan.slots}
        self.mixed += len(present) == 1 + ADAPTERS
        extra += 1e-3 * ADAPTED if present != {NO_ADAPTER} else 0.0
        self._free = max(self._free, self.now) + 1e-3 * COST.milliseconds(plan.load) + extra
        self.now += self.launch_seconds if plan.tokens > LONGEST_REPLAYED else 0.0
        return super().launch(plan), self._free

    def collect(self, launched):
        inner, end = launched
        self.now = max(self.now, end)
        return super().collect(inner)


@pytest.fixture
def runner(monkeypatch):
    runner = TimedRunner()
    for module in (core_module, measure_steps):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=runner.monotonic))
    return runner


def measured(
    runner: TimedRunner,
    overlap: bool,
    slots: int,
    tokens: int,
    max_model_len: int,
    adapters: int = 0,
    step_tokens: int = 2048,
) -> StepCost:
    spec = KvSpec((KvGroup((0,), 64),), 16, tokens // 16, slots, max_model_len)
    limits = SchedulerLimits(step_tokens, step_tokens, max_model_len, frozenset(), 1000)
    core = EngineCore(Scheduler(limits, KvAccounting(spec), runner.monotonic), runner, overlap=overlap)
    cost = measure_steps.measure_step_cost(core, limits, spec, adapters=adapters)
    assert core.idle
    assert core.watch is None
    core.check()
    return cost


@pytest.mark.parametrize(("overlap", "launch_seconds"), [(True, 0.0), (False, 0.0), (True, 0.03), (True, 0.07)])
def test_the_cost_of_steps_is_found(runner, overlap, launch_seconds):
    """Also where the host sees late that a step has ended, busy launching a long one behind it."""
    runner.launch_seconds = launch_seconds
    step_tokens = 8192 if launch_seconds else 2048
    cost = measured(runner, overlap, slots=256, tokens=100_000, max_model_len=8192, step_tokens=step_tokens)
    for rows, context, start, tokens in (
        (0, 0, 0, 1024),
        (8, 1000, 0, 512),
        (200, 500, 0, 300),
        (30, 2000, 3000, 1000),
    ):
        load = StepLoad(rows, rows * context, tokens, chunk_pairs(start, tokens))
        assert cost.milliseconds(load) == pytest.approx(COST.milliseconds(load), rel=0.05)
    assert runner.now < measure_steps.SECONDS + FIRST_STEP + 0.1


def test_an_engine_with_adapters_measures_steps_that_have_them(runner):
    """All adapters side by side, beside requests without one."""
    cost = measured(runner, True, slots=256, tokens=100_000, max_model_len=8192, adapters=ADAPTERS)
    for load in (StepLoad(8, 8000, 512, chunk_pairs(0, 512)), StepLoad(200, 100_000, 300, chunk_pairs(0, 300))):
        assert cost.milliseconds(load) == pytest.approx(COST.milliseconds(load) + ADAPTED, rel=0.05)
    assert runner.mixed > 20


def test_no_two_rows_of_a_step_are_alike(runner, monkeypatch):
    """A GPU multiplies equal rows with less power, and faster: the line would be one that no traffic comes to."""
    prompts = []
    add = EngineCore.add

    def watched(core, request, *more):
        prompts.append(request.prompt)
        add(core, request, *more)

    monkeypatch.setattr(EngineCore, "add", watched)
    measured(runner, True, slots=256, tokens=100_000, max_model_len=8192)
    long = [prompt for prompt in prompts if len(prompt) >= 256]
    assert len(long) > 5
    for prompt in long:
        # Of 1,000 tokens, drawn: the expected number of different ones is 1000 (1 - 0.999 ** n).
        assert len(set(prompt)) > 0.9 * 1000 * (1 - 0.999 ** len(prompt))
    assert len({tuple(prompt[:16]) for prompt in prompts}) == len(prompts)


@pytest.mark.parametrize("tokens", [600, 512])
def test_one_slot_and_little_memory_are_enough(runner, tokens):
    cost = measured(runner, True, slots=1, tokens=tokens, max_model_len=4096)
    load = StepLoad(0, 0, 256, chunk_pairs(0, 256))
    assert cost.milliseconds(load) == pytest.approx(COST.milliseconds(load), rel=0.2)


def test_steps_far_from_others_like_them_or_far_above_the_line_are_left_out():
    loads = [StepLoad(0, 0, tokens, 0) for tokens in (256, 512, 1024) * 4]
    usual = [(load, COST.milliseconds(load)) for load in loads]
    for strange in (0.0, 1.0, 10.0, 500.0):
        assert measure_steps._usual([*usual, (loads[2], strange)], ()) == usual
    assert measure_steps._usual([(StepLoad(0, 0, 700, 0), 400.0), *usual], ()) == usual
