"""A decode step as chains of kernels: linear layers with separate norms and gates, or with those in their kernels."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from bladellm_kernels.decode_schedule import DecodeSchedule
from bladellm_kernels.decode_work import DecodeWork, DecodeWorkspace
from bladellm_kernels.delayed_norm import delayed_norm
from bladellm_kernels.kv_format import NO_QUANT
from bladellm_kernels.kv_layer import KvLayer
from bladellm_kernels.normed_linear import linear_add, normed_linear, normed_linear_silu_mul
from bladellm_kernels.ragged_decode_attention import ragged_decode_attention
from bladellm_kernels.rms_norm import add_rms_norm, rms_norm
from bladellm_kernels.rotary import rotary_tables
from bladellm_kernels.rotary_kv_write import rotary_kv_write
from bladellm_kernels.silu_mul import silu_mul
from torch import Tensor

Linear = Callable[[Tensor, Tensor], Tensor]
AddingLinear = Callable[[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None], Tensor]
"""Of x, weight, bias, what it writes to and a residual."""
Mix = Callable[[Tensor, int], Tensor]
"""What is between QKV and o: qkv [M, Nq] of a layer's number to [M, H]."""

EPS = 1e-5
GRANULE_TOKENS = 64


@dataclass(frozen=True, slots=True)
class Sizes:
    """Of a decoder; head_rows: of the vocabulary."""

    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int
    head_rows: int

    @property
    def hidden(self) -> int:
        return self.heads * self.head_dim

    @property
    def shapes(self) -> dict[str, tuple[int, int, bool]]:
        """By name: outputs, inputs, and whether a gate follows."""
        qkv = (self.heads + 2 * self.kv_heads) * self.head_dim
        return {
            "qkv": (qkv, self.hidden, False),
            "o": (self.hidden, self.hidden, False),
            "gate_up": (self.inner, self.hidden, True),
            "down": (self.hidden, self.inner, False),
            "head": (self.head_rows, self.hidden, False),
        }

    @property
    def bytes(self) -> int:
        """Of all weights, in 16 bits."""
        sizes = {name: 2 * n * k * (1 + gated) for name, (n, k, gated) in self.shapes.items()}
        return self.layers * sum(sizes.values()) - (self.layers - 1) * sizes["head"]


LLAMA_8B = Sizes(32, 32, 8, 128, 14336, 128256)


@dataclass(frozen=True, slots=True)
class Weights:
    """Of each kind of linear layer a list, of the head one; norms: in front of QKV and of gate-up by turns, and last
    in front of the head."""

    linears: dict[str, list[Tensor]]
    norms: list[Tensor]

    @property
    def layers(self) -> int:
        return len(self.linears["qkv"])

    @property
    def head(self) -> Tensor:
        return self.linears["head"][0]

    def first(self, layers: int) -> "Weights":
        """The first layers, and the head."""
        return Weights(
            {name: weights[:layers] for name, weights in self.linears.items()},
            [*self.norms[: 2 * layers], self.norms[-1]],
        )

    def double(self) -> "Weights":
        linears = {name: [weight.double() for weight in weights] for name, weights in self.linears.items()}
        return Weights(linears, [norm.double() for norm in self.norms])


def random_weights(sizes: Sizes, device: str, dtype: torch.dtype) -> Weights:
    """Such that outputs are about 1."""
    linears = {
        name: [
            torch.randn((1 + gated) * n, k, device=device, dtype=dtype).mul_(k**-0.5)
            for _ in range(1 if name == "head" else sizes.layers)
        ]
        for name, (n, k, gated) in sizes.shapes.items()
    }
    norms = [1 + torch.randn(sizes.hidden, device=device, dtype=dtype) / 8 for _ in range(2 * sizes.layers + 1)]
    return Weights(linears, norms)


def separate(weights: Weights, x: Tensor, linear: Linear, mix: Mix) -> Tensor:
    """Norms with the residual addition, and gates, between the linear layers. Returns the logits."""
    stream, normed = x, rms_norm(x, weights.norms[0], EPS)
    for layer in range(weights.layers):
        qkv, o, gate_up, down = (weights.linears[name][layer] for name in ("qkv", "o", "gate_up", "down"))
        attended = linear(mix(linear(normed, qkv), layer), o)
        normed, stream = add_rms_norm(attended, stream, weights.norms[2 * layer + 1], EPS)
        inner = silu_mul(linear(normed, gate_up))
        normed, stream = add_rms_norm(linear(inner, down), stream, weights.norms[2 * layer + 2], EPS)
    return linear(normed, weights.head)


def separate_in_place(weights: Weights, x: Tensor, linear: AddingLinear, mix: Mix) -> Tensor:
    """The same, with linear layers that add to the stream."""

    def plain(x: Tensor, weight: Tensor) -> Tensor:
        return linear(x, weight, None, None, None)

    stream = x.clone()
    for layer in range(weights.layers):
        qkv, o, gate_up, down = (weights.linears[name][layer] for name in ("qkv", "o", "gate_up", "down"))
        normed = rms_norm(stream, weights.norms[2 * layer], EPS)
        linear(mix(plain(normed, qkv), layer), o, None, stream, stream)
        normed = rms_norm(stream, weights.norms[2 * layer + 1], EPS)
        linear(silu_mul(plain(normed, gate_up)), down, None, stream, stream)
    return plain(rms_norm(stream, weights.norms[-1], EPS), weights.head)


def fused(weights: Weights, x: Tensor, mix: Mix) -> Tensor:
    """The same in the kernels of the linear layers."""
    stream, norm = x, delayed_norm(x, weights.norms[0], EPS)
    for layer in range(weights.layers):
        qkv, o, gate_up, down = (weights.linears[name][layer] for name in ("qkv", "o", "gate_up", "down"))
        attended = mix(normed_linear(norm, qkv), layer)
        stream, norm = linear_add(attended, o, stream, weights.norms[2 * layer + 1], EPS)
        inner = normed_linear_silu_mul(norm, gate_up)
        stream, norm = linear_add(inner, down, stream, weights.norms[2 * layer + 2], EPS)
    return normed_linear(norm, weights.head)


def reference(weights: Weights, x: Tensor, mix: Mix) -> Tensor:
    """The step in float64."""
    stream = x.double()
    weights = weights.double()
    for layer in range(weights.layers):
        qkv, o, gate_up, down = (weights.linears[name][layer] for name in ("qkv", "o", "gate_up", "down"))
        normed = F.rms_norm(stream, stream.shape[1:], weights.norms[2 * layer], EPS)
        stream = stream + mix(normed @ qkv.t(), layer) @ o.t()
        normed = F.rms_norm(stream, stream.shape[1:], weights.norms[2 * layer + 1], EPS)
        gate, up = (normed @ gate_up.t()).chunk(2, dim=1)
        stream = stream + (F.silu(gate) * up) @ down.t()
    return F.rms_norm(stream, stream.shape[1:], weights.norms[-1], EPS) @ weights.head.t()


def queries_only(qkv: Tensor, layer: int, hidden: int) -> Tensor:
    """No attention: the queries in its place."""
    return qkv[:, :hidden]


@dataclass(frozen=True, slots=True)
class Attention:
    """Rotary embedding, KV write and decode attention: of every row the newest token of a sequence as long as the
    others."""

    sizes: Sizes
    kv: list[KvLayer]
    cos: Tensor
    sin: Tensor
    rows: Tensor
    base_rows: Tensor
    slots: Tensor
    lengths: Tensor
    tokens: int
    work: DecodeWork | None

    def __call__(self, qkv: Tensor, layer: int) -> Tensor:
        """[M, (Hq + 2 · Hk) · D] to [M, Hq · D]."""
        heads, kv_heads, dim = self.sizes.heads, self.sizes.kv_heads, self.sizes.head_dim
        q, k, v = qkv.view(len(qkv), -1, dim).split((heads, kv_heads, kv_heads), 1)
        kv = self.kv[layer]
        q = rotary_kv_write(q, k, v, self.cos, self.sin, kv, self.rows, self.rows)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        ragged_decode_attention(
            q, kv, self.base_rows, self.slots, self.lengths, self.tokens, dim**-0.5, work=self.work, out=out
        )
        return out.view(len(qkv), -1)

    def scheduled(self, schedule: DecodeSchedule | None) -> "Attention":
        """The same attention, its work shared out for this schedule, the default one for None."""
        sizes, dtype = self.sizes, self.kv[0].payload.dtype
        shape = (len(self.lengths), sizes.heads, sizes.kv_heads, sizes.head_dim)
        workspace = DecodeWorkspace(self.lengths.device, *shape, 1, NO_QUANT, dtype, schedule)
        return replace(self, work=workspace.plan(self.lengths, None, 1))


def random_attention(sizes: Sizes, batch: int, tokens: int, device: str, dtype: torch.dtype) -> Attention:
    """A memory of random keys and values, `tokens` of each sequence and layer."""
    room = -(-tokens // GRANULE_TOKENS) * GRANULE_TOKENS
    stored = (batch * room, sizes.layers, sizes.kv_heads, 2, sizes.head_dim)
    memory = torch.empty(stored, dtype=dtype, device=device).normal_()
    kv = [KvLayer(memory[:, layer].transpose(1, 2), NO_QUANT, GRANULE_TOKENS) for layer in range(sizes.layers)]
    base_rows = torch.arange(batch, device=device) * room
    lengths = torch.full((batch,), tokens, device=device)
    positions = lengths - 1
    frequencies = 5e5 ** -(torch.arange(0, sizes.head_dim, 2, device=device) / sizes.head_dim)
    cos, sin = rotary_tables(positions, frequencies, 1.0)
    slots = torch.arange(batch, device=device)
    attention = Attention(sizes, kv, cos, sin, base_rows + positions, base_rows, slots, lengths, tokens, None)
    return attention.scheduled(None) if device == "cuda" else attention
