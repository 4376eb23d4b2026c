"""The model runner: executes step plans in order on one device, without waiting for them.

Steps are replays of captured graphs where there are any for them (`StepGraphs` for decode rows alone, `MixedGraphs`
with prefill chunks); others launch operator by operator.
On CUDA a launch only enqueues work; results reach the CPU through pinned memory on a second stream. On a CPU the
work itself runs in one thread, so that planning and messages go on beside it: the same two steps in flight.
"""

import concurrent.futures
from collections.abc import Callable, Sequence
from functools import partial

import torch
from bladellm_kernels.decode_work import DecodeWorkspace
from bladellm_kernels.prefill_calls import PlannedCalls

from bladellm_runtime.engine.captured_sampling import captured_sampling
from bladellm_runtime.engine.cascade import Cascade
from bladellm_runtime.engine.cuda_capture import Capture
from bladellm_runtime.engine.inputs import FlatPlan, SlotTokens, StepInputs, build_inputs, flatten
from bladellm_runtime.engine.kernel_compiles import KERNEL_COMPILES
from bladellm_runtime.engine.mixed_graphs import MixedGraphs
from bladellm_runtime.engine.prompt_scores import score_prompts
from bladellm_runtime.engine.result_copies import ResultCopies
from bladellm_runtime.engine.running_step import RunningStep, read_result
from bladellm_runtime.engine.sampler import SampleOutputs, Sampler
from bladellm_runtime.engine.sampling_state import SamplingState
from bladellm_runtime.engine.stage import Stage
from bladellm_runtime.engine.step_adapters import Ints, SlotAdapters
from bladellm_runtime.engine.step_errors import step_error
from bladellm_runtime.engine.step_graphs import StepGraphs
from bladellm_runtime.engine.uploaded_masks import UploadedMasks, upload_masks
from bladellm_runtime.kv.arena import KvArena
from bladellm_runtime.kv.operations import Rows
from bladellm_runtime.models.decoder import Decoder
from bladellm_runtime.scheduler.plan import StepPlan, StepResult, TokenMasks
from bladellm_runtime.wire.messages import EngineStats


class ModelRunner:
    """Owns the model, the KV arena and the per-slot device state.

    `last_token` (int64, one a slot and one for padding) is how a step hands its tokens to the next one without the CPU
    seeing them. As one stage of a pipeline it does the layers of its model, and only the last one samples: the results
    of the others are empty.
    """

    def __init__(
        self,
        model: Decoder,
        arena: KvArena,
        sampling: SamplingState | None,
        workspace: DecodeWorkspace | None,
        rotation: torch.Tensor | None = None,
        planned: PlannedCalls | None = None,
        stage: Stage | None = None,
    ) -> None:
        """sampling: None where another stage samples. rotation: the matrix that turns queries and keys before they are
        stored, of the model's type. planned: what prefill attention may ask of cuDNN, anything when None. stage: the
        place in a pipeline, None without one."""
        num_slots = arena.spec.num_slots
        self._model = model
        self._arena = arena
        self._workspace = workspace
        self._rotation = rotation
        self._planned = planned
        self._stage = stage or Stage()
        self._sampling = sampling
        self._sampler = None if sampling is None else Sampler(sampling)
        self._device = arena.device
        self._last_token = torch.zeros(num_slots + 1, dtype=torch.int64, device=arena.device)
        self._tokens: list[SlotTokens | None] = [None] * num_slots
        self._adapters = None if model.lora is None else SlotAdapters(num_slots)
        self._graphs: StepGraphs | None = None
        self._mixed: MixedGraphs | None = None
        self._replays_mixed = True
        self._results = ResultCopies(arena, self._stage.in_flight)
        self._worker = None if arena.device.type == "cuda" else concurrent.futures.ThreadPoolExecutor(1, "runner")
        self.queued: Callable[[], object] = _nothing
        """Called in a launch when the device has something of the step to begin with."""

    def capture(self, sizes: Sequence[int], capture: Capture, cascade: Cascade | None = None) -> None:
        """Capture decode steps of these batch sizes; before the first step. Warns, and goes on without, if it fails.

        cascade: capture steps that read what rows share once too.
        """
        state, in_flight = self._sampling, self._stage.in_flight
        sampling = None
        if state is not None:
            sampling = captured_sampling(state, self._last_token, max(sizes), self._model.dtype, in_flight)
        memory = (self._workspace, self._rotation, cascade, in_flight)
        graphs = StepGraphs(sizes, self._model, self._arena, sampling, self._last_token, *memory)
        self._graphs = graphs if graphs.capture_all(capture) else None

    def capture_mixed(self, sizes: Sequence[int], capture: Capture) -> None:
        """Capture steps with prefill chunks, of these token counts; as `capture`."""
        memory = (self._workspace, self._rotation, self._stage.in_flight)
        graphs = MixedGraphs(sizes, self._model, self._arena, self._last_token, *memory)
        self._mixed = graphs if graphs.capture_all(capture) else None

    @property
    def shared_rows(self) -> int:
        """Decode rows of a plan that may say what they share, at most; 0 where none may."""
        return 0 if self._graphs is None else self._graphs.shared_rows

    @property
    def mixed_sizes(self) -> Sequence[int]:
        """Token counts, ascending, that captured steps with prefill chunks are padded to."""
        return () if self._mixed is None else self._mixed.sizes

    @property
    def captured(self) -> tuple[int, ...]:
        """Whether there are captured decode steps, with shared beginnings up to how many rows, and captured steps with
        prefill chunks; whether of both kinds there are some with adapters."""
        adapted = (graphs is not None and graphs.adapted for graphs in (self._graphs, self._mixed))
        return int(self._graphs is not None), self.shared_rows, len(self.mixed_sizes), *map(int, adapted)

    @property
    def on_gpu(self) -> bool:
        """Whether a launched step is a GPU's to do, and no thread's of this process."""
        return self._worker is None

    def use_mixed_graphs(self, on: bool) -> None:
        """Whether steps with prefill chunks are replayed from now on where they are captured, or launched operator by
        operator; no step may be in flight."""
        self._replays_mixed = on

    def steps_done(self) -> "concurrent.futures.Future[None]":
        """Done when the steps launched so far are, as far as they were launched. Raises `RuntimeError` on a GPU, whose
        stream says so."""
        if self._worker is None:
            raise RuntimeError("no thread runs the steps")
        return self._worker.submit(lambda: None)

    def launch(self, plan: StepPlan) -> "concurrent.futures.Future[RunningStep] | RunningStep":
        """Start a step. Plans must come in order; as many may be uncollected as the stage has in flight. One with
        constrained rows waits for `sample` where it has its logits.

        Here, or on a CPU in `collect`, raises `StepMemoryError` or `DeviceLostError`.
        """
        if self._worker is not None:
            return self._worker.submit(self._run, plan)
        return self._run(plan)

    def sample(
        self, launched: "concurrent.futures.Future[RunningStep] | RunningStep", masks: TokenMasks
    ) -> "concurrent.futures.Future[RunningStep] | RunningStep":
        """Start the rest of a step with constrained rows, the one launched last. Returns what to collect in place of
        it. Raises as `launch`."""
        if self._worker is not None:
            return self._worker.submit(self._run_rest, launched, masks)
        return self._run_rest(launched, masks)

    def collect(self, launched: "concurrent.futures.Future[RunningStep] | RunningStep") -> StepResult:
        """Wait for a step and read its result. Raises as `launch`."""
        step = launched if isinstance(launched, RunningStep) else launched.result()
        try:
            if step.done is not None:
                step.done.synchronize()
            return read_result(step)
        except RuntimeError as error:
            raise step_error(error, None) from error

    def finished(self, launched: "concurrent.futures.Future[RunningStep] | RunningStep") -> bool:
        """Whether `collect` would not have to wait. Raises `DeviceLostError`."""
        if not isinstance(launched, RunningStep):
            return launched.done()
        try:
            return launched.done is None or launched.done.query()
        except RuntimeError as error:
            raise step_error(error, None) from error

    def recover(self) -> None:
        """After a `StepMemoryError`, all launched steps collected: return when the device is done with the part of the
        step that it was given, and what torch keeps for reuse is free memory again. Raises `DeviceLostError`."""
        if self._device.type == "cuda":
            try:
                torch.cuda.synchronize(self._device)
            except RuntimeError as error:
                raise step_error(error, None) from error
            torch.cuda.empty_cache()

    @torch.inference_mode()
    def _run(self, plan: StepPlan) -> RunningStep:
        repeatable = None
        # Mapping ahead has all the time in which the host waits for the device.
        self._arena.hold()
        try:
            self._arena.submit(plan.memory, Rows(plan.slots, plan.starts, plan.query_lens))
            # From here on the arena shows what the scheduler takes it to show, whether or not the step is done.
            repeatable = plan
            return self._run_plan(plan)
        except (RuntimeError, MemoryError, OSError) as error:
            raise step_error(error, repeatable) from error
        finally:
            self._arena.resume()

    def _run_plan(self, plan: StepPlan) -> RunningStep:
        for load in plan.loads:
            self._tokens[load.slot] = SlotTokens.of(load)
            if self._sampling is not None:
                self._sampling.load(load)
            if self._adapters is not None:
                self._adapters.load(load)
        self._stage.begin(plan, self._last_token)
        adapters = None if self._adapters is None else self._adapters.of(plan)
        size = None if self._graphs is None else self._graphs.size_for(plan, adapters is not None)
        if self._graphs is not None and size is not None:
            step = self._replay(plan, self._graphs, size, adapters)
        else:
            step = self._run_flat(plan, adapters)
        if step.sample is None or not plan.constrained:
            self._end(step, None)
        return step

    @torch.inference_mode()
    def _run_rest(
        self, launched: "concurrent.futures.Future[RunningStep] | RunningStep", masks: TokenMasks
    ) -> RunningStep:
        step = launched if isinstance(launched, RunningStep) else launched.result()
        if step.sample is None:
            return step  # another stage has what is left of it
        try:
            self._end(step, upload_masks(masks, step.sampling_rows, self._device))
        except (RuntimeError, MemoryError, OSError) as error:
            raise step_error(error, step.plan) from error
        return step

    def _end(self, step: RunningStep, masks: UploadedMasks | None) -> None:
        """What follows the forward pass."""
        if step.sample is not None:
            step.sample(step, masks)
            step.sample = None
        self._stage.end(self._last_token)
        self._results.take(step)

    def _run_flat(self, plan: StepPlan, adapters: Ints | None) -> RunningStep:
        """A step of any rows: replayed up to the final norm, or not."""
        flat = flatten(plan, self._tokens, self._arena, adapters)
        size = self._mixed.send(flat) if self._mixed is not None and self._replays_mixed else None
        if self._mixed is None or size is None:
            return self._run_eagerly(plan, flat)
        self._arena.wait()
        self._arena.move(plan.memory.moves)
        if self._mixed.received is not None:
            self._stage.receive(self._mixed.received[: flat.tokens])
        hidden = self._mixed.forward(flat, size)
        self.queued()
        return self._finish(plan, flat, hidden, None)

    def _run_eagerly(self, plan: StepPlan, flat: FlatPlan) -> RunningStep:
        inputs = build_inputs(flat, self._last_token, self._arena)
        inputs.batch.workspace, inputs.batch.rotation = self._workspace, self._rotation
        inputs.batch.planned = self._planned
        self._arena.wait()
        self._arena.move(plan.memory.moves)
        if not self._stage.ends.first:
            shape = (flat.tokens, self._model.spec.hidden_size)
            inputs.batch.hidden = self._stage.receive(torch.empty(shape, dtype=self._model.dtype, device=self._device))
        self.queued()
        if flat.prefills:
            return self._finish(plan, flat, self._model.forward(inputs.batch), inputs)
        if self._sampler is None:
            return self._finish(plan, flat, self._model.decode(inputs.batch), inputs)
        logits = self._model.decode(inputs.batch, self._logits_memory(flat.tokens))
        sample = partial(self._sample, logits)
        return RunningStep(plan, sample, keep=[inputs])

    def _finish(self, plan: StepPlan, flat: FlatPlan, hidden: torch.Tensor, inputs: StepInputs | None) -> RunningStep:
        """hidden: of `flat.logit_tokens`, [R, hidden size]; of all tokens where other stages are behind this one."""
        if self._sampler is None:
            self._stage.send(hidden)
            return RunningStep(plan, keep=[inputs, hidden])
        count = len(flat.sampling_rows)
        sample = partial(self._sample, self._model.logits(hidden[:count], self._logits_memory(count)))
        scored = score_prompts(self._model, hidden[count:], flat.scores) if flat.scores else []
        return RunningStep(plan, sample, scored=scored, keep=[inputs, hidden])

    def _logits_memory(self, rows: int) -> torch.Tensor | None:
        """Where the logits of an eager step go: where those of captured ones do, whose memory is there anyway; None for
        memory of their own, where nothing is captured."""
        sampling = None if self._graphs is None else self._graphs.sampling
        return None if sampling is None else sampling.logits[:rows]

    def _replay(self, plan: StepPlan, graphs: StepGraphs, size: int, adapters: Ints | None) -> RunningStep:
        """The forward pass of decode rows, padded to `size`."""
        graphs.inputs.send(plan, size, adapters)
        self._arena.wait()
        self._arena.move(plan.memory.moves)
        rows = len(plan.slots)
        if graphs.hidden is not None:
            self._stage.receive(graphs.hidden[:rows])
        logits = graphs.forward(plan, size)
        self.queued()
        if self._sampler is None:
            self._stage.send(logits)
            return RunningStep(plan)
        return RunningStep(plan, partial(self._sample_replayed, graphs, size, logits))

    def _sample_replayed(
        self, graphs: StepGraphs, size: int, logits: torch.Tensor, step: RunningStep, masks: UploadedMasks | None
    ) -> None:
        """Sample what `_replay` left, by a replay again where there is one that will do."""
        stage = graphs.sampling_stage()
        if stage is None:
            self._sample(logits, step, masks)
            return
        if masks is not None:
            masks.apply(logits)
            step.keep.append(masks)
        self._results.keep_tokens()
        tokens = graphs.sample(step.plan, size, stage)
        step.outputs = SampleOutputs(tokens, tokens)

    def _sample(self, logits: torch.Tensor, step: RunningStep, masks: UploadedMasks | None) -> None:
        assert self._sampler is not None, "another stage samples"
        inputs = self._sampler.prepare(step.plan)
        step.outputs = self._sampler.sample(logits, inputs, self._last_token, masks)
        step.keep += [inputs, masks]

    def add_stats(self, stats: EngineStats) -> None:
        """Fill in what mapping KV memory took, and the kernels that had to be compiled in the middle of a step."""
        memory = self._arena.stats
        stats.kv_maps = memory.maps
        stats.kv_map_p99 = memory.map_p99()
        stats.kv_map_wait = memory.wait_seconds
        stats.kernel_compiles_after_ready = KERNEL_COMPILES.late

    @torch.inference_mode()
    def drain(self) -> None:
        """Take what other stages have still sent to this one; all steps are collected, and none follow."""
        self._stage.drain(self._last_token)

    def close(self) -> None:
        """Finish the work in flight and give the memory of graphs and of the KV cache back."""
        if self._worker is not None:
            self._worker.shutdown(wait=True)
        else:
            torch.cuda.synchronize(self._device)
        for graphs in (self._graphs, self._mixed):
            if graphs is not None:
                graphs.release()
        self._graphs = self._mixed = None
        self._arena.close()

    def abandon(self) -> None:
        """Let go of what can be without the device, which is lost and may hang."""
        if self._worker is not None:
            self._worker.shutdown(wait=False)


def _nothing() -> None:
    """What nobody waits for."""
