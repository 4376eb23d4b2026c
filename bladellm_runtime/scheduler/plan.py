"""The step plan: all a runner needs to know about one step, as flat lists, and what comes back from it."""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from bladellm_runtime.kv.operations import MemoryPlan
from bladellm_runtime.kv.shared_reads import PrefixGroup
from bladellm_runtime.request import SamplingParams
from bladellm_runtime.scheduler.prepared import NO_ADAPTER
from bladellm_runtime.scheduler.step_cost import StepLoad, chunk_pairs
from bladellm_runtime.wire.messages import TokenLogprobs


@dataclass(frozen=True, slots=True)
class SlotLoad:
    """A request takes a slot: new, or resumed after a preemption with what it had generated so far.

    `token_ids` is the prompt followed by the generated tokens; the first `prompt_len` are the prompt. adapter: the slot
    of its LoRA adapter.
    """

    slot: int
    generation: int
    token_ids: list[int]
    prompt_len: int
    params: SamplingParams
    choice: int
    adapter: int = NO_ADAPTER


@dataclass(slots=True)
class StepPlan:
    """One step over rows; row i is a slot and some consecutive query tokens of its sequence.

    Row lists have equal length. Rows `[:num_decode]` have one query token, which the runner takes from the device
    (`last_token[slot]`) because the CPU may not know it yet; the others are prefill chunks, whose tokens came with a
    `SlotLoad`. `starts[i]` is the position of the row's first query token, so its KV length after the step is
    `starts[i] + query_lens[i]`. Rows with `samples[i]` produce one token.

    `memory` is carried out before the forward pass. `prefixes`: rows that may read what they share once; none with
    prefill chunks in the step. `constrained`: sampling rows, ascending, whose tokens a constraint restricts. A step
    with such rows is sampled once its `TokenMasks` are there, and no other is launched before that.
    """

    step: int
    loads: list[SlotLoad] = field(default_factory=list)
    memory: MemoryPlan = field(default_factory=MemoryPlan)
    slots: list[int] = field(default_factory=list)
    generations: list[int] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    query_lens: list[int] = field(default_factory=list)
    samples: list[bool] = field(default_factory=list)
    num_decode: int = 0
    prefixes: tuple[PrefixGroup, ...] = ()
    constrained: list[int] = field(default_factory=list)

    @property
    def load(self) -> StepLoad:
        """What the time of the step depends on."""
        rows = self.num_decode
        chunks = zip(self.starts[rows:], self.query_lens[rows:], strict=True)
        pairs = sum(chunk_pairs(start, tokens) for start, tokens in chunks)
        return StepLoad(rows, sum(self.starts[:rows]), sum(self.query_lens[rows:]), pairs)


@dataclass(frozen=True, slots=True)
class TokenMasks:
    """Which tokens constrained rows of a plan may get. rows: of the plan, all different; others may get any token.

    masks: [len(rows), words] int32, contiguous: bit `token % 32` of word `token // 32` says that the token is allowed.
    """

    rows: list[int]
    masks: NDArray[np.int32]


@dataclass(slots=True)
class StepResult:
    """What a step produced, one entry a row of its plan.

    `tokens[i]` is the sampled token, `None` where the row did not sample, -1 where its logits were not finite.
    `logprobs[i]` is set where the request asked for it; `prompt_logprobs[i]` has one entry for each query token
    of a prefill chunk whose next token is in the prompt.
    """

    tokens: list[int | None]
    logprobs: list[TokenLogprobs | None]
    prompt_logprobs: list[list[TokenLogprobs] | None]
