"""A model without a model: executes step plans on KV memory on paper and checks each as a device would suffer it.

Its next token is a hash of all tokens in the KV memory up to the query, so a wrong plan changes the stream.
"""

import zlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from bladellm_runtime.kv.spec import KvGroup, KvSpec
from bladellm_runtime.request import FinishReason, SamplingParams
from bladellm_runtime.scheduler.limits import SchedulerLimits
from bladellm_runtime.scheduler.plan import SlotLoad, StepPlan, StepResult
from bladellm_runtime.wire.messages import AddRequest, TokenLogprobs
from tests.kv.fake_memory import FakeMemory
from tests.support.step_results import step_result

VOCAB = 64
EOS = frozenset({0, 1})
POISON = 63
"""Where a request has a seed, sampling this token stands for logits that are not finite."""


def spec_of(
    granule_tokens: int, num_granules: int, num_slots: int, max_tokens: int = 64, block: int = 1, host: int = 0
) -> KvSpec:
    longest = -(-max_tokens // granule_tokens) * granule_tokens
    return KvSpec(
        (KvGroup((0,), 1),), granule_tokens, num_granules, num_slots, longest, block_granules=block, host_granules=host
    )


def limits_of(max_batch_tokens: int = 64, prefill_chunk_tokens: int = 64, max_model_len: int = 64) -> SchedulerLimits:
    return SchedulerLimits(max_batch_tokens, prefill_chunk_tokens, max_model_len, EOS, VOCAB)


def fold(state: int, token: int) -> int:
    """The hidden state after one more token."""
    return zlib.crc32(token.to_bytes(4, "little"), state)


def sample(state: int, generated: int, params: SamplingParams) -> int:
    """The next token from a hidden state; -1 for logits that are not finite."""
    token = state % VOCAB
    stops = set(params.stop_token_ids) | (set() if params.ignore_eos else EOS)
    while generated < params.min_tokens and token in stops:
        token += 1
    return -1 if token == POISON and params.seed is not None else token


def answer_limit(request: AddRequest, limits: SchedulerLimits, spec: KvSpec) -> int:
    """Most tokens a request may generate: counted by trying, not by the scheduler's formula."""
    asked = request.params.max_tokens
    count = 0
    while asked is None or count < asked:
        kv_tokens = len(request.prompt) + count
        if (
            kv_tokens + 1 > limits.max_model_len
            or spec.granules(kv_tokens) > spec.num_granules
            or kv_tokens > spec.max_tokens
        ):
            break
        count += 1
    return count


def expected_answer(request: AddRequest, limits: SchedulerLimits, spec: KvSpec) -> tuple[list[int], FinishReason]:
    """The tokens and the end of a request that runs alone and undisturbed."""
    params, tokens, state = request.params, [], 0
    stops = set(params.stop_token_ids) | (set() if params.ignore_eos else EOS)
    for token in request.prompt:
        state = fold(state, token)
    for _ in range(answer_limit(request, limits, spec)):
        token = sample(state, len(tokens), params)
        if token < 0:
            return tokens, FinishReason.ERROR
        tokens.append(token)
        if token in stops and len(tokens) > params.min_tokens:
            return tokens, FinishReason.STOP
        state = fold(state, token)
    return tokens, FinishReason.LENGTH


class Token(NamedTuple):
    """What KV memory holds of a token: the hidden state after it, under which salt, who computed it and where."""

    salt: str
    state: int
    writer: int
    position: int


@dataclass
class Residence:
    """A load and what the device knows of its sequence: hidden states by position, and how far its KV is there."""

    load: SlotLoad
    salt: str
    number: int
    states: list[int] = field(default_factory=list)
    end: int = -1

    def extend(self, tokens: list[int]) -> None:
        for token in tokens:
            self.states.append(fold(self.states[-1] if self.states else 0, token))


@dataclass
class FakeDevice:
    """Slots over KV memory on paper; `requests` by id say what a load must agree with.

    `tainted`: residences whose logits were not finite, as the scheduler knows; what they wrote must not be used by
    loads that come later, but for the `proven` tokens, from which another was sampled. `first_start`: by request, the
    tokens that were cached when it was loaded first.
    """

    limits: SchedulerLimits
    spec: KvSpec
    requests: dict[int, AddRequest]
    memory: FakeMemory
    live_slots: Callable[[], list[int]]
    loads: dict[int, SlotLoad] = field(default_factory=dict)
    residences: dict[int, Residence] = field(default_factory=dict)
    last_token: dict[int, int] = field(default_factory=dict)
    in_flight: deque[tuple[StepPlan, StepResult]] = field(default_factory=deque)
    tainted: set[int] = field(default_factory=set)
    proven: set[Token] = field(default_factory=set)
    first_start: dict[int, int] = field(default_factory=dict)
    count: int = 0

    def launch(self, plan: StepPlan) -> None:
        """Run a plan at once, as the device's order allows, keeping its result from the scheduler."""
        self._check_shape(plan)
        busy = [
            (slot, start + count)
            for earlier, _ in self.in_flight
            for slot, start, count in zip(earlier.slots, earlier.starts, earlier.query_lens, strict=True)
        ]
        moves = [move for earlier, _ in self.in_flight for move in earlier.memory.moves]
        rows = zip(plan.slots.tolist(), (plan.starts + plan.query_lens).tolist(), strict=True)
        self.memory.apply(plan.memory, busy, moves, rows)
        self._check_groups(plan)
        for load in plan.loads:
            self._load(load)
        rows = [self._run_row(plan, row) for row in range(len(plan.slots))]
        tokens, logprobs, prompt_logprobs = (list(column) for column in zip(*rows, strict=True))
        self.in_flight.append((plan, step_result(tokens, logprobs, prompt_logprobs)))

    def collect(self) -> tuple[StepPlan, StepResult]:
        plan, result = self.in_flight.popleft()
        self._note_failures(plan, result)
        return plan, result

    def _check_shape(self, plan: StepPlan) -> None:
        count = len(plan.slots)
        assert count > 0
        assert [len(x) for x in (plan.generations, plan.starts, plan.query_lens, plan.samples)] == [count] * 4
        assert len(set(plan.slots)) == count, "a slot has two rows"
        assert sum(plan.query_lens) <= self.limits.max_batch_tokens
        assert all(plan.query_lens[row] == 1 and plan.samples[row] for row in range(plan.num_decode))
        assert all(1 <= n <= self.limits.prefill_chunk_tokens for n in plan.query_lens[plan.num_decode :])
        assert {load.slot for load in plan.loads} <= set(plan.slots[plan.num_decode :]), "a load without its first rows"
        for earlier, _ in self.in_flight:
            for mine, theirs in ((plan, earlier), (earlier, plan)):
                for name in ("starts", "loads", "memory"):
                    assert getattr(mine, name) is not getattr(theirs, name), "a list is shared between steps"
                for name in ("slots", "generations", "query_lens", "samples"):
                    shared = getattr(mine, name) is getattr(theirs, name)
                    assert not shared or not getattr(mine, name).flags.writeable, "what is shared can be written to"

    def _check_groups(self, plan: StepPlan) -> None:
        """Rows of a group show the same granules, full and below their newest tokens, and no row is in two groups."""
        assert not plan.prefixes or plan.num_decode == len(plan.slots)
        grouped = [row for group in plan.prefixes for row in group.rows]
        assert len(grouped) == len(set(grouped)) <= len(plan.slots)
        for group in plan.prefixes:
            shown = [self.memory.slots[plan.slots[row]][: group.granules] for row in group.rows]
            assert len(shown) > 1
            assert len(shown[0]) == group.granules > 0
            assert None not in shown[0]
            assert all(each == shown[0] for each in shown)
            assert all(group.granules * self.spec.granule_tokens <= plan.starts[row] for row in group.rows)

    def _note_failures(self, plan: StepPlan, result: StepResult) -> None:
        rows = zip(plan.slots, plan.generations, plan.samples, result.tokens, strict=True)
        for slot, generation, samples, token in rows:
            residence = self.residences[slot]
            if samples and token == -1 and residence.load.generation == generation:
                self.tainted.add(residence.number)

    def _load(self, load: SlotLoad) -> None:
        assert all(load.slot not in earlier.slots for earlier, _ in self.in_flight), (
            "slot reused under a step in flight"
        )
        previous = self.loads.get(load.slot)
        assert previous is None or load.generation > previous.generation
        request = self.requests[load.choice]
        assert load.prompt_len == len(request.prompt)
        assert load.ids().tolist()[: load.prompt_len] == request.prompt
        assert load.params is request.params
        self.loads[load.slot] = load
        self.residences[load.slot] = Residence(load, request.cache_salt, self.count)
        self.count += 1
        self.residences[load.slot].extend(load.ids().tolist())
        self.last_token[load.slot] = -99

    def _run_row(self, plan: StepPlan, row: int) -> tuple[int | None, TokenLogprobs | None, list[TokenLogprobs] | None]:
        columns = (plan.slots, plan.generations, plan.starts, plan.query_lens)
        slot, generation, start, count = (int(column[row]) for column in columns)
        load = self.loads[slot]
        assert generation == load.generation
        self._check_extent(load, start, count)
        if row < plan.num_decode:
            queries = [self.last_token[slot]]
            assert queries[0] >= 0, "a decode row reads a token that was never sampled"
            assert start >= len(load.ids())
        else:
            queries = load.ids()[start : start + count].tolist()
        assert len(queries) == count
        residence = self.residences[slot]
        if row < plan.num_decode:
            residence.extend(queries)
        state = self._compute(residence, start, count)
        scores = self._prompt_scores(load, start, count) if row >= plan.num_decode else None
        if not plan.samples[row]:
            return None, None, scores
        token = sample(state, start + count - load.prompt_len, load.params)
        if token >= 0:
            self.proven |= {self.memory.read(slot, position) for position in range(start + count)}
        # Non-finite logits still feed some token to the steps in flight.
        self.last_token[slot] = max(token, 0)
        wanted = load.params.logprobs is not None
        return token, TokenLogprobs([token], [float(start + count)]) if wanted else None, scores

    def _check_extent(self, load: SlotLoad, start: int, count: int) -> None:
        end = start + count
        answer = answer_limit(self.requests[load.choice], self.limits, self.spec)
        assert end <= load.prompt_len + max(answer - 1, 0), "a token is planned that can never be used"

    def _compute(self, residence: Residence, start: int, count: int) -> int:
        """The hidden state after a row's tokens, folded from what the memory holds; the row's tokens are written."""
        slot, salt = residence.load.slot, residence.salt
        if residence.end < 0:
            assert start < len(residence.load.ids()), "the last token of a prompt must be computed"
            self.first_start.setdefault(residence.load.choice, start)
            known = {self.memory.read(slot, position) for position in range(start)}
            assert not any(token.writer in self.tainted for token in known - self.proven), "tainted by NaN"
        else:
            assert start == residence.end, "a row leaves a gap or writes a position twice"
        for position in range(start):
            token = self.memory.read(slot, position)
            assert token is not None, "the KV prefix is incomplete"
            assert (token.salt, token.state) == (salt, residence.states[position]), "the KV of another prefix"
        for position in range(start, start + count):
            self._check_write(residence, position)
            self.memory.write(slot, position, Token(salt, residence.states[position], residence.number, position))
        residence.end = start + count
        return residence.states[residence.end - 1]

    def _check_write(self, residence: Residence, position: int) -> None:
        """No other live sequence has tokens in the granule that is written."""
        granule = self.memory.granule(residence.load.slot, position)
        for slot in self.live_slots():
            other = self.residences.get(slot)
            if other is None or other is residence or other.end < 0:
                continue
            used = self.memory.slots[slot][: self.spec.granules(other.end)]
            assert granule not in used, "a granule of another live sequence is written"

    def _prompt_scores(self, load: SlotLoad, start: int, count: int) -> list[TokenLogprobs] | None:
        if load.params.prompt_logprobs is None:
            return None
        targets = range(start + 1, min(start + count + 1, load.prompt_len))
        return [TokenLogprobs([int(load.ids()[p])], [float(p)]) for p in targets]
