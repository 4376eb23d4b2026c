"""`ResultCopies`: brings what steps sampled to the host."""

from typing import NamedTuple

import torch

from bladellm_runtime.engine.current_stream import CurrentStream
from bladellm_runtime.engine.host_ring import HostRing
from bladellm_runtime.engine.running_step import RunningStep
from bladellm_runtime.kv.arena import KvArena


class Streams(NamedTuple):
    """Where steps run, where their results are copied, and of all steps in turn when they have sampled."""

    steps: CurrentStream
    copies: torch.cuda.Stream
    sampled: torch.cuda.Event


class ResultCopies:
    """On CUDA by a stream of its own, for which the next step does not wait; on a CPU at once."""

    def __init__(self, arena: KvArena, in_flight: int) -> None:
        """in_flight: as in `HostRing`."""
        self._arena = arena
        self._host = HostRing(arena.spec.num_slots, arena.device, in_flight)
        self._streams: Streams | None = None
        if arena.device.type == "cuda":
            self._streams = Streams(CurrentStream(arena.device), torch.cuda.Stream(arena.device), torch.cuda.Event())
        self._copied: torch.cuda.Event | None = None

    def keep_tokens(self) -> None:
        """What is queued next waits until the tokens of the step before have left the memory that they were in."""
        if self._copied is not None and self._streams is not None:
            self._streams.steps().wait_event(self._copied)

    def take(self, step: RunningStep) -> None:
        """Replace a step's results by host copies. They are there once `step.done` is, on a CPU now."""
        outputs, buffer = step.outputs, self._host.next()
        if self._streams is None:
            if outputs is not None:
                outputs.tokens = buffer.receive(outputs.tokens, None)
            return
        steps, copies, sampled = self._streams
        # An event for all steps, and a known stream: `wait_stream` takes longer.
        sampled.record(steps())
        copies.wait_event(sampled)
        if outputs is not None:
            step.keep.append(outputs.tokens)
            self._take_logprobs(step, copies)
            outputs.tokens = buffer.receive(outputs.tokens, copies)
            self._copied = buffer.copied
        # Copies of KV to the host may take longer than the next step: that one waits for the tokens alone.
        moves = self._arena.join_moves(copies)
        step.done = copies.record_event() if moves or outputs is None else buffer.copied

    def _take_logprobs(self, step: RunningStep, stream: torch.cuda.Stream) -> None:
        outputs = step.outputs
        if outputs is None or (outputs.logprobs is None and not step.scored):
            return
        with torch.cuda.stream(stream):
            if outputs.logprob_ids is not None and outputs.logprobs is not None:
                step.keep += [outputs.logprob_ids, outputs.logprobs]
                outputs.logprob_ids = _pinned_copy(outputs.logprob_ids)
                outputs.logprobs = _pinned_copy(outputs.logprobs)
            for scored in step.scored:
                step.keep += [scored.ids, scored.logprobs]
                scored.ids, scored.logprobs = _pinned_copy(scored.ids), _pinned_copy(scored.logprobs)


def _pinned_copy(tensor: torch.Tensor) -> torch.Tensor:
    """Queue a copy to the host on the current stream; its memory is tied to that copy by torch's pinned allocator."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
