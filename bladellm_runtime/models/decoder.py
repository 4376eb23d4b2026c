"""The one decoder class: a pre-norm transformer with grouped-query attention and a gated MLP, as its spec describes."""

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import torch
from bladellm_kernels.delayed_norm import DelayedNorm
from bladellm_kernels.widen import widen

from bladellm_runtime.distributed.communicator import Communicator
from bladellm_runtime.layers.attention import Attention, AttentionShape
from bladellm_runtime.layers.batch import ForwardBatch, WantedTokens
from bladellm_runtime.layers.embedding import Embedding
from bladellm_runtime.layers.linear import Linear, LinearLayer
from bladellm_runtime.layers.mlp import GatedMlp
from bladellm_runtime.layers.norm import RmsNorm
from bladellm_runtime.layers.parallel import RowParallelLinear, VocabParallelEmbedding, VocabParallelHead
from bladellm_runtime.layers.residual import FusedStream, NormedStream, Stream
from bladellm_runtime.layers.rotary import RotaryEmbedding
from bladellm_runtime.models.config import ModelSpec
from bladellm_runtime.models.lora import LoraMemory
from bladellm_runtime.models.packed_layers import added_bytes, pack_linears

IDS_AT_ONCE = 2048
"""Token ids whose first layer is computed together."""

Hidden = TypeVar("Hidden", torch.Tensor, DelayedNorm)


@dataclass(frozen=True, slots=True)
class Weights:
    """What a decoder is made of, on one device.

    tensors: the embedding and the norms by their names in `weight_table`, all of the type it computes in. linears: its
    linear layers, ready to run, by the same names without `.weight`; no `head` where the embedding serves as one. lora:
    the adapters that these layers add, None where they add none. packed_bytes: of the weights that linear layers have
    packed beside the plain ones.
    """

    tensors: dict[str, torch.Tensor]
    linears: dict[str, LinearLayer]
    lora: LoraMemory | None = None
    packed_bytes: int = 0

    @property
    def bytes(self) -> int:
        tensors = sum(tensor.nbytes for tensor in self.tensors.values())
        adapters = 0 if self.lora is None else self.lora.bytes
        return tensors + adapters + sum(linear.bytes for linear in self.linears.values())

    def packed(self) -> "Weights":
        """The same with packed weights beside those of linear layers that can have them."""
        linears = pack_linears(self.linears)
        return Weights(self.tensors, linears, self.lora, added_bytes(linears))

    def with_lora(self, lora: LoraMemory) -> "Weights":
        """The same with linear layers that add adapters."""
        return Weights(self.tensors, lora.wrap(self.linears), lora, self.packed_bytes)


@dataclass(frozen=True, slots=True)
class StageEnds:
    """Whether a decoder begins with the embedding, and whether it ends with norm and head."""

    first: bool = True
    last: bool = True


WHOLE = StageEnds()


class DecoderLayer:
    """Attention and MLP, each behind a norm, around the residual stream."""

    def __init__(self, spec: ModelSpec, weights: Weights, layer: int, communicator: Communicator | None) -> None:
        def linear(name: str) -> LinearLayer:
            return weights.linears[f"layers.{layer}.{name}"]

        def row_parallel(name: str) -> LinearLayer:
            return linear(name) if communicator is None else RowParallelLinear(linear(name), communicator)

        def norm(name: str) -> RmsNorm:
            return RmsNorm(weights.tensors[f"layers.{layer}.{name}.weight"], spec.rms_norm_eps)

        shape = AttentionShape(spec.heads, spec.kv_heads, spec.head_dim, spec.windows[layer])
        q_norm, k_norm = (norm("q_norm"), norm("k_norm")) if spec.qk_norm else (None, None)
        self.input_norm = norm("input_norm")
        state = None if weights.lora is None else weights.lora.state
        self.attention = Attention(layer, shape, linear("qkv"), row_parallel("output"), q_norm, k_norm, state)
        self.mlp_norm = norm("mlp_norm")
        self.mlp = GatedMlp(linear("gate_up"), row_parallel("down"))

    def __call__(
        self, stream: Stream, batch: ForwardBatch, cos: torch.Tensor, sin: torch.Tensor, next_norm: RmsNorm
    ) -> Stream:
        """stream: normalised by `input_norm`. Returns it with what the layer adds, normalised by `next_norm`."""
        stream = self.attention(stream, batch, cos, sin, self.mlp_norm)
        return self.mlp(stream, next_norm)

    def of_wanted(
        self,
        stream: NormedStream,
        wanted: WantedTokens,
        batch: ForwardBatch,
        cos: torch.Tensor,
        sin: torch.Tensor,
        next_norm: RmsNorm,
    ) -> NormedStream:
        """The same for the wanted tokens alone, [R, hidden]: of the last layer nobody reads the others."""
        stream = self.attention.of_wanted(stream, wanted, batch, cos, sin, self.mlp_norm)
        return self.mlp(stream, next_norm) if len(wanted.tokens) else stream

    @property
    def linears(self) -> tuple[LinearLayer, ...]:
        return self.attention.qkv, self.attention.output, self.mlp.gate_up, self.mlp.down

    @property
    def kind(self) -> Hashable:
        """The same of layers that run the same kernels."""
        return self.attention.shape, *((type(linear), linear.bytes) for linear in self.linears)

    def prepare(self) -> None:
        for linear in self.linears:
            linear.prepare()

    def fuses(self, rows: int) -> bool:
        """Whether all linear layers fuse with the operators around them, of so many tokens."""
        others = (self.attention.qkv, self.attention.output, self.mlp.down)
        return self.mlp.gate_up.fuses(rows, gated=True) and all(linear.fuses(rows) for linear in others)


class Decoder:
    """A loaded model: stateless, all it writes to is the KV arena of the batch it is given.

    With a communicator it is one rank's part of a model: spec and weights are the rank's, all ranks must be given the
    same batches, and each gets the same results. `ends`: of a pipeline stage; one that is not the first reads
    `batch.hidden`, and one that is not the last returns the residual stream in place of what is said below.
    """

    def __init__(
        self, spec: ModelSpec, weights: Weights, communicator: Communicator | None = None, ends: StageEnds = WHOLE
    ) -> None:
        self.spec = spec
        self.ends = ends
        self.layers = [DecoderLayer(spec, weights, layer, communicator) for layer in range(spec.layers)]
        self._active = self.layers
        self.embedding = _embedding(weights, communicator) if ends.first else None
        # Behind the last layer of a stage that is not the last one a norm is due whose result nobody reads.
        self.norm = self.layers[0].input_norm
        self.head: LinearLayer | None = None
        if ends.last:
            self.norm = RmsNorm(weights.tensors["norm.weight"], spec.rms_norm_eps)
            self.head = _head(spec, weights, communicator)
        self.device = self.norm.weight.device
        self.dtype = self.norm.weight.dtype
        self.rotary = RotaryEmbedding(spec.rope, self.device)
        self.weight_bytes = weights.bytes
        self.packed_bytes = weights.packed_bytes
        self.lora = weights.lora
        self._communicator = communicator
        self._fusing: dict[tuple[int, bool], bool] = {}

    @property
    def first_layer_bytes(self) -> int:
        """What `precompute_first_layer` takes, 0 of a stage that is not the first."""
        outputs = self.layers[0].attention.qkv.outputs
        return self.spec.vocab_size * outputs * self.dtype.itemsize if self.ends.first else 0

    @property
    def known_bytes(self) -> int:
        """Of what has been precomputed."""
        known = self.layers[0].attention.known
        return 0 if known is None else known.weight.nbytes

    @torch.inference_mode()
    def precompute_first_layer(self) -> None:
        """Keep what the first layer projects of every token id, q, k and v before rotary embedding, which nothing else
        decides (https://arxiv.org/abs/2402.13388) where there are no adapters. All ranks of a stage do so together."""
        if self.embedding is None:
            return
        layer = self.layers[0]
        vocabulary = torch.arange(self.spec.vocab_size, device=self.device)
        known = torch.empty(len(vocabulary), layer.attention.qkv.outputs, dtype=self.dtype, device=self.device)
        for ids, rows in zip(vocabulary.split(IDS_AT_ONCE), known.split(IDS_AT_ONCE), strict=True):
            layer.attention.qkv(layer.input_norm(self.embedding(ids)), rows)
        layer.attention.known = Embedding(known)

    def prepare(self) -> None:
        """Compile the kernels that its layers, which are alike, and its head may need and no step before ready does."""
        self.layers[0].prepare()
        if self.head is not None:
            self.head.prepare()

    @contextmanager
    def rehearsal(self) -> Iterator[None]:
        """Meanwhile steps run as few layers as need all the kernels of a whole step: these are loaded then, and what is
        computed is worth nothing. Of a rank with others beside it all run, which must not wait for each other in vain.
        """
        self._active = self.layers if self._communicator is not None else one_of_each(self.layers)
        try:
            yield
        finally:
            self._active = self.layers

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """Run one step and write its K and V to the arena.

        Returns the hidden states after the final norm of the tokens in `batch.logit_tokens`, [R, hidden]; the stream
        of all tokens, [T, hidden], where there are stages behind this one.
        """
        self._adapt(batch)
        tables = self.rotary(batch.positions)
        if not self.ends.last:
            return self._run(NormedStream, self._active, batch, tables, self.norm).total
        if batch.wanted is None:
            return self._run(NormedStream, self._active, batch, tables, self.norm.of(batch.logit_tokens)).normed
        *others, last = self._active
        stream = self._run(NormedStream, others, batch, tables, last.input_norm)
        return last.of_wanted(stream, batch.wanted, batch, *tables, self.norm).normed

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """hidden [R, hidden] of `forward` -> logits, float32 [R, vocab], or in `out` of float32 or the model's type."""
        return _logits(self._end(), hidden, out)

    @torch.inference_mode()
    def decode(self, batch: ForwardBatch, out: torch.Tensor | None = None) -> torch.Tensor:
        """Run a step of decode rows alone, by fused operators where it `fuses`.

        Returns the logits of all its rows, [T, vocab], as `logits` does; their stream, in `out` where given, where
        there are stages behind this one.
        """
        self._adapt(batch)
        tables = self.rotary(batch.positions)
        fuses = self.fuses(len(batch.positions))
        if not self.ends.last:
            kind: type[FusedStream] | type[NormedStream] = FusedStream if fuses else NormedStream
            total = self._run(kind, self._active, batch, tables, self.norm).total
            return total if out is None else out.copy_(total)
        if fuses:
            return _logits(self._end().normed, self._run(FusedStream, self._active, batch, tables, self.norm).norm, out)
        return _logits(self._end(), self._run(NormedStream, self._active, batch, tables, self.norm).normed, out)

    def fuses(self, rows: int) -> bool:
        """Whether a decode step of so many rows takes the fused operators: where all layers but the head have them.

        The head comes once a step: behind a norm of its own it costs little. A step with adapters does not: they are
        added by kernels of their own.
        """
        adapted = self.lora is not None and self.lora.state.adapters is not None
        if (rows, adapted) not in self._fusing:
            fuses = all(layer.fuses(rows) for layer in self.layers)
            # Ranks whose layers have different sizes must go one way all the same.
            agreed = fuses if self._communicator is None else bool(self._communicator.min_int(fuses))
            self._fusing[rows, adapted] = agreed
        return self._fusing[rows, adapted]

    @property
    def fills_sms(self) -> bool:
        """Whether the layer behind attention had better start on empty multiprocessors, in steps that are fused."""
        return all(layer.attention.output.fills_sms for layer in self.layers)

    def shares_sms(self, rows: int) -> bool:
        """Whether programs of the layer behind attention find a place beside it, in fused steps of so many rows."""
        return all(layer.attention.output.shares_sms(rows) for layer in self.layers)

    def _adapt(self, batch: ForwardBatch) -> None:
        """Tell the layers which adapters the tokens of a step have."""
        if self.lora is not None:
            self.lora.state.adapters = batch.adapters
        elif batch.adapters is not None:
            raise ValueError("tokens have adapters, but the decoder was built without slots for them")

    def _run(
        self,
        kind: type[Stream],
        layers: Sequence[DecoderLayer],
        batch: ForwardBatch,
        tables: tuple[torch.Tensor, torch.Tensor],
        next_norm: RmsNorm,
    ) -> Stream:
        """The residual stream behind the first layers, normalised by `next_norm`. tables: cos and sin."""
        norms = [*(layer.input_norm for layer in layers), next_norm]
        stream = kind.start(self._start(batch), norms[0])
        for layer, norm in zip(layers, norms[1:], strict=True):
            stream = layer(stream, batch, *tables, norm)
        return stream

    def _start(self, batch: ForwardBatch) -> torch.Tensor:
        if self.embedding is not None:
            return self.embedding(batch.input_ids, batch.id_slots, batch.padded)
        if batch.hidden is None:
            raise ValueError("a stage that is not the first needs what the one before it has left")
        return batch.hidden

    def _end(self) -> LinearLayer:
        if self.head is None:
            raise ValueError("a stage that is not the last has no head")
        return self.head


def one_of_each(layers: Sequence[DecoderLayer]) -> list[DecoderLayer]:
    """The first two layers of each kind and the last of all: behind and in front of another, and at both ends."""
    found: Counter[Hashable] = Counter()
    chosen = []
    for layer in layers[:-1]:
        found[layer.kind] += 1
        if found[layer.kind] <= 2:
            chosen.append(layer)
    return [*chosen, *layers[-1:]]


def _embedding(weights: Weights, communicator: Communicator | None) -> Embedding:
    weight = weights.tensors["embedding.weight"]
    return Embedding(weight) if communicator is None else VocabParallelEmbedding(weight, communicator)


def _head(spec: ModelSpec, weights: Weights, communicator: Communicator | None) -> LinearLayer:
    head = weights.linears.get("head") or Linear(weights.tensors["embedding.weight"])
    return head if communicator is None else VocabParallelHead(head, communicator, spec.vocab_size)


def _logits(
    head: Callable[[Hidden, torch.Tensor | None], torch.Tensor], hidden: Hidden, out: torch.Tensor | None
) -> torch.Tensor:
    if out is None or out.dtype == torch.float32:
        return widen(head(hidden, None), out=out)
    return head(hidden, out)
