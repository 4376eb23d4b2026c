"""The engine core without a model: a runner that makes tokens from arithmetic, checked under overlap and not."""

import random
import time
from collections import defaultdict

import pytest

from bladellm_runtime.engine.adapters import NoAdapters
from bladellm_runtime.engine.core import EngineCore
from bladellm_runtime.engine.preparation import WaitingRoom
from bladellm_runtime.engine.step_errors import GroupLostError
from bladellm_runtime.kv.accounting import KvAccounting
from bladellm_runtime.kv.spec import KvGroup, KvSpec
from bladellm_runtime.request import FinishReason, SamplingParams
from bladellm_runtime.scheduler.limits import SchedulerLimits
from bladellm_runtime.scheduler.plan import StepPlan, StepResult
from bladellm_runtime.scheduler.prepared import Prepared
from bladellm_runtime.scheduler.scheduler import Scheduler
from bladellm_runtime.wire.messages import AddRequest, EngineStats, MoveAdapter, one_by_one
from tests.support.step_results import step_result

VOCAB = 1000
EOS = 7


def next_token(prompt_sum: int, position: int) -> int:
    return (prompt_sum * 31 + position * 17) % VOCAB


class ArithmeticRunner:
    """Tokens are a function of (sum of the prompt, position); rows in `poisoned` slots give invalid logits."""

    def __init__(self) -> None:
        self.sums: dict[int, int] = {}
        self.poison: set[int] = set()
        self.outstanding = 0

    def launch(self, plan: StepPlan) -> tuple[StepPlan, dict[int, int]]:
        for load in plan.loads:
            self.sums[load.slot] = int(load.ids()[: load.prompt_len].sum())
        self.outstanding += 1
        assert self.outstanding <= 2
        return plan, dict(self.sums)

    def collect(self, launched: tuple[StepPlan, dict[int, int]]) -> StepResult:
        plan, sums = launched
        self.outstanding -= 1
        rows = len(plan.slots)
        tokens: list[int | None] = [None] * rows
        for row in range(rows):
            if plan.samples[row]:
                total = sums[plan.slots[row]]
                tokens[row] = -1 if total in self.poison else next_token(total, plan.starts[row] + plan.query_lens[row])
        return step_result(tokens)

    def add_stats(self, stats: EngineStats) -> None: ...

    def close(self) -> None: ...


def make_core(
    overlap: bool,
    granules: int = 64,
    runner: ArithmeticRunner | None = None,
    room: WaitingRoom | None = None,
    adapters: NoAdapters | None = None,
) -> EngineCore:
    spec = KvSpec((KvGroup((0,), 64),), granule_tokens=4, num_granules=granules, num_slots=8, max_tokens=128)
    limits = SchedulerLimits(
        max_batch_tokens=32,
        prefill_chunk_tokens=5,
        max_model_len=128,
        eos_token_ids=frozenset({EOS}),
        vocab_size=VOCAB,
    )
    scheduler = Scheduler(limits, KvAccounting(spec))
    return EngineCore(scheduler, runner or ArithmeticRunner(), overlap=overlap, room=room, adapters=adapters)


def make_requests(count: int, seed: int) -> list[AddRequest]:
    rng = random.Random(seed)
    return [
        AddRequest(
            request_id=index,
            prompt=[rng.randrange(VOCAB) for _ in range(rng.randrange(1, 30))],
            params=SamplingParams(max_tokens=rng.randrange(1, 40), seed=0),
            choice=0,
            arrival=float(index),
        )
        for index in range(count)
    ]


def expected(request: AddRequest) -> list[int]:
    total, tokens = sum(request.prompt), []
    for index in range(request.params.max_tokens):
        tokens.append(next_token(total, len(request.prompt) + index))
        if tokens[-1] == EOS:
            break
    return tokens


def drain(core: EngineCore, requests: list[AddRequest]) -> dict[int, tuple[list[int], FinishReason, str | None]]:
    found: dict[int, tuple[list[int], FinishReason, str | None]] = {}
    tokens: dict[int, list[int]] = defaultdict(list)
    deltas = [delta for request in requests for delta in core.add(request)]
    while True:
        for delta in deltas:
            assert delta.request_id not in found, "a request must end exactly once"
            tokens[delta.request_id] += delta.tokens
            if delta.finish is not None:
                found[delta.request_id] = (tokens[delta.request_id], delta.finish, delta.error)
        if core.idle:
            return found
        deltas = list(one_by_one(core.step()))


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("granules", [64, 18])
def test_every_request_gets_its_tokens_once(overlap, granules):
    requests = make_requests(40, seed=granules + overlap)
    core = make_core(overlap, granules)
    found = drain(core, requests)
    assert {key: value[0] for key, value in found.items()} == {r.request_id: expected(r) for r in requests}
    stats = core.stats(time.monotonic())
    assert (stats.running, stats.waiting, stats.kv_granules_used) == (0, 0, 0)
    assert granules == 64 or stats.preemptions > 0


@pytest.mark.parametrize("overlap", [True, False])
def test_row_42_invalid_logits_end_one_request_only(overlap):
    requests = make_requests(10, seed=3)
    runner = ArithmeticRunner()
    runner.poison = {sum(requests[4].prompt)}
    found = drain(make_core(overlap, runner=runner), requests)
    for request in requests:
        tokens, finish, error = found[request.request_id]
        if sum(request.prompt) in runner.poison:
            assert (tokens, finish, error) == ([], FinishReason.ERROR, "invalid_logits")
        else:
            assert tokens == expected(request)


@pytest.mark.parametrize("overlap", [True, False])
def test_row_47_slot_reuse_after_abort_shows_no_old_token(overlap):
    rng = random.Random(11 + overlap)
    core = make_core(overlap)
    requests = make_requests(60, seed=5)
    tokens: dict[int, list[int]] = {}
    ended: set[int] = set()
    aborted: set[int] = set()
    waiting = list(requests)
    while waiting or not core.idle:
        deltas = []
        if waiting:
            request = waiting.pop(0)
            tokens[request.request_id] = []
            deltas += core.add(request)
        deltas += one_by_one(core.step())
        live = [key for key in tokens if key not in ended and key not in {d.request_id for d in deltas if d.finish}]
        if live and rng.random() < 0.3:
            victim = rng.choice(live)
            aborted.add(victim)
            deltas += core.abort([victim])
        for delta in deltas:
            assert delta.request_id not in ended
            tokens[delta.request_id] += delta.tokens
            if delta.finish is not None:
                ended.add(delta.request_id)
    for request in requests:
        wanted = expected(request)
        got = tokens[request.request_id]
        assert got == (wanted[: len(got)] if request.request_id in aborted else wanted)
    assert aborted
    assert core.stats(time.monotonic()).kv_granules_used == 0


class Lost(NoAdapters):
    """Adapters on a device, or in a group of ranks, that is lost as soon as `gone` is set."""

    gone = False

    def prepare(self, request: AddRequest, prepared: Prepared) -> bool:
        return False

    def poll(self) -> list[int]:
        self.fail()
        return []

    def unload(self, adapter: str) -> None:
        self.fail()

    def add_stats(self, stats: EngineStats) -> None:
        self.fail()

    def fail(self) -> None:
        if self.gone:
            raise GroupLostError("rank 1 is gone")


class LostRunner(ArithmeticRunner):
    """Of a device that nothing can be asked of any more once `lost.gone` is set."""

    def __init__(self, lost: Lost) -> None:
        super().__init__()
        self.lost, self.abandoned = lost, 0

    def collect(self, launched: tuple[StepPlan, dict[int, int]]) -> StepResult:
        self.lost.fail()
        return super().collect(launched)

    def close(self) -> None:
        self.lost.fail()

    def abandon(self) -> None:
        self.abandoned += 1


WAYS = {
    "a step": lambda core: core.step(),
    "a load": lambda core: core.step() if core.move_adapter(MoveAdapter(99, "/a", True)) == [] else None,
    "an unload": lambda core: core.move_adapter(MoveAdapter(99, "/a", False)),
    "a reading": lambda core: core.stats(0.0),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_device_lost_beside_the_steps_is_left_alone(way):
    """By who moves adapters, say: closing must not ask anything of it, or wait for it."""
    lost = Lost()
    runner = LostRunner(lost)
    core = make_core(True, runner=runner, room=WaitingRoom([lost]), adapters=lost)
    core.add(make_requests(1, seed=0)[0])
    for _ in range(2):
        core.step()
    lost.gone = True
    with pytest.raises(GroupLostError, match="rank 1 is gone"):
        WAYS[way](core)
    assert not runner.abandoned
    core.close()
    assert runner.abandoned == 1


def test_a_device_lost_while_closing_is_abandoned():
    lost = Lost()
    runner = LostRunner(lost)
    core = make_core(True, runner=runner)
    core.add(make_requests(1, seed=0)[0])
    core.step()
    lost.gone = True
    with pytest.raises(GroupLostError, match="rank 1 is gone"):
        core.close()
    assert runner.abandoned == 1
