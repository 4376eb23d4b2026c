"""A runner of constrained steps without a model, which samples what the masks allow; and requests for it."""

import random
import time

import numpy as np

from bladellm_runtime.engine.constraints import Constraints
from bladellm_runtime.engine.core import EngineCore
from bladellm_runtime.engine.preparation import WaitingRoom
from bladellm_runtime.engine.step_errors import StepMemoryError
from bladellm_runtime.guided.compiler import Compiler
from bladellm_runtime.guided.vocabulary import allowed_tokens
from bladellm_runtime.kv.accounting import KvAccounting
from bladellm_runtime.kv.spec import KvGroup, KvSpec
from bladellm_runtime.request import Constraint, ConstraintKind, SamplingParams
from bladellm_runtime.scheduler.limits import SchedulerLimits
from bladellm_runtime.scheduler.micro_batches import MicroBatches
from bladellm_runtime.scheduler.plan import StepPlan, StepResult, TokenMasks
from bladellm_runtime.scheduler.scheduler import Scheduler
from bladellm_runtime.wire.messages import AddRequest, EngineStats, RequestDelta, one_by_one
from tests.engine.test_core import next_token
from tests.guided.samples import small_vocabulary
from tests.support.step_results import step_result

VOCABULARY = small_vocabulary()
SIZE = len(VOCABULARY.pieces)
PATTERNS = (r"[a-c]{2,9}", r"\d+(\.\d{1,3})?", r"(ab|ba)+", r"x?", r".*", r"true|false|null")


class Step:
    """A launched step: its plan, the prompts' sums by slot, and its masks once it is sampled."""

    def __init__(self, plan: StepPlan, sums: dict[int, int]) -> None:
        self.plan, self.sums, self.masks = plan, sums, None


class MaskedRunner:
    """A token is the first allowed one from a function of (sum of the prompt, position) on. Steps with constrained rows
    must be sampled before anything else happens; `obeys` False samples whatever is next, allowed or not.

    `fails` says of a step and of what is done with it whether memory runs out there.
    """

    def __init__(self, depth: int, fails=lambda plan, what: False) -> None:
        self.depth, self.fails, self.obeys = depth, fails, True
        self.sums: dict[int, int] = {}
        self.open: list[Step] = []
        self.failures = 0

    def check(self, plan: StepPlan, what: str) -> None:
        if self.fails(plan, what):
            self.failures += 1
            raise StepMemoryError(plan)

    def launch(self, plan: StepPlan) -> Step:
        assert not self.open or self.open[-1].masks is not None, "the step before has not been sampled"
        self.check(plan, "launch")
        for load in plan.loads:
            self.sums[load.slot] = int(load.ids()[: load.prompt_len].sum())
        step = Step(plan, dict(self.sums))
        if not plan.constrained:
            step.masks = TokenMasks([], np.empty((0, 0), np.int32))
        self.open.append(step)
        assert len(self.open) <= self.depth
        return step

    def sample(self, step: Step, masks: TokenMasks) -> Step:
        assert step is self.open[-1]
        assert step.masks is None
        assert set(masks.rows) <= set(step.plan.constrained)
        self.check(step.plan, "sample")
        step.masks = masks
        return step

    def collect(self, step: Step) -> StepResult:
        self.check(step.plan, "collect")
        rows = len(step.plan.slots)
        self.open.remove(step)
        if step.masks is None:  # given up
            return step_result([None] * rows)
        masks = dict(zip(step.masks.rows, step.masks.masks, strict=True))
        tokens = [self.token(step, row, masks.get(row)) if step.plan.samples[row] else None for row in range(rows)]
        return step_result(tokens)

    def token(self, step: Step, row: int, mask) -> int:
        plan = step.plan
        wanted = next_token(step.sums[plan.slots[row]], plan.starts[row] + plan.query_lens[row]) % SIZE
        return wanted if mask is None or not self.obeys else first_allowed(mask, wanted)

    def finished(self, step: Step) -> bool:
        return step.masks is not None

    def recover(self) -> None:
        self.open.clear()

    def add_stats(self, stats: EngineStats) -> None: ...

    def close(self) -> None: ...


def first_allowed(mask, wanted: int) -> int:
    allowed = allowed_tokens(mask)
    later = allowed[allowed >= wanted]
    return int((later if len(later) else allowed)[0])


def make_core(
    backend, *, overlap: bool = True, granules: int = 64, micro_batches: int = 1, fails=None, **options
) -> EngineCore:
    spec = KvSpec((KvGroup((0,), 64),), granule_tokens=4, num_granules=granules, num_slots=8, max_tokens=128)
    limits = SchedulerLimits(32, 5, 128, frozenset(VOCABULARY.end_ids), SIZE)
    groups = MicroBatches(micro_batches, 1 + overlap)
    scheduler = Scheduler(limits, KvAccounting(spec), micro_batches=groups)
    runner = MaskedRunner(micro_batches + overlap, *([fails] if fails else []))
    constraints = Constraints(lambda: Compiler(backend, **options))
    room = WaitingRoom([constraints])
    core = EngineCore(
        scheduler, runner, overlap=overlap, micro_batches=micro_batches, room=room, constraints=constraints
    )
    if fails is not None:
        core.survive_full_memory()
    return core


def regex(pattern: str) -> Constraint:
    return Constraint(ConstraintKind.REGEX, pattern, "guided_regex")


def make_requests(count: int, rng: random.Random, share: float = 0.6) -> list[AddRequest]:
    requests = []
    for index in range(count):
        prompt = [rng.randrange(SIZE) for _ in range(rng.randrange(1, 30))]
        params = SamplingParams(max_tokens=rng.randrange(1, 40), seed=0, ignore_eos=rng.random() < 0.3)
        constraint = regex(rng.choice(PATTERNS)) if rng.random() < share else None
        requests.append(AddRequest(index, prompt, params, 0, float(index), "", constraint))
    return requests


def expected(request: AddRequest, backend) -> list[int]:
    """The tokens of a request, one after another."""
    constraint, total, tokens = request.constraint, sum(request.prompt), []
    matcher = None if constraint is None else backend.compile(constraint, float("inf")).matcher()
    ends = () if request.params.ignore_eos else VOCABULARY.end_ids
    row = np.empty(VOCABULARY.words, np.int32)
    while len(tokens) < request.params.max_tokens:
        wanted = next_token(total, len(request.prompt) + len(tokens)) % SIZE
        if matcher is not None:
            matcher.fill_mask(row)
            wanted = first_allowed(row, wanted)
            assert matcher.accept(wanted)
        tokens.append(wanted)
        if wanted in ends or (matcher is not None and matcher.is_done):
            break
    return tokens


class Ended(dict):
    """Tokens of each request; `deltas` their last ones."""

    def __init__(self) -> None:
        self.deltas: dict[int, RequestDelta] = {}

    def take(self, deltas: list[RequestDelta]) -> None:
        for delta in deltas:
            assert delta.request_id not in self.deltas, "a request must end exactly once"
            self[delta.request_id] = self.get(delta.request_id, []) + delta.tokens
            if delta.finish is not None:
                self.deltas[delta.request_id] = delta


def drain(core: EngineCore, requests: list[AddRequest]) -> Ended:
    found = Ended()
    for request in requests:
        found.take(core.add(request))
    step_until(core, found, lambda: core.idle)
    core.check()
    assert core._constraints._given == core._constraints._compiling == {}
    stats = core.stats(time.monotonic())
    assert (stats.running, stats.waiting, stats.kv_granules_used) == (0, 0, 0)
    return found


def step_until(core: EngineCore, found: Ended, done, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < deadline
        found.take(one_by_one(core.step()))
        if core.preparing:
            time.sleep(0.0005)
