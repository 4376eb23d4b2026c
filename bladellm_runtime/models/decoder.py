"""The one decoder class: a pre-norm transformer with grouped-query attention and a gated MLP, as its spec describes."""

from dataclasses import dataclass

import torch
from bladellm_kernels.widen import widen

from bladellm_runtime.layers.attention import Attention, AttentionShape
from bladellm_runtime.layers.batch import ForwardBatch, WantedTokens
from bladellm_runtime.layers.embedding import Embedding
from bladellm_runtime.layers.linear import Linear, LinearLayer
from bladellm_runtime.layers.mlp import GatedMlp
from bladellm_runtime.layers.norm import RmsNorm
from bladellm_runtime.layers.rotary import RotaryEmbedding
from bladellm_runtime.models.config import ModelSpec


@dataclass(frozen=True, slots=True)
class Weights:
    """What a decoder is made of, on one device.

    tensors: the embedding and the norms by their names in `weight_table`, all of the type it computes in. linears: its
    linear layers, ready to run, by the same names without `.weight`; no `head` where the embedding serves as one.
    """

    tensors: dict[str, torch.Tensor]
    linears: dict[str, LinearLayer]

    @property
    def bytes(self) -> int:
        tensors = sum(tensor.nbytes for tensor in self.tensors.values())
        return tensors + sum(linear.bytes for linear in self.linears.values())


class DecoderLayer:
    """Attention and MLP, each behind a norm, around the residual stream."""

    def __init__(self, spec: ModelSpec, weights: Weights, layer: int) -> None:
        def linear(name: str) -> LinearLayer:
            return weights.linears[f"layers.{layer}.{name}"]

        def norm(name: str) -> RmsNorm:
            return RmsNorm(weights.tensors[f"layers.{layer}.{name}.weight"], spec.rms_norm_eps)

        shape = AttentionShape(spec.heads, spec.kv_heads, spec.head_dim, spec.windows[layer])
        head_norms = (norm("q_norm"), norm("k_norm")) if spec.qk_norm else (None, None)
        self.input_norm = norm("input_norm")
        self.attention = Attention(layer, shape, linear("qkv"), linear("output"), *head_norms)
        self.mlp_norm = norm("mlp_norm")
        self.mlp = GatedMlp(linear("gate_up"), linear("down"))
        self.last = layer == spec.layers - 1

    def __call__(
        self,
        x: torch.Tensor | None,
        residual: torch.Tensor | None,
        batch: ForwardBatch,
        cos: torch.Tensor,
        sin: torch.Tensor,
    ) -> tuple[torch.Tensor | None, torch.Tensor]:
        """x: the output of the layer before, None where it has been added to the residual stream. Returns (own output,
        residual) likewise; the last layer's output is never added, since few rows of the sum are wanted."""
        x, residual = self.input_norm.add(x, residual)
        x = self.attention(x, residual, batch, cos, sin)
        x, residual = self.mlp_norm.add(x, residual)
        return self.mlp(x) if self.last else self.mlp.add(x, residual), residual

    def of_wanted(
        self,
        x: torch.Tensor | None,
        residual: torch.Tensor | None,
        wanted: WantedTokens,
        batch: ForwardBatch,
        cos: torch.Tensor,
        sin: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The same for the wanted tokens alone, [R, hidden] both: of the last layer nobody reads the others."""
        normed, stream = self.input_norm.add(x, residual)
        attended = self.attention.of_wanted(normed, wanted, batch, cos, sin)
        kept = stream.index_select(0, wanted.tokens)
        if not len(kept):
            return attended, kept
        normed, kept = self.mlp_norm.add(attended, kept)
        return self.mlp(normed), kept


class Decoder:
    """A loaded model: stateless, all it writes to is the KV arena of the batch it is given."""

    def __init__(self, spec: ModelSpec, weights: Weights) -> None:
        self.spec = spec
        self.embedding = Embedding(weights.tensors["embedding.weight"])
        self.layers = [DecoderLayer(spec, weights, layer) for layer in range(spec.layers)]
        self.norm = RmsNorm(weights.tensors["norm.weight"], spec.rms_norm_eps)
        self.head = weights.linears.get("head") or Linear(self.embedding.weight)
        self.device = self.embedding.weight.device
        self.dtype = self.embedding.weight.dtype
        self.rotary = RotaryEmbedding(spec.rope, self.device)
        self.weight_bytes = weights.bytes

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """Run one step and write its K and V to the arena.

        Returns the hidden states after the final norm of the tokens in `batch.logit_tokens`, [R, hidden].
        """
        return self.final_norm(*self.run_layers(batch), batch.logit_tokens if batch.wanted is None else None)

    @torch.inference_mode()
    def run_layers(self, batch: ForwardBatch) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The step without the final norm: the last layer's output, and the residual stream it is to be added to,
        [T, hidden] each, [R, hidden] where R tokens are wanted; no stream without layers."""
        x: torch.Tensor | None = self.embedding(batch.input_ids)
        cos, sin = self.rotary(batch.positions)
        residual: torch.Tensor | None = None
        for layer in self.layers if batch.wanted is None else self.layers[:-1]:
            x, residual = layer(x, residual, batch, cos, sin)
        if batch.wanted is not None:
            x, residual = self.layers[-1].of_wanted(x, residual, batch.wanted, batch, cos, sin)
        assert x is not None
        return x, residual

    @torch.inference_mode()
    def final_norm(
        self, x: torch.Tensor, residual: torch.Tensor | None, logit_tokens: torch.Tensor | None
    ) -> torch.Tensor:
        """What `run_layers` gives -> hidden states after the final norm of `logit_tokens`, int64 [R], or of all."""
        if logit_tokens is None:
            return self.norm.add(x, residual)[0]
        return self.norm.gather(x, residual, logit_tokens)

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """hidden [R, hidden] of `forward` -> logits, float32 [R, vocab], or in `out` of float32 or the model's type."""
        if out is None or out.dtype == torch.float32:
            return widen(self.head(hidden), out=out)
        return self.head(hidden, out=out) if isinstance(self.head, Linear) else out.copy_(self.head(hidden))
