"""The step plan: all a runner needs to know about one step, as flat lists, and what comes back from it."""

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from bladellm_runtime.kv.operations import MemoryPlan
from bladellm_runtime.kv.shared_reads import PrefixGroup
from bladellm_runtime.request import SamplingParams
from bladellm_runtime.scheduler.prepared import NO_ADAPTER
from bladellm_runtime.scheduler.step_cost import StepLoad, chunk_pairs
from bladellm_runtime.wire.messages import TokenLogprobs

Ints = NDArray[np.int64]

INVALID = -1
"""In place of a token where logits were not finite."""


@dataclass(frozen=True, slots=True)
class SlotLoad:
    """A request takes a slot: new, or resumed after a preemption with what it had generated so far.

    `tokens` is the prompt followed by the generated tokens, packed as int32; the first `prompt_len` are the prompt.
    adapter: the slot of its LoRA adapter.
    """

    slot: int
    generation: int
    tokens: bytes
    prompt_len: int
    params: SamplingParams
    choice: int
    adapter: int = NO_ADAPTER

    def ids(self) -> Ints:
        """The tokens, int64."""
        return np.frombuffer(self.tokens, np.int32).astype(np.int64)


class Chunk(NamedTuple):
    """A row of a step: the next tokens of a prompt."""

    slot: int
    generation: int
    start: int
    query_len: int
    samples: bool


def _no_rows() -> Ints:
    return np.empty(0, dtype=np.int64)


@dataclass(slots=True, eq=False)
class StepPlan:
    """One step over rows; row i is a slot and some consecutive query tokens of its sequence.

    Row arrays have equal length. Plans of the same decode rows share those that do not change: they are not to be
    written to, and where two plans have the same `slots`, their starts differ by one number. Rows `[:num_decode]` have
    one query token, which the runner takes from the device (`last_token[slot]`) because the CPU may not know it yet;
    the others are prefill chunks, whose tokens came with a `SlotLoad`. `starts[i]` is the position of the row's first
    query token, so its KV length after the step is `starts[i] + query_lens[i]`. Rows with `samples[i]` produce one
    token.

    `memory` is carried out before the forward pass. `prefixes`: rows that may read what they share once; none with
    prefill chunks in the step. `constrained`: sampling rows, ascending, whose tokens a constraint restricts. A step
    with such rows is sampled once its `TokenMasks` are there, and no other is launched before that.
    """

    step: int
    loads: list[SlotLoad] = field(default_factory=list)
    memory: MemoryPlan = field(default_factory=MemoryPlan)
    slots: Ints = field(default_factory=_no_rows)
    generations: Ints = field(default_factory=_no_rows)
    starts: Ints = field(default_factory=_no_rows)
    query_lens: Ints = field(default_factory=_no_rows)
    samples: NDArray[np.bool_] = field(default_factory=lambda: np.empty(0, dtype=np.bool_))
    num_decode: int = 0
    prefixes: tuple[PrefixGroup, ...] = ()
    constrained: list[int] = field(default_factory=list)

    def append(self, chunks: list[Chunk]) -> None:
        """Add rows; some."""
        slots, generations, starts, query_lens, samples = np.array(chunks, dtype=np.int64).T
        self.slots = np.concatenate((self.slots, slots))
        self.generations = np.concatenate((self.generations, generations))
        self.starts = np.concatenate((self.starts, starts))
        self.query_lens = np.concatenate((self.query_lens, query_lens))
        self.samples = np.concatenate((self.samples, samples.astype(np.bool_)))

    @property
    def has_prompts(self) -> bool:
        """Whether some rows are prefill chunks."""
        return self.num_decode < len(self.query_lens)

    @property
    def tokens(self) -> int:
        """Query tokens."""
        return int(self.query_lens.sum()) if self.has_prompts else self.num_decode

    @property
    def load(self) -> StepLoad:
        """What the time of the step depends on."""
        rows = self.num_decode
        starts, tokens = self.starts[rows:].tolist(), self.query_lens[rows:].tolist()
        pairs = sum(map(chunk_pairs, starts, tokens))
        return StepLoad(rows, int(self.starts[:rows].sum()), sum(tokens), pairs)


@dataclass(frozen=True, slots=True)
class TokenMasks:
    """Which tokens constrained rows of a plan may get. rows: of the plan, all different; others may get any token.

    masks: [len(rows), words] int32, contiguous: bit `token % 32` of word `token // 32` says that the token is allowed.
    """

    rows: list[int]
    masks: NDArray[np.int32]


@dataclass(slots=True, eq=False)
class StepResult:
    """What a step produced.

    tokens: one a row of its plan: the sampled token, `INVALID` where its logits were not finite, undefined where the
    row did not sample. logprobs: by row, of those whose requests asked for them. prompt_logprobs: by row, one entry for
    each query token of a prefill chunk whose next token is in the prompt.
    """

    tokens: Ints
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)
    prompt_logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
