"""The engine loop on a device with a clock: the next step is planned late, but not too late."""

import random
from collections.abc import Sequence
from dataclasses import replace
from operator import itemgetter
from types import SimpleNamespace

import pytest
from bladellm_kernels.prefix_groups import PrefixGroup

from bladellm_runtime.engine import core as core_module
from bladellm_runtime.engine import loop as loop_module
from bladellm_runtime.engine.arrival_hold import HOLD_SHARE, ArrivalHold
from bladellm_runtime.engine.core import EngineCore
from bladellm_runtime.engine.launch_timer import MARGIN_SECONDS, LaunchTimer
from bladellm_runtime.engine.loop import EngineLoop
from bladellm_runtime.kv.accounting import KvAccounting
from bladellm_runtime.kv.spec import KvGroup, KvSpec
from bladellm_runtime.request import SamplingParams
from bladellm_runtime.scheduler.limits import SchedulerLimits
from bladellm_runtime.scheduler.plan import StepPlan
from bladellm_runtime.scheduler.scheduler import Scheduler
from bladellm_runtime.wire.messages import AddRequest, RequestComing, Shutdown, one_by_one
from tests.engine.test_measure_steps import COST, TimedRunner
from tests.support.cases import drawn_of
from tests.support.step_plans import step_plan

HOST_SECONDS = 0.0003


class WatchedRunner(TimedRunner):
    """Adds up how long the device has nothing to do between steps in flight (idle), and in all (waited).

    rest: seconds that a launch with prompts takes after the device has its first part; says: whether the core is told
    when that is; more: seconds before that which it takes longer than one without.
    """

    def __init__(self, jitter: float = 0.0, rest: float = 0.0, says: bool = True, more: float = 0.0) -> None:
        super().__init__()
        self.idle, self.waited, self.waits, self.steps = 0.0, 0.0, 0, 0
        self._jitter, self._draw = jitter, random.Random(0)
        self._rest, self._says, self._more = rest, says, more

    def launch(self, plan: StepPlan):
        self.now += HOST_SECONDS + (self._more if plan.has_prompts else 0.0)
        waited = max(0.0, self.now - self._free)
        self.waited += waited
        self.waits += waited > 0
        self.idle += waited if self.outstanding else 0.0
        self.steps += 1
        launched = super().launch(plan)
        self._free += self._jitter * self._draw.random() * 1e-3
        if self._says:
            self.queued()
        self.now += self._rest if plan.has_prompts else 0.0
        return launched[0], self._free

    def finished(self, launched) -> bool:
        return launched[1] <= self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class Port:
    """Messages that come at their time."""

    def __init__(self, runner: WatchedRunner, messages: list[tuple[float, object]]) -> None:
        self.runner, self.messages = runner, messages
        self.tokens: dict[int, list[int]] = {}
        self.first: dict[int, float] = {}

    def receive(self, timeout: float) -> list[object]:
        end = self.runner.now + int(timeout * 1000) / 1000
        if self.messages and self.messages[0][0] <= end:
            self.runner.now = max(self.runner.now, self.messages[0][0])
            return [self.messages.pop(0)[1]]
        self.runner.now = end
        return []

    def send(self, output) -> None:
        for delta in one_by_one(output.deltas):
            self.tokens.setdefault(delta.request_id, []).extend(delta.tokens)
            self.first.setdefault(delta.request_id, self.runner.now)


def serve(
    monkeypatch,
    timer: LaunchTimer | None,
    jitter: float = 0.0,
    count: int = 20,
    goes_on: bool = True,
    hold: ArrivalHold | None = None,
    way: float = 0.0,
    vain: Sequence[float] = (),
    **launch: object,
) -> tuple[WatchedRunner, Port, list[float]]:
    """So many requests, 40 ms apart on average, after one that goes on decoding, or ends as they do. way: the seconds
    from their announcement, at their arrival, until the engine has them. vain: when more are announced that never come.
    """
    runner, rng = WatchedRunner(jitter, **launch), random.Random(3)
    clock = SimpleNamespace(monotonic=runner.monotonic, sleep=runner.sleep)
    for module in (core_module, loop_module):
        monkeypatch.setattr(module, "time", clock)
    spec = KvSpec((KvGroup((0,), 64),), 16, 4000, 64, 4096)
    limits = SchedulerLimits(2048, 2048, 4096, frozenset(), 1000)
    core = EngineCore(Scheduler(limits, KvAccounting(spec), runner.monotonic), runner, overlap=True)
    if timer is not None:
        core.pace(timer, hold)
    arrivals = [0.0, 0.5]
    for _ in range(count - 1):
        arrivals.append(arrivals[-1] + rng.expovariate(25.0))
    params = [
        SamplingParams(max_tokens=20 * count if i == 0 and goes_on else 20, ignore_eos=True) for i in range(count + 1)
    ]
    requests = [AddRequest(i, [5 + i] * 20, params[i], 0, at) for i, at in enumerate(arrivals)]
    coming = [(at, RequestComing()) for at in [*arrivals, *vain]]
    there = [(at + way, request) for at, request in zip(arrivals, requests, strict=True)]
    port = Port(runner, sorted([*coming, *there, (arrivals[-1] + 3.0 + 0.02 * count, Shutdown())], key=itemgetter(0)))
    EngineLoop(core, port).run()
    return runner, port, arrivals


def mean_wait(port: Port, arrivals: list[float]) -> float:
    return sum(port.first[i] - arrivals[i] for i in range(1, len(arrivals))) / (len(arrivals) - 1)


def test_prompts_wait_less_and_the_device_does_not_wait(monkeypatch):
    _, early, arrivals = serve(monkeypatch, None)
    runner, late, _ = serve(monkeypatch, LaunchTimer(COST))
    assert late.tokens == early.tokens
    assert mean_wait(late, arrivals) < mean_wait(early, arrivals) - 0.0003
    assert runner.idle < 0.001 * runner.now


def test_a_step_is_planned_early_enough_for_what_the_device_begins_with_only(monkeypatch):
    """What a launch with prompts does behind that, here a millisecond, delays no prompt."""
    rest = 0.001
    told, untold = LaunchTimer(COST), LaunchTimer(COST)
    _, short, arrivals = serve(monkeypatch, LaunchTimer(COST), count=100)
    runner, long, _ = serve(monkeypatch, told, count=100, rest=rest)
    assert long.tokens == short.tokens
    assert mean_wait(long, arrivals) < mean_wait(short, arrivals) + 0.1 * rest
    assert runner.idle < 0.001 * runner.now
    serve(monkeypatch, untold, count=100, rest=rest, says=False)
    assert told.spare(decode_plan(), True) > untold.spare(decode_plan(), True) + 0.5 * rest


def test_steps_of_uneven_length_leave_the_device_little_idle(monkeypatch):
    runner, _, _ = serve(monkeypatch, LaunchTimer(COST), jitter=2.0)
    assert runner.idle < 0.01 * runner.now


def decode_plan(rows: int = 1) -> StepPlan:
    ones = [1] * rows
    return step_plan(
        1, slots=[*range(rows)], starts=[9] * rows, query_lens=ones, samples=[True] * rows, num_decode=rows
    )


def on_time(timer: LaunchTimer, plan: StepPlan, host: float, device: float) -> None:
    timer.launched(plan, host)
    timer.followed(plan, late=False)
    timer.completed(plan, device)


@pytest.mark.parametrize("cost", [COST, None])
def test_the_margin_grows_while_the_device_waits_and_comes_back(cost):
    timer, plan = LaunchTimer(cost), decode_plan()
    for _ in range(200):
        on_time(timer, plan, HOST_SECONDS, 0.01)
    assert timer.spare(plan, False) == pytest.approx(0.01 - HOST_SECONDS - MARGIN_SECONDS)
    for _ in range(20):
        timer.launched(plan, HOST_SECONDS)
        timer.followed(plan, late=True)
        timer.completed(plan, 0.5)
    assert timer.spare(plan, False) < 0, "planned at once, the late steps' times not believed"
    for _ in range(500):
        on_time(timer, plan, HOST_SECONDS, 0.01)
    assert timer.spare(plan, False) == pytest.approx(0.01 - HOST_SECONDS - MARGIN_SECONDS)


def test_a_device_without_work_before_is_no_reason_to_expect_long_steps(monkeypatch):
    timer = LaunchTimer(COST)
    serve(monkeypatch, timer, goes_on=False)
    assert 0 < timer.expected(decode_plan()) < 0.003, "not with the time between requests"


def test_a_step_that_ended_before_the_next_launch_is_not_expected_to_take_longer_than_that(monkeypatch):
    timer = LaunchTimer(COST)
    for rows in range(1, 30):
        timer.completed(decode_plan(rows), 0.5)
    runner, _, _ = serve(monkeypatch, timer, count=100)
    assert timer.expected(decode_plan()) < 0.003
    assert runner.idle < 0.001 * runner.now


def test_prompts_that_come_just_before_a_launch_do_not_hurry_later_ones(monkeypatch):
    class Watched(LaunchTimer):
        late = 0

        def followed(self, plan: StepPlan, late: bool) -> None:
            self.late += late and not plan.has_prompts
            super().followed(plan, late)

    timer = Watched(COST)
    runner, _, _ = serve(monkeypatch, timer, count=200, more=0.0007)
    assert runner.waits > 5, "some steps with prompts were launched late"
    assert timer.late == 0


def test_steps_with_prompts_have_a_margin_of_their_own():
    timer, plan = LaunchTimer(COST), decode_plan()
    mixed = step_plan(1, slots=[0, 1], starts=[9, 0], query_lens=[1, 300], samples=[True, True], num_decode=1)
    for each, seconds in ((plan, 0.01), (mixed, 0.02)):
        on_time(timer, each, HOST_SECONDS, seconds)
    before = timer.spare(plan, False)
    for _ in range(5):
        timer.followed(mixed, late=True)
    assert timer.spare(plan, False) == before
    assert timer.expected(mixed) - timer.spare(mixed, False) > timer.expected(plan) - before + MARGIN_SECONDS


def test_what_is_announced_waits_less_and_costs_decodes_little(monkeypatch):
    way = 0.0015
    without, apart, arrivals = serve(monkeypatch, LaunchTimer(COST), count=200, way=way)
    runner, held, _ = serve(monkeypatch, LaunchTimer(COST), count=200, way=way, hold=ArrivalHold())
    assert held.tokens == apart.tokens
    assert mean_wait(held, arrivals) < mean_wait(apart, arrivals) - 0.0005
    assert 0.001 < (runner.waited - without.waited) / runner.now < HOLD_SHARE + 0.001


def test_a_step_with_prompts_is_planned_as_much_earlier_as_the_host_needs():
    timer, plan = LaunchTimer(COST), decode_plan()
    mixed = step_plan(1, slots=[0, 1], starts=[9, 0], query_lens=[1, 300], samples=[True, True], num_decode=1)
    assert timer.spare(mixed, True) < 1e-3 * COST.milliseconds(mixed.load), "before any was seen"
    for _ in range(200):
        on_time(timer, plan, HOST_SECONDS, 0.01)
        on_time(timer, mixed, 5 * HOST_SECONDS, 0.02)
    assert timer.spare(plan, False) - timer.spare(plan, True) == pytest.approx(4 * HOST_SECONDS)
    assert timer.spare(mixed, False) - timer.spare(plan, False) == pytest.approx(0.01)
    on_time(timer, plan, 0.003, 0.01)
    assert timer.spare(plan, False) == pytest.approx(0.007 - MARGIN_SECONDS), "one slow launch counts at once"


def test_steps_that_share_reads_are_expected_to_take_as_long_as_each_other():
    timer, alone = LaunchTimer(COST), step_plan(1, query_lens=[1] * 40, slots=[0] * 40, num_decode=40)
    shared = replace(alone, prefixes=(PrefixGroup(tuple(range(40)), 20),))
    for plan, seconds in ((alone, 0.008), (shared, 0.006)):
        timer.launched(plan, 0.0001)
        timer.completed(plan, seconds)
    assert timer.spare(alone, False) - timer.spare(shared, False) == pytest.approx(0.002)


@pytest.mark.parametrize("seed", drawn_of(range(3), 1))
def test_announcements_that_nothing_follows_cost_a_share_of_the_time_and_no_token(monkeypatch, seed):
    rng = random.Random(seed)
    vain = [rng.uniform(0.0, 8.0) for _ in range(rng.choice([100, 1000, 5000]))]
    without, plain, _ = serve(monkeypatch, LaunchTimer(COST), count=200, jitter=rng.uniform(0.0, 2.0))
    runner, held, _ = serve(monkeypatch, LaunchTimer(COST), count=200, hold=ArrivalHold(), vain=vain)
    assert held.tokens == plain.tokens
    assert runner.waited - without.waited < (HOLD_SHARE + 0.002) * runner.now
