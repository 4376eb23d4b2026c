"""Steps with prefill chunks as replays, for a few token counts that others are padded to."""

import bisect
from collections.abc import Sequence
from functools import partial

import torch
from bladellm_kernels.decode_work import DecodeWorkspace
from bladellm_kernels.listed_prefill_attention import listed_cost
from bladellm_kernels.prefill_costs import Heads
from bladellm_kernels.prefill_sdpa import layer_heads
from bladellm_kernels.prefill_tiles import Span
from torch import Tensor

from bladellm_runtime.config import EngineArgs
from bladellm_runtime.engine.cuda_capture import Capture, Work, capture_sizes
from bladellm_runtime.engine.inputs import FlatPlan
from bladellm_runtime.engine.mixed_inputs import MixedInputs
from bladellm_runtime.kv.arena import KvArena
from bladellm_runtime.layers.batch import PrefillRow
from bladellm_runtime.models.decoder import Decoder

DEFAULT_SIZES = (*range(32, 641, 32), *range(704, 1025, 64), 1152, 1280, 1536, 1792, 2048)
"""Token counts that are captured, and others padded to."""
LAUNCHES = 1250.0
"""µs that the host takes to launch a layer's operators for a step with prefill chunks. Where attention alone takes the
device longer, the step is launched eagerly where only that has the choice of all kinds of attention."""


def mixed_sizes(args: EngineArgs) -> list[int]:
    """The token counts to capture, ascending; none above what a step may have."""
    if args.disable_cuda_graph:
        return []
    most = args.step_tokens
    wanted = args.cuda_graph_prefill_tokens or DEFAULT_SIZES
    return sorted({min(size, most) for size in wanted if size})


class MixedGraphs:
    """Captures a step of decode rows and prefill chunks for each of `sizes`, from its tokens to their hidden states,
    and replays it for plans that fit.

    Which rows decode and how chunks are cut is read from static arrays (`MixedInputs`). Eager operators take the step
    from there: how many tokens have logits differs. One stream, one step after the other.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        model: Decoder,
        arena: KvArena,
        last_token: Tensor,
        workspace: DecodeWorkspace | None,
        rotation: Tensor | None,
        in_flight: int = 2,
    ) -> None:
        """last_token: int64 [slots + 1]; the others as in `ModelRunner`."""
        spec = model.spec
        self.sizes = sorted(sizes)
        self._graphs: dict[int, Work] = {}
        self._one_pass: dict[int, Work] = {}
        self._adapted: dict[int, Work] = {}
        self._model = model
        self._last_token = last_token
        self._workspace = workspace
        self._rotation = rotation
        self._heads = _heads(model, arena)
        self._window = None if None in spec.windows else max(window or 0 for window in spec.windows)
        max_loras = 0 if model.lora is None else model.lora.max_loras
        self.inputs = MixedInputs(
            self.sizes, arena, self._heads, spec.windows, model.dtype, in_flight, max_loras, workspace
        )
        shape = (self.sizes[-1], spec.hidden_size)
        self.hidden = torch.zeros(shape, dtype=model.dtype, device=model.device)
        """What `Decoder.forward` returns, of all tokens or of the sampling rows' alone."""
        self.received = None if model.ends.first else torch.zeros_like(self.hidden)
        """What the stage before has left, to be filled before `forward`; None on the first stage."""

    @torch.inference_mode()
    def capture_all(self, capture: Capture) -> bool:
        """Capture every size; False, with a warning, where one of them cannot be captured."""
        self._graphs = capture_sizes(
            "graph_prefill_tokens",
            self.sizes,
            partial(self._capture, capture),
            "steps with prefill chunks run without CUDA graphs",
        )
        if self._graphs:
            self._one_pass = capture_sizes(
                "graph_one_pass_tokens",
                [size for size in self.sizes if self.inputs.has_one_pass(size) and not any(self._model.spec.windows)],
                partial(self._capture, capture, one_pass=True),
                "steps with prefill chunks have both kinds of attention",
            )
        if self._model.lora is not None and self._graphs:
            self._adapted = capture_sizes(
                "graph_lora_prefill_tokens",
                self.sizes,
                partial(self._capture, capture, adapted=True),
                "steps with prefill chunks and adapters run without CUDA graphs",
            )
        return bool(self._graphs)

    def release(self) -> None:
        """Give the graphs back, whoever still holds this: what NCCL has in them keeps it from ending."""
        for graphs in (self._graphs, self._one_pass, self._adapted):
            graphs.clear()

    @property
    def adapted(self) -> bool:
        """Whether steps with adapters are captured too."""
        return bool(self._adapted)

    def send(self, flat: FlatPlan) -> int | None:
        """Queue the upload of a plan for the least captured size that will do. None, with nothing queued, without
        chunks, above all sizes, where work lists have no room, with adapters that no captured step adds, and where
        eager operators are not slower."""
        if flat.adapters is not None and not self._adapted:
            return None
        fitting = self.sizes[bisect.bisect_left(self.sizes, flat.tokens) :]
        if not flat.prefills or not fitting:
            return None
        if not self.inputs.has_one_pass(fitting[0]) and self._cost(flat.prefills) > LAUNCHES:
            return None
        return next((size for size in fitting if self.inputs.send(flat, size)), None)

    def forward(self, flat: FlatPlan, size: int) -> Tensor:
        """Queue the forward pass of the plan sent last, of that size. Returns what `Decoder.forward` does; of a stage
        with others behind it in memory that the next step writes to."""
        self._graph(size)()
        if not self._model.ends.last:
            return self.hidden[: flat.tokens]
        wanted = self.inputs.logit_tokens(flat, size)
        return self.hidden[: len(flat.sampling_rows)] if wanted is None else self.hidden.index_select(0, wanted)

    def _graph(self, size: int) -> Work:
        """The one for the plan sent last. Where attention in one pass takes all chunks, the kernel for others, launched
        for nothing, would cost 3 µs a layer."""
        if self.inputs.adapted:
            return self._adapted[size]
        return self._one_pass.get(size, self._graphs[size]) if self.inputs.one_pass else self._graphs[size]

    def _cost(self, chunks: Sequence[PrefillRow]) -> float:
        """µs of prefill attention in a layer."""
        starts = [chunk.start if self._window is None else min(chunk.start, self._window - 1) for chunk in chunks]
        spans = [Span(0, chunk.query_len, start, 0, 0) for chunk, start in zip(chunks, starts, strict=True)]
        return listed_cost(spans, self._heads)

    def _capture(self, capture: Capture, size: int, *, adapted: bool = False, one_pass: bool = False) -> Work:
        self.inputs.send(None, size)

        def forward() -> None:
            batch = self.inputs.batch(size, self._last_token, adapted, one_pass)
            batch.workspace, batch.rotation = self._workspace, self._rotation
            batch.hidden = None if self.received is None else self.received[:size].clone()
            hidden = self._model.forward(batch)
            self.hidden[: len(hidden)].copy_(hidden)

        return capture(forward)


def _heads(model: Decoder, arena: KvArena) -> Heads:
    spec = model.spec
    like = torch.empty(0, spec.heads, spec.head_dim, dtype=model.dtype, device=model.device)
    return layer_heads(like, arena.layer(0))
