"""Decode steps as two replays, forward and sampling, for a few batch sizes that others are padded to."""

import bisect
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from bladellm_kernels.decode_schedule import DecodeSetting
from bladellm_kernels.decode_work import DecodeWorkspace
from torch import Tensor

from bladellm_runtime.config import EngineArgs
from bladellm_runtime.engine.captured_sampling import CapturedSampling
from bladellm_runtime.engine.cascade import Cascade, cascade_sizes
from bladellm_runtime.engine.cuda_capture import Capture, Work, capture_sizes
from bladellm_runtime.engine.decode_inputs import DecodeInputs
from bladellm_runtime.engine.host_ring import Leading
from bladellm_runtime.kv.arena import KvArena
from bladellm_runtime.layers.batch import ForwardBatch
from bladellm_runtime.models.decoder import Decoder
from bladellm_runtime.scheduler.plan import StepPlan

DEFAULT_LARGEST = 256


def graph_sizes(args: EngineArgs) -> list[int]:
    """The batch sizes to capture, ascending; none above the slots, which no step exceeds."""
    if args.disable_cuda_graph:
        return []
    wanted = args.cuda_graph_batch_sizes or default_sizes(args.cuda_graph_max_batch_size or DEFAULT_LARGEST)
    return sorted({min(size, args.slots) for size in wanted})


def default_sizes(largest: int) -> list[int]:
    """Every eighth size up to 256 and every 32nd above, where a row more takes a share of the step as small."""
    sizes = (1, 2, 4, *range(8, 257, 8), *range(288, largest, 32))
    return [*(size for size in sizes if size < largest), largest]


def eager_sizes(args: EngineArgs) -> list[int]:
    """Batch sizes of decode steps that no graph serves, ascending: one of each range with kernels of its own, of which
    there are none above `DEFAULT_LARGEST`."""
    largest = max(graph_sizes(args), default=0)
    return [size for size in default_sizes(min(args.slots, DEFAULT_LARGEST)) if size > largest]


@dataclass(frozen=True, slots=True)
class StepGraph:
    """The replays of one batch size: forward leaves logits; sampling, by stage of it, takes them, and advances the
    inputs to the next step. What changes logits goes between. long: forward for steps that are long to the
    `DecodeWorkspace`, where that is another one."""

    forward: Work
    long: Work
    sampling: list[Work]


class StepGraphs:
    """Captures the decode step for each of `sizes`, and replays it for plans that fit.

    A replay reads static arrays (`DecodeInputs`) and per-slot state only, so it serves every length and whatever memory
    slots are moved to. One stream, one step after the other.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        model: Decoder,
        arena: KvArena,
        sampling: CapturedSampling | None,
        last_token: Tensor,
        workspace: DecodeWorkspace | None,
        rotation: Tensor | None,
        cascade: Cascade | None = None,
        in_flight: int = 2,
    ) -> None:
        """sampling: None where the model has no head, and hidden states take the place of logits. last_token: int64
        [slots + 1]; cascade: how shared beginnings are read once, never when None; the others as in `ModelRunner`."""
        self._sizes = sorted(sizes)
        self._graphs: dict[int, StepGraph] = {}
        self._cascades: dict[int, Work] = {}
        self._adapted: dict[int, Work] = {}
        self._cascade = cascade
        self._model = model
        self._last_token = last_token
        self._workspace = workspace
        self._rotation = rotation
        self.inputs = DecodeInputs(self._sizes[-1], arena, 0 if cascade is None else cascade.members, in_flight)
        self.sampling = sampling
        shape = (self._sizes[-1], model.spec.hidden_size)
        self.hidden = None if model.ends.first else torch.zeros(shape, dtype=model.dtype, device=model.device)
        """What the stage before has left, to be filled before `forward`; None on the first stage."""
        self._out = torch.zeros(shape, dtype=model.dtype, device=model.device) if sampling is None else sampling.logits
        self._left, self._sampled = Leading(self._out), None if sampling is None else Leading(sampling.tokens)

    @torch.inference_mode()
    def capture_all(self, capture: Capture) -> bool:
        """Capture every size; False, with a warning, where one of them cannot be captured."""
        self._graphs = capture_sizes(
            "graph_batch_size", self._sizes, partial(self._capture, capture), "decode steps run without CUDA graphs"
        )
        if self._cascade is not None and self._graphs:
            self._cascades = capture_sizes(
                "graph_shared_batch_size",
                cascade_sizes(self._sizes),
                partial(self._capture_cascade, capture, self._cascade),
                "decode rows read what they share one by one",
            )
        if self._model.lora is not None and self._graphs:
            self._adapted = capture_sizes(
                "graph_lora_batch_size",
                self._sizes,
                partial(self._capture_adapted, capture),
                "decode steps with adapters run without CUDA graphs",
            )
        return bool(self._graphs)

    def release(self) -> None:
        """Give the graphs back, whoever still holds this: what NCCL has in them keeps it from ending."""
        for graphs in (self._graphs, self._cascades, self._adapted):
            graphs.clear()

    @property
    def adapted(self) -> bool:
        """Whether steps with adapters are captured too."""
        return bool(self._adapted)

    @property
    def shared_rows(self) -> int:
        """Rows of the largest step whose plan may say what they share; 0 where none may."""
        return max(self._cascades, default=0)

    def size_for(self, plan: StepPlan, adapted: bool = False) -> int | None:
        """The captured size for a plan; None where it has prefill chunks, more rows than any size, or adapters that no
        captured step adds."""
        rows = len(plan.slots)
        if plan.has_prompts or rows > self._sizes[-1] or (adapted and not self._adapted):
            return None
        sizes = sorted(self._cascades) if plan.prefixes and not adapted else self._sizes
        return sizes[bisect.bisect_left(sizes, rows)]

    def forward(self, plan: StepPlan, size: int) -> Tensor:
        """Queue the forward pass of a plan whose inputs were sent. Returns its logits, a view of `sampling.logits`, or
        hidden states, in memory that the next step writes to."""
        graph = self._graphs[size]
        if self.inputs.adapted:
            self._adapted[size]()
        elif plan.prefixes:
            self._cascades[size]()
        else:
            long = graph.long is not graph.forward and self._is_long(plan)
            (graph.long if long else graph.forward)()
        return self._left(len(plan.slots))

    def _is_long(self, plan: StepPlan) -> bool:
        """Whether attention has so much to read that it had better have the device for itself."""
        return self._workspace is not None and self._workspace.is_long(len(plan.slots), int(plan.starts.sum()))

    def sampling_stage(self) -> int | None:
        """The stage of `sample` for the plan whose inputs were sent last; None where its logits are to be sampled
        eagerly."""
        return None if self.sampling is None else self.sampling.stage(self.inputs.slots)

    def sample(self, plan: StepPlan, size: int, stage: int) -> Tensor:
        """Queue the captured sampling, which also hands the tokens to the next step. Returns them, int64 [rows], in
        memory that the next step writes to: to be copied away before that samples."""
        assert self._sampled is not None, "a stage comes from sampling_stage"
        self._graphs[size].sampling[stage]()
        self.inputs.advanced()
        return self._sampled(len(plan.slots))

    def _capture(self, capture: Capture, size: int) -> StepGraph:
        self.inputs.send(None, size)
        out, stages = self._out[:size], 0 if self.sampling is None else self.sampling.stages
        workspace = self._workspace
        beside = workspace is not None and self._model.fuses(size) and self._model.shares_sms(size)
        short = DecodeSetting(beside, late=beside and self._model.fills_sms)
        differs = workspace is not None and workspace.differs_by_length(size, short)

        def forward(setting: DecodeSetting) -> None:
            batch = self._batch(size)
            batch.setting = setting
            batch.reserve_works(self._model.spec.windows)
            self._model.decode(batch, out=out)

        captured = capture(partial(forward, short))
        long = capture(partial(forward, replace(short, long=True))) if differs else captured
        samplings = [capture(partial(self._sample_and_advance, stage, size)) for stage in range(stages)]
        return StepGraph(captured, long, samplings)

    def _sample_and_advance(self, stage: int, size: int) -> None:
        assert self.sampling is not None, "who does not sample has no stages"
        self.sampling.sample(stage, self._out[:size], self.inputs.arrays(size))
        self.inputs.advance(size)

    def _batch(self, size: int, adapted: bool = False) -> ForwardBatch:
        batch = self.inputs.batch(size, self._last_token, adapted)
        batch.workspace, batch.rotation = self._workspace, self._rotation
        # A copy: the forward pass adds to it, in padding too, again and again.
        batch.hidden = None if self.hidden is None else self.hidden[:size].clone()
        return batch

    def _capture_adapted(self, capture: Capture, size: int) -> Work:
        """The forward pass that adds what adapters do. It has nothing to start early, and reads nothing once."""
        self.inputs.send(None, size)
        out = self._out[:size]

        def forward() -> None:
            self._model.decode(self._batch(size, adapted=True), out=out)

        return capture(forward)

    def _capture_cascade(self, capture: Capture, cascade: Cascade, size: int) -> Work:
        """The forward pass that reads what rows share once."""
        self.inputs.send(None, size)
        prefixes, out = self.inputs.prefixes(size), self._out[:size]
        prefixes.set([], 1)

        def forward() -> None:
            batch = self._batch(size)
            batch.prefixes, batch.cascade = prefixes, cascade.workspace
            self._model.decode(batch, out=out)

        return capture(forward)
