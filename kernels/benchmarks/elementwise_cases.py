"""What `elementwise.py` times: each operator's inputs, PyTorch's own way to the same result, and the reference."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F
from bladellm_kernels.embedding import embedding
from bladellm_kernels.kv_format import KV_FORMATS
from bladellm_kernels.kv_layer import KvLayer
from bladellm_kernels.rms_norm import (
    add_rms_norm,
    add_rms_norm_quant,
    add_rms_norm_reference,
    gather_add_rms_norm,
    rms_norm,
    rms_norm_reference,
)
from bladellm_kernels.rotary import rotary, rotary_reference, rotary_tables
from bladellm_kernels.rotary_kv_write import HeadNorms, rotary_kv_write
from bladellm_kernels.row_codes import row_codes
from bladellm_kernels.silu_mul import silu_mul, silu_mul_quant, silu_mul_reference
from bladellm_kernels.widen import widen
from torch import Tensor

EPS = 1e-5
HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
GRANULE = 64
DTYPE = torch.bfloat16

Results = tuple[Tensor, ...]


@dataclass(frozen=True, slots=True)
class Sizes:
    rows: int
    hidden: int
    intermediate: int
    vocab: int
    device: torch.device


@dataclass(frozen=True, slots=True)
class Operator:
    """ours, eager and reference take the tensors of `inputs`; `moved`: bytes read and written once each; tolerance: of
    errors beside the largest result.
    """

    name: str
    inputs: Callable[[Sizes], Sequence[Tensor]]
    ours: Callable[..., Results]
    eager: Callable[..., Results]
    reference: Callable[..., Results]
    moved: Callable[[Sizes], int]
    tolerance: float = 0.02
    most_rows: int = 1 << 30


def _random(sizes: Sizes, *shape: int) -> Tensor:
    return torch.randn(shape, device=sizes.device, dtype=DTYPE)


def _stream(sizes: Sizes) -> Sequence[Tensor]:
    """x, residual, weight, a result."""
    x, residual = (_random(sizes, sizes.rows, sizes.hidden) for _ in range(2))
    return x, residual, _random(sizes, sizes.hidden), torch.full_like(x, torch.nan)


def _gathered(sizes: Sizes) -> Sequence[Tensor]:
    return *_stream(sizes), torch.randperm(sizes.rows, device=sizes.device)


def _gate_up(sizes: Sizes) -> Sequence[Tensor]:
    out = torch.full((sizes.rows, sizes.intermediate), torch.nan, device=sizes.device, dtype=DTYPE)
    return _random(sizes, sizes.rows, 2 * sizes.intermediate), out


@cache
def _table(vocab: int, hidden: int, device: torch.device) -> Tensor:
    """One for all inputs: it is larger than any cache."""
    return torch.randn(vocab, hidden, device=device, dtype=DTYPE)


def _tokens(sizes: Sizes) -> Sequence[Tensor]:
    """ids by slot, table, slots, a result."""
    ids = torch.randint(0, sizes.vocab, (sizes.rows,), device=sizes.device)
    out = torch.full((sizes.rows, sizes.hidden), torch.nan, device=sizes.device, dtype=DTYPE)
    return ids, _table(sizes.vocab, sizes.hidden, sizes.device), torch.randperm(sizes.rows, device=sizes.device), out


def _logits(sizes: Sizes) -> Sequence[Tensor]:
    x = _random(sizes, sizes.rows, sizes.vocab)
    return x, torch.full(x.shape, torch.nan, device=sizes.device)


def _positions(sizes: Sizes) -> Sequence[Tensor]:
    frequencies = 500_000.0 ** -torch.linspace(0, 1, HEAD_DIM // 2, device=sizes.device)
    return torch.randint(0, 100_000, (sizes.rows,), device=sizes.device), frequencies


def _heads(sizes: Sizes) -> Sequence[Tensor]:
    """qkv, tables, payload, rows, weights of q and k, q's result."""
    qkv = _random(sizes, sizes.rows, HEADS + 2 * KV_HEADS, HEAD_DIM)
    cos, sin = rotary_tables(*_positions(sizes), 1.0)
    payload = torch.full((sizes.rows, KV_HEADS, 2, HEAD_DIM), torch.nan, device=sizes.device, dtype=DTYPE)
    rows = torch.randperm(sizes.rows, device=sizes.device)
    weights = _random(sizes, 2, HEAD_DIM)
    return qkv, cos, sin, payload.transpose(1, 2), rows, *weights, torch.full_like(qkv[:, :HEADS], torch.nan)


def _stored(normed: bool) -> Callable[..., Results]:
    def ours(qkv: Tensor, cos: Tensor, sin: Tensor, payload: Tensor, rows: Tensor, *rest: Tensor) -> Results:
        q, k, v = qkv.split((HEADS, KV_HEADS, KV_HEADS), 1)
        q_weight, k_weight, out = rest
        kv = KvLayer(payload, KV_FORMATS["no_quant"], GRANULE)
        norms = HeadNorms(q_weight, k_weight, EPS) if normed else None
        return rotary_kv_write(q, k, v, cos, sin, kv, rows, norms=norms, out=out), payload

    return ours


def _stored_by_parts(normed: bool) -> Callable[..., Results]:
    def eager(qkv: Tensor, cos: Tensor, sin: Tensor, payload: Tensor, rows: Tensor, *rest: Tensor) -> Results:
        q, k, v = qkv.split((HEADS, KV_HEADS, KV_HEADS), 1)
        if normed:
            q, k = (F.rms_norm(x, (HEAD_DIM,), weight, EPS) for x, weight in zip((q, k), rest[:2], strict=True))
        payload[:, 0].index_copy_(0, rows, rotary(k, cos, sin))
        payload[:, 1].index_copy_(0, rows, v)
        return rotary(q, cos, sin), payload

    return eager


def _stored_reference(normed: bool) -> Callable[..., Results]:
    def reference(qkv: Tensor, cos: Tensor, sin: Tensor, payload: Tensor, rows: Tensor, *rest: Tensor) -> Results:
        q, k, v = (x.float() for x in qkv.split((HEADS, KV_HEADS, KV_HEADS), 1))
        if normed:
            q, k = (rms_norm_reference(x, weight, EPS) for x, weight in zip((q, k), rest[:2], strict=True))
        angles = torch.atan2(sin[:, 0, HEAD_DIM // 2 :], cos[:, 0, HEAD_DIM // 2 :])
        ones = torch.ones(len(q), dtype=torch.int64, device=q.device)
        stored = torch.empty(payload.shape, device=q.device)
        stored[rows, 0], stored[rows, 1] = rotary_reference(k, ones, angles, 1.0), v
        return rotary_reference(q, ones, angles, 1.0), stored

    return reference


def _quantized_norm(code_type: torch.dtype) -> Callable[..., Results]:
    def ours(x: Tensor, residual: Tensor, weight: Tensor, out: Tensor) -> Results:
        return add_rms_norm_quant(x, residual, weight, EPS, code_type, total=out)

    return ours


def _quantized_norm_reference(code_type: torch.dtype, dtype: torch.dtype) -> Callable[..., Results]:
    def reference(x: Tensor, residual: Tensor, weight: Tensor, out: Tensor) -> Results:
        total = residual + x
        return *row_codes(rms_norm_reference(total, weight, EPS).to(dtype), code_type), total

    return reference


def _eager_tables(positions: Tensor, frequencies: Tensor) -> Results:
    angles = positions.unsqueeze(-1).float() * frequencies
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((cos, cos), -1).unsqueeze(1), torch.cat((-sin, sin), -1).unsqueeze(1)


def _eager_silu(gate_up: Tensor, out: Tensor) -> Results:
    gate, up = gate_up.chunk(2, dim=-1)
    return (torch.mul(F.silu(gate), up, out=out),)


def _eager_add(x: Tensor, residual: Tensor, weight: Tensor, out: Tensor) -> Results:
    total = torch.add(residual, x, out=out)
    return F.rms_norm(total, weight.shape, weight, EPS), total


def _eager_gather(x: Tensor, residual: Tensor, weight: Tensor, out: Tensor, index: Tensor) -> Results:
    total = x.index_select(0, index).add_(residual.index_select(0, index))
    return (F.rms_norm(total, weight.shape, weight, EPS),)


def _activations(times: float) -> Callable[[Sizes], int]:
    return lambda sizes: int(times * 2 * sizes.rows * sizes.hidden) + 2 * sizes.hidden


def _products(times: float) -> Callable[[Sizes], int]:
    return lambda sizes: int(times * 2 * sizes.rows * sizes.intermediate)


def _head_bytes(sizes: Sizes) -> int:
    return sizes.rows * HEAD_DIM * (2 * (2 * HEADS + 4 * KV_HEADS) + 8)


def _plain_operators() -> list[Operator]:
    return [
        Operator(
            "rms_norm", _stream, lambda x, r, w, out: (rms_norm(x, w, EPS, out=out),),
            lambda x, r, w, out: (F.rms_norm(x, w.shape, w, EPS),),
            lambda x, r, w, out: (rms_norm_reference(x, w, EPS),), _activations(2),
        ),
        Operator(
            "add_rms_norm", _stream, lambda x, r, w, out: add_rms_norm(x, r, w, EPS, total=out), _eager_add,
            lambda x, r, w, out: add_rms_norm_reference(x, r, w, EPS), _activations(4),
        ),
        Operator(
            "gather_add_rms_norm", _gathered,
            lambda x, r, w, out, index: (gather_add_rms_norm(x, r, index, w, EPS, out=out),), _eager_gather,
            lambda x, r, w, out, index: add_rms_norm_reference(x[index], r[index], w, EPS)[:1], _activations(3),
        ),
        Operator(
            "silu_mul", _gate_up, lambda gate_up, out: (silu_mul(gate_up, out=out),), _eager_silu,
            lambda gate_up, out: (silu_mul_reference(gate_up),), _products(3),
        ),
        Operator(
            "embedding", _tokens, lambda ids, w, slots, out: (embedding(ids, w, slots, out=out),),
            lambda ids, w, slots, out: (F.embedding(ids.index_select(0, slots), w),),
            lambda ids, w, slots, out: (w[ids[slots]],), _activations(2), most_rows=128256,
        ),
        Operator(
            "rotary_tables", _positions, lambda positions, f: rotary_tables(positions, f, 1.0), _eager_tables,
            _eager_tables, lambda sizes: sizes.rows * HEAD_DIM * 8,
        ),
        Operator(
            "widen", _logits, lambda x, out: (widen(x, out=out),), lambda x, out: (x.float(),),
            lambda x, out: (x.float(),), lambda sizes: 6 * sizes.rows * sizes.vocab, most_rows=1024,
        ),
    ]  # fmt: skip


def _quantized_operators(code_type: torch.dtype, name: str, step: float) -> list[Operator]:
    """step: half of the largest distance of two codes beside the largest code."""
    return [
        Operator(
            f"add_rms_norm_quant {name}", _stream, _quantized_norm(code_type),
            _quantized_norm_reference(code_type, DTYPE), _quantized_norm_reference(code_type, torch.float32),
            _activations(3.5), tolerance=step,
        ),
        Operator(
            f"silu_mul_quant {name}", _gate_up, lambda gate_up, out: silu_mul_quant(gate_up, code_type),
            lambda gate_up, out: row_codes(_eager_silu(gate_up, out)[0], code_type),
            lambda gate_up, out: row_codes(silu_mul_reference(gate_up), code_type), _products(2.5),
            tolerance=step,
        ),
    ]  # fmt: skip


def _head_operators() -> list[Operator]:
    return [
        Operator(
            "rotary_kv_write" + (" normed" if normed else ""), _heads, _stored(normed), _stored_by_parts(normed),
            _stored_reference(normed), _head_bytes,
        )
        for normed in (False, True)
    ]  # fmt: skip


_ALL = (
    *_plain_operators(),
    *_quantized_operators(torch.int8, "int8", 0.02),
    *_quantized_operators(torch.float8_e4m3fn, "fp8", 0.08),
    *_head_operators(),
)
OPERATORS = {operator.name: operator for operator in _ALL}
