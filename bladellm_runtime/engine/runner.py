"""The model runner: executes step plans in order on one device, without waiting for them.

On CUDA a launch only enqueues work; results reach the CPU through pinned memory on a second stream. On a CPU the
work itself runs in one thread, so that planning and messages go on beside it: the same two steps in flight.
"""

import concurrent.futures
from dataclasses import dataclass

import torch
from bladellm_kernels.decode_work import DecodeWorkspace
from bladellm_kernels.prefill_calls import PlannedCalls

from bladellm_runtime.engine.inputs import SlotTokens, StepInputs, build_inputs
from bladellm_runtime.engine.prompt_scores import ScoredPrompt, score_prompts
from bladellm_runtime.engine.sampler import SampleOutputs, Sampler
from bladellm_runtime.engine.sampling_state import SamplingState
from bladellm_runtime.kv.arena import KvArena
from bladellm_runtime.models.decoder import Decoder
from bladellm_runtime.scheduler.plan import StepPlan, StepResult
from bladellm_runtime.wire.messages import EngineStats, TokenLogprobs


@dataclass(slots=True)
class RunningStep:
    """A step handed to the device, and everything that must stay alive until its result is read."""

    rows: int
    inputs: StepInputs
    outputs: SampleOutputs
    scored: list[ScoredPrompt]
    keep: list[object]
    done: torch.cuda.Event | None = None


class ModelRunner:
    """Owns the model, the KV arena and the per-slot device state.

    `last_token` (int64, one a slot) is how a step hands its tokens to the next one without the CPU seeing them.
    """

    def __init__(
        self,
        model: Decoder,
        arena: KvArena,
        sampling: SamplingState,
        workspace: DecodeWorkspace | None,
        rotation: torch.Tensor | None = None,
        planned: PlannedCalls | None = None,
    ) -> None:
        """rotation: the matrix that turns queries and keys before they are stored, of the model's type. planned: what
        prefill attention may ask of cuDNN, anything when None."""
        num_slots = arena.spec.num_slots
        self._model = model
        self._arena = arena
        self._workspace = workspace
        self._rotation = rotation
        self._planned = planned
        self._sampling = sampling
        self._sampler = Sampler(sampling)
        self._device = arena.device
        self._last_token = torch.zeros(num_slots, dtype=torch.int64, device=arena.device)
        self._tokens: list[SlotTokens | None] = [None] * num_slots
        self._copies = torch.cuda.Stream(arena.device) if arena.device.type == "cuda" else None
        self._worker = None if self._copies else concurrent.futures.ThreadPoolExecutor(1, "runner")

    def launch(self, plan: StepPlan) -> "concurrent.futures.Future[RunningStep] | RunningStep":
        """Start a step. Plans must come in order; at most two may be uncollected."""
        if self._worker is not None:
            return self._worker.submit(self._run, plan)
        return self._run(plan)

    def collect(self, launched: "concurrent.futures.Future[RunningStep] | RunningStep") -> StepResult:
        """Wait for a step and read its result."""
        step = launched if isinstance(launched, RunningStep) else launched.result()
        if step.done is not None:
            step.done.synchronize()
        return _read(step)

    @torch.inference_mode()
    def _run(self, plan: StepPlan) -> RunningStep:
        self._arena.submit(plan.memory)
        for load in plan.loads:
            self._tokens[load.slot] = SlotTokens.of(load)
            self._sampling.load(load)
        inputs = build_inputs(plan, self._tokens, self._last_token, self._arena)
        inputs.batch.workspace, inputs.batch.rotation = self._workspace, self._rotation
        inputs.batch.planned = self._planned
        self._arena.wait()
        self._arena.move(plan.memory.moves)
        hidden = self._model.forward(inputs.batch)
        count = len(inputs.sampling_rows)
        sample_inputs = self._sampler.prepare(plan)
        outputs = self._sampler.sample(self._model.logits(hidden[:count]), sample_inputs)
        self._last_token.index_copy_(0, inputs.sampling_slots, outputs.feedback)
        scored = score_prompts(self._model, hidden[count:], inputs.scores) if inputs.scores else []
        step = RunningStep(len(plan.slots), inputs, outputs, scored, [hidden, sample_inputs])
        if self._copies is not None:
            self._copy_results(step, self._copies)
        return step

    def _copy_results(self, step: RunningStep, copies: torch.cuda.Stream) -> None:
        """Replace the step's results by pinned copies, on the second stream: the next step does not wait for them."""
        copies.wait_stream(torch.cuda.current_stream(self._device))
        outputs = step.outputs
        with torch.cuda.stream(copies):
            step.keep += [outputs.tokens, outputs.logprob_ids, outputs.logprobs]
            outputs.tokens = _pinned_copy(outputs.tokens)
            if outputs.logprob_ids is not None and outputs.logprobs is not None:
                outputs.logprob_ids = _pinned_copy(outputs.logprob_ids)
                outputs.logprobs = _pinned_copy(outputs.logprobs)
            for scored in step.scored:
                step.keep += [scored.ids, scored.logprobs]
                scored.ids, scored.logprobs = _pinned_copy(scored.ids), _pinned_copy(scored.logprobs)
            step.done = torch.cuda.Event()
            step.done.record(copies)

    def add_stats(self, stats: EngineStats) -> None:
        """Fill in what mapping KV memory took."""
        memory = self._arena.stats
        stats.kv_maps = memory.maps
        stats.kv_map_p99 = memory.map_p99()
        stats.kv_map_wait = memory.wait_seconds

    def close(self) -> None:
        """Finish the work in flight and give the KV memory back."""
        if self._worker is not None:
            self._worker.shutdown(wait=True)
        else:
            torch.cuda.synchronize(self._device)
        self._arena.close()


def _pinned_copy(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)


def _read(step: RunningStep) -> StepResult:
    tokens: list[int | None] = [None] * step.rows
    logprobs: list[TokenLogprobs | None] = [None] * step.rows
    prompt_logprobs: list[list[TokenLogprobs] | None] = [None] * step.rows
    for row, token in zip(step.inputs.sampling_rows, step.outputs.tokens.tolist(), strict=True):
        tokens[row] = token
    for index, entry in step.outputs.read_logprobs():
        logprobs[step.inputs.sampling_rows[index]] = entry
    for scored in step.scored:
        prompt_logprobs[scored.row] = scored.to_host()
    return StepResult(tokens, logprobs, prompt_logprobs)
