"""A small engine for the sampler alone: requests in slots, logits made up from what was generated so far."""

import random
from dataclasses import dataclass, field

import torch
from bladellm_kernels.gumbel import row_keys, stream_key, uniform
from transformers import LogitsProcessorList, RepetitionPenaltyLogitsProcessor

from bladellm_runtime.engine.sampler import SampleOutputs, Sampler
from bladellm_runtime.engine.sampling_state import SamplingState
from bladellm_runtime.kv.prompt_tree import pack
from bladellm_runtime.request import SamplingParams
from bladellm_runtime.scheduler.plan import SlotLoad, StepPlan
from tests.kernels.sampling_support import warped_by_transformers
from tests.support.step_plans import step_plan

CPU = torch.device("cpu")


@dataclass
class Request:
    """One request: what it asked for and what it has generated."""

    prompt: list[int]
    params: SamplingParams
    choice: int = 0
    output: list[int] = field(default_factory=list)

    @property
    def tokens(self) -> list[int]:
        return self.prompt + self.output


class Engine:
    """Loads requests into slots and samples the rows of made-up steps."""

    def __init__(self, slots: int, vocab: int, eos: tuple[int, ...] = (), device: torch.device = CPU) -> None:
        self.state = SamplingState(slots, vocab, eos, device)
        self.sampler = Sampler(self.state)
        self.loads: list[SlotLoad] = []

    def load(self, slot: int, request: Request) -> None:
        self.loads.append(SlotLoad(slot, 0, pack(request.tokens), len(request.prompt), request.params, request.choice))

    def plan(self, rows: list[tuple[int, Request]], samples: list[bool] | None = None) -> StepPlan:
        loads, self.loads = self.loads, []
        return step_plan(
            step=0,
            loads=loads,
            slots=[slot for slot, _ in rows],
            generations=[0] * len(rows),
            starts=[len(request.tokens) - 1 for _, request in rows],
            query_lens=[1] * len(rows),
            samples=samples or [True] * len(rows),
            num_decode=len(rows),
        )

    def sample(self, rows: list[tuple[int, Request]], logits: torch.Tensor) -> SampleOutputs:
        """One decode step; each request that got a token keeps it."""
        plan = self.plan(rows)
        for load in plan.loads:
            self.state.load(load)
        outputs = self.sampler.sample(logits.clone().to(self.state.device), self.sampler.prepare(plan))
        for (_, request), token in zip(rows, outputs.tokens.tolist(), strict=True):
            request.output.append(token)
        return outputs


def made_up_logits(request: Request, vocab: int) -> torch.Tensor:
    """Logits that depend on the request's tokens only, like a model's."""
    generator = torch.Generator().manual_seed(hash(tuple(request.tokens)) % 2**60)
    return torch.randn(vocab, generator=generator) * 3


def expected_scores(request: Request, logits: torch.Tensor, eos: tuple[int, ...]) -> torch.Tensor:
    """What the next token maximises, by transformers' processors and the definition of the noise: float64 [V]."""
    params, vocab, scores = request.params, len(logits), logits.double()[None]
    history = torch.tensor([request.tokens])
    processors = LogitsProcessorList([RepetitionPenaltyLogitsProcessor(float(params.repetition_penalty))])
    scores = processors(history, scores)[0]
    count = torch.bincount(torch.tensor(request.output, dtype=torch.int64), minlength=vocab)
    scores = scores - params.frequency_penalty * count - params.presence_penalty * (count > 0)
    for token, bias in params.logit_bias.items():
        scores[token] += bias
    if len(request.output) < params.min_tokens:
        scores[[*eos, *params.stop_token_ids]] = -torch.inf
    if params.greedy:
        return scores
    top_k = params.top_k if 0 < params.top_k < vocab else 0
    scores = warped_by_transformers(scores[None], params.temperature, top_k, params.top_p, params.min_p)[0]
    stream = torch.tensor([stream_key(params.seed, request.choice)], dtype=torch.int32)
    keys = row_keys(stream, torch.tensor([len(request.tokens)]))
    noise = -torch.log(-torch.log1p(-uniform(keys, torch.arange(vocab))[0].double()))
    return scores + noise


def random_params(rng: random.Random, vocab: int) -> SamplingParams:
    """Any combination of features, each often off."""

    def sometimes(value, off, share=0.5):
        return value if rng.random() < share else off

    return SamplingParams(
        max_tokens=64,
        min_tokens=sometimes(rng.randint(1, 8), 0),
        temperature=sometimes(rng.choice([0.3, 0.8, 1.0, 2.0]), 0.0, 0.75),
        top_k=sometimes(rng.choice([1, 3, 20, vocab // 2, vocab, 10**9]), rng.choice([0, -1])),
        top_p=sometimes(rng.choice([0.1, 0.7, 0.95]), 1.0),
        min_p=sometimes(rng.choice([0.01, 0.2]), 0.0, 0.3),
        repetition_penalty=sometimes(rng.choice([0.7, 1.2, 2.0]), 1.0),
        presence_penalty=sometimes(rng.choice([-1.0, 0.5, 2.0]), 0.0, 0.3),
        frequency_penalty=sometimes(rng.choice([-0.4, 0.3, 2.0]), 0.0, 0.3),
        logit_bias=sometimes({rng.randrange(vocab): rng.uniform(-100, 100) for _ in range(5)}, {}, 0.3),
        stop_token_ids=sometimes((rng.randrange(vocab), rng.randrange(vocab)), ()),
        ignore_eos=rng.random() < 0.3,
        seed=rng.randrange(-(2**63), 2**63),
        logprobs=sometimes(rng.randint(0, 5), None, 0.3),
    )
