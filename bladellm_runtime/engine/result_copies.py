"""`ResultCopies`: brings what steps sampled to the host."""

import torch

from bladellm_runtime.engine.current_stream import CurrentStream
from bladellm_runtime.engine.host_ring import HostRing
from bladellm_runtime.engine.running_step import RunningStep
from bladellm_runtime.kv.arena import KvArena


class ResultCopies:
    """On CUDA by a stream of its own, for which the next step does not wait; on a CPU at once."""

    def __init__(self, arena: KvArena, in_flight: int) -> None:
        """in_flight: as in `HostRing`."""
        self._arena = arena
        self._host = HostRing(arena.spec.num_slots, arena.device, in_flight)
        self._stream = torch.cuda.Stream(arena.device) if arena.device.type == "cuda" else None
        self._main = None if self._stream is None else CurrentStream(arena.device)
        self._sampled = None if self._stream is None else torch.cuda.Event()
        self._copied: torch.cuda.Event | None = None

    def keep_tokens(self) -> None:
        """What is queued next waits until the tokens of the step before have left the memory that they were in."""
        if self._copied is not None and self._main is not None:
            self._main().wait_event(self._copied)

    def take(self, step: RunningStep) -> None:
        """Replace a step's results by host copies. They are there once `step.done` is, on a CPU now."""
        outputs, buffer = step.outputs, self._host.next()
        if self._stream is None or self._main is None or self._sampled is None:
            if outputs is not None:
                outputs.tokens = buffer.receive(outputs.tokens, None)
            return
        # One event for all steps, and a known stream: `wait_stream` takes longer.
        self._sampled.record(self._main())
        self._stream.wait_event(self._sampled)
        if outputs is None:
            # Of another stage's step, its end and the copies of KV to the host that it began.
            self._arena.join_moves(self._stream)
            step.done = self._stream.record_event()
            return
        step.keep.append(outputs.tokens)
        if step.scored or outputs.logprobs is not None:
            self._take_logprobs(step, self._stream)
        outputs.tokens = buffer.receive(outputs.tokens, self._stream)
        self._copied = buffer.copied
        # Copies of KV to the host may take longer than the next step: that one waits for the tokens alone.
        step.done = self._stream.record_event() if self._arena.join_moves(self._stream) else buffer.copied

    def _take_logprobs(self, step: RunningStep, stream: torch.cuda.Stream) -> None:
        outputs = step.outputs
        with torch.cuda.stream(stream):
            if outputs is not None and outputs.logprob_ids is not None and outputs.logprobs is not None:
                step.keep += [outputs.logprob_ids, outputs.logprobs]
                outputs.logprob_ids = _pinned_copy(outputs.logprob_ids)
                outputs.logprobs = _pinned_copy(outputs.logprobs)
            for scored in step.scored:
                step.keep += [scored.ids, scored.logprobs]
                scored.ids, scored.logprobs = _pinned_copy(scored.ids), _pinned_copy(scored.logprobs)


def _pinned_copy(tensor: torch.Tensor) -> torch.Tensor:
    """Queue a copy to the host on the current stream; its memory is tied to that copy by torch's pinned allocator."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
