"""Self-attention over RaggedAttention memory: project, turn, store, attend, project."""

from dataclasses import dataclass

import torch
from bladellm_kernels.cascade_decode_attention import SharedPrefixes, cascade_decode_attention
from bladellm_kernels.kv_format import NO_QUANT
from bladellm_kernels.kv_layer import KvLayer
from bladellm_kernels.listed_prefill_attention import ListViews, listed_prefill_attention
from bladellm_kernels.one_pass_gate import attends_fresh
from bladellm_kernels.prefill_sdpa import empty_queries
from bladellm_kernels.ragged_decode_attention import ragged_decode_attention
from bladellm_kernels.ragged_prefill_attention import ragged_prefill_attention
from bladellm_kernels.rotary_kv_write import HeadNorms, rotary_kv_write

from bladellm_runtime.layers.batch import ForwardBatch, WantedTokens
from bladellm_runtime.layers.embedding import Embedding
from bladellm_runtime.layers.linear import LinearLayer
from bladellm_runtime.layers.lora import LoraState
from bladellm_runtime.layers.norm import RmsNorm
from bladellm_runtime.layers.residual import NormedStream, Stream


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
    them, normalise each head before the rotation. lora: that of the linear layers, where these add adapters. `known`:
    what `qkv` gives for every token id, of a first layer that has been given that; it is not asked then.
    """

    def __init__(
        self,
        layer: int,
        shape: AttentionShape,
        qkv: LinearLayer,
        output: LinearLayer,
        q_norm: RmsNorm | None = None,
        k_norm: RmsNorm | None = None,
        lora: LoraState | None = None,
    ) -> None:
        self.layer = layer
        self.shape = shape
        self.qkv = qkv
        self.output = output
        self.lora = lora
        self.known: Embedding | None = None
        self.norms: HeadNorms | None = None
        if q_norm is not None and k_norm is not None:
            self.norms = HeadNorms(q_norm.weight, k_norm.weight, q_norm.eps)

    def __call__(
        self, stream: Stream, batch: ForwardBatch, cos: torch.Tensor, sin: torch.Tensor, norm: RmsNorm
    ) -> Stream:
        """Reads the stream's norm and adds to it, writing K and V to the arena.

        cos, sin: tables of the step's positions. norm: of what reads the stream next.
        """
        kv = batch.kv.layer(self.layer)
        qkv = self._project(stream, batch)
        self._plan(batch)
        fresh = self._fresh(qkv, kv, batch)
        q = self._store(qkv, kv, batch, cos, sin, fresh is not None)
        return stream.add(self.output, self._attend(q, kv, batch, fresh).flatten(1), norm)

    def of_wanted(
        self,
        stream: NormedStream,
        wanted: WantedTokens,
        batch: ForwardBatch,
        cos: torch.Tensor,
        sin: torch.Tensor,
        norm: RmsNorm,
    ) -> NormedStream:
        """The same for the wanted tokens alone, [R, hidden]; K and V of all tokens are written."""
        kv = batch.kv.layer(self.layer)
        q = self._store(self._project(stream, batch), kv, batch, cos, sin)
        kept = stream.select(wanted.tokens)
        if not len(wanted.tokens):
            return kept
        if self.lora is not None:
            self.lora.select(wanted.tokens)
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
        return kept.add(self.output, attended.flatten(1), norm)

    def _project(self, stream: Stream, batch: ForwardBatch) -> torch.Tensor:
        """[T, (Hq + 2 · Hkv) · D]."""
        if self.known is None:
            return stream.linear(self.qkv)
        return self.known(batch.input_ids, batch.id_slots, batch.padded)

    def _plan(self, batch: ForwardBatch) -> None:
        """Have decode attention planned, which the first layer of a window does: beside its projection, where that has
        let the next kernel start."""
        if batch.num_decode and self._prefixes(batch) is None:
            batch.decode_work(self.shape.window)

    def _prefixes(self, batch: ForwardBatch) -> SharedPrefixes | None:
        """What decode rows share, where the layer reads that once."""
        return batch.prefixes if self.shape.window is None else None

    def _fresh(self, qkv: torch.Tensor, kv: KvLayer, batch: ForwardBatch) -> KvLayer | None:
        """Where the step's own keys and values will be, in qkv, if its chunks may be attended to on them."""
        lists = None if batch.prefill_lists is None else batch.prefill_lists[self.shape.window]
        wanted = bool(batch.prefills) if lists is None else lists.programs is not None and lists.blocks is None
        if not wanted or not attends_fresh(kv, qkv.dtype):
            return None
        heads = qkv.view(len(qkv), -1, self.shape.head_dim)
        return KvLayer(heads[:, self.shape.heads :].unflatten(1, (2, -1)), NO_QUANT, kv.granule_tokens)

    def _store(
        self,
        qkv: torch.Tensor,
        kv: KvLayer,
        batch: ForwardBatch,
        cos: torch.Tensor,
        sin: torch.Tensor,
        keep_keys: bool = False,
    ) -> torch.Tensor:
        """qkv [T, (Hq + 2 · Hkv) · D] -> turned queries [T, Hq, D], keys and values written; keep_keys: turned keys
        are left in qkv, too."""
        tokens, heads, kv_heads = len(qkv), self.shape.heads, self.shape.kv_heads
        q, k, v = qkv.view(tokens, -1, self.shape.head_dim).split((heads, kv_heads, kv_heads), 1)
        wide = qkv.is_cuda and bool(batch.prefills)
        out = empty_queries((tokens, heads, self.shape.head_dim), qkv.dtype, qkv.device) if wide else None
        return rotary_kv_write(
            q, k, v, cos, sin, kv, batch.kv_rows, batch.granule_rows,
            norms=self.norms, rotate=batch.rotation, out=out, keep_keys=keep_keys,
        )  # fmt: skip

    def _attend(self, q: torch.Tensor, kv: KvLayer, batch: ForwardBatch, fresh: KvLayer | None) -> torch.Tensor:
        """q [T, Hq, D] -> [T, Hq, D]: the decode rows in one call, the prefill chunks in another."""
        if not batch.num_decode:
            return self._attend_prefills(q, kv, batch, None, fresh)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if batch.attended is None else batch.attended
        lists = None if batch.prefill_lists is None else batch.prefill_lists[self.shape.window]
        if lists is None:
            self._attend_decodes(q, kv, batch, out)
            return self._attend_prefills(q, kv, batch, out, fresh) if batch.prefills else out
        # Prefill attention takes whole multiprocessors: only what starts behind it runs beside it.
        if batch.beside:
            self._attend_listed(q, kv, lists._replace(tiles=None), out, fresh)
            lists = lists._replace(programs=None)
        self._attend_decodes(q, kv, batch, out)
        self._attend_listed(q, kv, lists, out, fresh)
        return out

    def _attend_listed(
        self, q: torch.Tensor, kv: KvLayer, lists: ListViews, out: torch.Tensor, fresh: KvLayer | None
    ) -> None:
        listed_prefill_attention(q, kv, lists, self.shape.scale, self.shape.window, out, fresh)

    def _attend_decodes(self, q: torch.Tensor, kv: KvLayer, batch: ForwardBatch, out: torch.Tensor) -> None:
        q, out = q[: batch.num_decode], out[: batch.num_decode]
        rows = (batch.decode_base_rows, batch.decode_slots, batch.decode_kv_lens)
        scale, window, prefixes = self.shape.scale, self.shape.window, self._prefixes(batch)
        if prefixes is not None:
            cascade_decode_attention(q, kv, *rows, scale, prefixes, batch.cascade_work(prefixes), out)
            return
        work = batch.decode_work(window)
        longest, beside = batch.max_decode_kv_len, batch.beside
        ragged_decode_attention(q, kv, *rows, longest, scale, window, work=work, out=out, beside=beside)

    def _attend_prefills(
        self, q: torch.Tensor, kv: KvLayer, batch: ForwardBatch, out: torch.Tensor | None, fresh: KvLayer | None
    ) -> torch.Tensor:
        scale, window = self.shape.scale, self.shape.window
        return ragged_prefill_attention(q, kv, batch.prefills, scale, window, out, batch.planned, fresh)
