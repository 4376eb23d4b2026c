"""Self-attention over RaggedAttention memory: project, turn, store, attend, project."""

from dataclasses import dataclass

import torch
from bladellm_kernels.kv_layer import KvLayer
from bladellm_kernels.listed_prefill_attention import listed_prefill_attention
from bladellm_kernels.prefill_sdpa import empty_queries
from bladellm_kernels.ragged_decode_attention import ragged_decode_attention
from bladellm_kernels.ragged_prefill_attention import ragged_prefill_attention
from bladellm_kernels.rotary_kv_write import HeadNorms, rotary_kv_write

from bladellm_runtime.layers.batch import ForwardBatch, WantedTokens
from bladellm_runtime.layers.linear import LinearLayer, added
from bladellm_runtime.layers.norm import RmsNorm


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Heads of one layer's attention, and the newest tokens it sees (`window`; all when None)."""

    heads: int
    kv_heads: int
    head_dim: int
    window: int | None

    @property
    def scale(self) -> float:
        """Factor of the scores."""
        return float(self.head_dim**-0.5)


class Attention:
    """Grouped-query attention of layer `layer`.

    `qkv` gives the query heads, then the key heads, then the value heads. `q_norm` and `k_norm`, where a family has
    them, normalise each head before the rotation.
    """

    def __init__(
        self,
        layer: int,
        shape: AttentionShape,
        qkv: LinearLayer,
        output: LinearLayer,
        q_norm: RmsNorm | None = None,
        k_norm: RmsNorm | None = None,
    ) -> None:
        self.layer = layer
        self.shape = shape
        self.qkv = qkv
        self.output = output
        self.norms: HeadNorms | None = None
        if q_norm is not None and k_norm is not None:
            self.norms = HeadNorms(q_norm.weight, k_norm.weight, q_norm.eps)

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor, batch: ForwardBatch, cos: torch.Tensor, sin: torch.Tensor
    ) -> torch.Tensor | None:
        """x [T, hidden] -> [T, hidden], or None where it was added to residual [T, hidden]. K and V are written to the
        arena; cos, sin: tables of the step's positions."""
        q, kv = self._store(x, batch, cos, sin)
        return added(self.output, self._attend(q, kv, batch).view(x.shape[0], -1), residual)

    def of_wanted(
        self, x: torch.Tensor, wanted: WantedTokens, batch: ForwardBatch, cos: torch.Tensor, sin: torch.Tensor
    ) -> torch.Tensor:
        """Of the wanted tokens alone, [R, hidden]; K and V of all tokens are written."""
        q, kv = self._store(x, batch, cos, sin)
        if not len(wanted.tokens):
            return x[:0]
        window = self.shape.window
        attended = ragged_decode_attention(
            q.index_select(0, wanted.tokens),
            kv,
            wanted.base_rows,
            wanted.slots,
            wanted.kv_lens,
            wanted.max_kv_len,
            self.shape.scale,
            window,
            work=None if batch.workspace is None else batch.workspace.plan(wanted.kv_lens, window, 1),
        )
        return self.output(attended.view(len(attended), -1))

    def _store(
        self, x: torch.Tensor, batch: ForwardBatch, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, KvLayer]:
        """x [T, hidden] -> the turned queries [T, Hq, D], and the layer that K and V have been written to."""
        heads, kv_heads = self.shape.heads, self.shape.kv_heads
        qkv = self.qkv(x).view(x.shape[0], heads + 2 * kv_heads, self.shape.head_dim)
        q, k, v = qkv.split((heads, kv_heads, kv_heads), 1)
        kv = batch.kv.layer(self.layer)
        wide = qkv.is_cuda and bool(batch.prefills)
        out = empty_queries((x.shape[0], heads, self.shape.head_dim), qkv.dtype, qkv.device) if wide else None
        q = rotary_kv_write(
            q, k, v, cos, sin, kv, batch.kv_rows, batch.granule_rows,
            norms=self.norms, rotate=batch.rotation, out=out,
        )  # fmt: skip
        return q, kv

    def _attend(self, q: torch.Tensor, kv: KvLayer, batch: ForwardBatch) -> torch.Tensor:
        """q [T, Hq, D] -> [T, Hq, D]: the decode rows in one call, the prefill chunks in another."""
        if not batch.num_decode:
            return self._attend_prefills(q, kv, batch, None)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        count = batch.num_decode
        ragged_decode_attention(
            q[:count],
            kv,
            batch.decode_base_rows,
            batch.decode_slots,
            batch.decode_kv_lens,
            batch.max_decode_kv_len,
            self.shape.scale,
            self.shape.window,
            work=batch.decode_work(self.shape.window),
            out=out[:count],
        )
        if batch.prefill_lists is not None:
            tiles = batch.prefill_lists[self.shape.window]
            listed_prefill_attention(q, kv, tiles, self.shape.scale, self.shape.window, out)
        elif batch.prefills:
            self._attend_prefills(q, kv, batch, out)
        return out

    def _attend_prefills(
        self, q: torch.Tensor, kv: KvLayer, batch: ForwardBatch, out: torch.Tensor | None
    ) -> torch.Tensor:
        scale, window = self.shape.scale, self.shape.window
        return ragged_prefill_attention(q, kv, batch.prefills, scale, window, out, batch.planned)
