"""What rank 0 tells the other ranks and what they answer: msgspec structs in msgpack, never pickle. Imports no torch.

Every message to the ranks changes what their runners hold, in the order in which rank 0's runner does the same.
"""

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np

from bladellm_runtime.kv.operations import Copy, Hide, MemoryPlan, Show, SwapIn, SwapOut
from bladellm_runtime.kv.shared_reads import PrefixGroup
from bladellm_runtime.scheduler.plan import SlotLoad, StepPlan, StepResult, TokenMasks
from bladellm_runtime.wire.messages import TokenLogprobs


class ShowMessage(msgspec.Struct, tag=0, frozen=True, array_like=True):
    """A `Show`."""

    slot: int
    position: int
    granules: list[int]
    whole: bool


class HideMessage(msgspec.Struct, tag=1, frozen=True, array_like=True):
    """A `Hide`."""

    slot: int
    keep: int


class CopyMessage(msgspec.Struct, tag=2, frozen=True, array_like=True):
    """A `Copy`."""

    source: int
    target: int
    tokens: int


class SwapOutMessage(msgspec.Struct, tag=3, frozen=True, array_like=True):
    """A `SwapOut`."""

    granule: int
    host: int


class SwapInMessage(msgspec.Struct, tag=4, frozen=True, array_like=True):
    """A `SwapIn`."""

    host: int
    granule: int


OPERATIONS: dict[type, type] = {
    Show: ShowMessage, Hide: HideMessage, Copy: CopyMessage, SwapOut: SwapOutMessage, SwapIn: SwapInMessage,
}  # fmt: skip
"""Named tuples of one length cannot be told apart on the wire."""
_READ = {message: operation for operation, message in OPERATIONS.items()}


class RunStep(msgspec.Struct, tag="step", frozen=True, array_like=True):
    """A `StepPlan`, field by field; the arrays of rows as they are in memory."""

    step: int
    loads: list[SlotLoad]
    views: list[ShowMessage | HideMessage]
    moves: list[CopyMessage | SwapOutMessage | SwapInMessage]
    ahead: list[ShowMessage]
    slots: bytes
    generations: bytes
    starts: bytes
    query_lens: bytes
    samples: bytes
    num_decode: int
    prefixes: tuple[PrefixGroup, ...]
    constrained: list[int]


class SampleStep(msgspec.Struct, tag="sample", frozen=True, array_like=True):
    """The `TokenMasks` of the step that the order before this one began, which has constrained rows."""

    step: int
    rows: list[int]
    masks: bytes


class LoadAdapter(msgspec.Struct, tag="load_adapter", frozen=True, array_like=True):
    """A `Move` of an adapter, beside the steps: those before it may read its slot, others once all ranks report it."""

    adapter: str
    slot: int
    read: bool
    dropped: str | None
    evicted: str | None


class DropAdapter(msgspec.Struct, tag="drop_adapter", frozen=True, array_like=True):
    """Let go of the host's copy of an adapter."""

    adapter: str


class UseMixedGraphs(msgspec.Struct, tag="mixed_graphs", frozen=True, array_like=True):
    """From here on steps with prefill chunks are replayed, or launched operator by operator; no step is in flight."""

    on: bool


class Serve(msgspec.Struct, tag="serve", frozen=True, array_like=True):
    """The start is over: kernels are compiled, and who is silent now is lost."""


class CloseRank(msgspec.Struct, tag="close", frozen=True, array_like=True):
    """Finish what is in flight, release everything and exit."""


RankOrder = RunStep | SampleStep | LoadAdapter | DropAdapter | UseMixedGraphs | Serve | CloseRank


class Numbered(msgspec.Struct, frozen=True, array_like=True):
    """An order and its number, counted from 0, by which a rank knows that none was lost."""

    number: int
    order: RankOrder


class Hello(msgspec.Struct, tag="hello", frozen=True, array_like=True):
    """A rank's first message. flags: its `EngineArgs`, which must be those of rank 0. model: a digest of its model's
    description and plan, which must be rank 0's."""

    rank: int
    flags: dict[str, Any]
    model: str


class Pulse(msgspec.Struct, tag="pulse", frozen=True, array_like=True):
    """A rank is alive. begun, done: orders it has taken up, and finished; on_device: whether all that is left of one is
    a GPU's to do."""

    rank: int
    begun: int
    done: int
    on_device: bool


class AdapterMoved(msgspec.Struct, tag="adapter", frozen=True, array_like=True):
    """What became of a `LoadAdapter`; error: why it was given up, None where the adapter is in its slot."""

    rank: int
    adapter: str
    error: str | None


class RankFailed(msgspec.Struct, tag="failed", frozen=True, array_like=True):
    """A rank ends. own: for a reason of its own, and not because another one no longer answers."""

    rank: int
    message: str
    own: bool


class StepDone(msgspec.Struct, frozen=True, array_like=True):
    """A `StepResult` of a pipeline's last stage, field by field; the tokens as they are in memory."""

    step: int
    tokens: bytes
    logprobs: dict[int, TokenLogprobs]
    prompt_logprobs: dict[int, list[TokenLogprobs]]


RankReport = Hello | Pulse | AdapterMoved | RankFailed

encode: Callable[[Any], bytes] = msgspec.msgpack.Encoder().encode
# A decoder's type parameter cannot be a union for mypy, hence the annotation.
decode_report: Callable[[bytes], RankReport] = msgspec.msgpack.Decoder(RankReport).decode
decode_done: Callable[[bytes], StepDone] = msgspec.msgpack.Decoder(StepDone).decode
decode_order: Callable[[bytes], Numbered] = msgspec.msgpack.Decoder(Numbered).decode


def step_message(plan: StepPlan) -> RunStep:
    """A plan as it goes over the wire; shares the plan's lists."""
    memory = plan.memory
    return RunStep(
        plan.step,
        plan.loads,
        [OPERATIONS[type(view)](*view) for view in memory.views],
        [OPERATIONS[type(move)](*move) for move in memory.moves],
        [ShowMessage(*view) for view in memory.ahead],
        plan.slots.tobytes(),
        plan.generations.tobytes(),
        plan.starts.tobytes(),
        plan.query_lens.tobytes(),
        plan.samples.tobytes(),
        plan.num_decode,
        plan.prefixes,
        plan.constrained,
    )


def read_step(message: RunStep, last: StepPlan | None = None) -> StepPlan:
    """The plan of `step_message`. last: the plan read before it, whose `slots` and `prefixes` it has, not equal ones,
    where its decode rows go on with it: runners do less for rows that they know."""
    plan = StepPlan(
        message.step,
        message.loads,
        MemoryPlan(*(_operations(messages) for messages in (message.views, message.moves, message.ahead))),
        np.frombuffer(message.slots, np.int64),
        np.frombuffer(message.generations, np.int64),
        np.frombuffer(message.starts, np.int64),
        np.frombuffer(message.query_lens, np.int64),
        np.frombuffer(message.samples, np.bool_),
        message.num_decode,
        message.prefixes,
        message.constrained,
    )
    if last is not None and _goes_on(plan, last):
        plan.slots = last.slots
        if plan.prefixes == last.prefixes:
            plan.prefixes = last.prefixes
    return plan


def _goes_on(plan: StepPlan, last: StepPlan) -> bool:
    """Whether a plan has the decode rows of the last one, and nothing else, all as many tokens further."""
    rows = len(plan.slots)
    return (
        0 < rows == plan.num_decode == last.num_decode == len(last.slots)
        and np.array_equal(plan.slots, last.slots)
        and np.array_equal(plan.generations, last.generations)
        and int(np.ptp(plan.starts - last.starts)) == 0
    )


def done_message(step: int, result: StepResult) -> StepDone:
    """A result as it goes over the wire."""
    return StepDone(step, result.tokens.tobytes(), result.logprobs, result.prompt_logprobs)


def read_done(message: StepDone) -> StepResult:
    """The result of `done_message`. Raises `ValueError` where its tokens are no whole numbers of 64 bits."""
    return StepResult(np.frombuffer(message.tokens, np.int64), message.logprobs, message.prompt_logprobs)


def sample_message(step: int, masks: TokenMasks) -> SampleStep:
    """The masks of a step as they go over the wire."""
    return SampleStep(step, masks.rows, masks.masks.tobytes())


def read_masks(message: SampleStep) -> TokenMasks:
    """The masks of `sample_message`."""
    rows = len(message.rows)
    # A copy: the bytes of a message may not be written to, which torch warns of.
    words = np.frombuffer(message.masks, np.int32).copy()
    return TokenMasks(message.rows, words.reshape(rows, len(words) // rows if rows else 0))


def _operations(messages: list[Any]) -> list[Any]:
    return [_READ[type(message)](*msgspec.structs.astuple(message)) for message in messages]
