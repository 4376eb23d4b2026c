"""The calibration forward of one decoder layer, for every family the runtime serves: whole windows, no KV cache."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from bladellm_kernels.rms_norm import rms_norm
from bladellm_kernels.rotary import rotary

from bladellm_runtime.layers.rotary import RotaryEmbedding
from bladellm_runtime.models.config import ModelSpec
from bladellm_tools.quantize.algorithms.layer import DOWN, GATE_UP, OUTPUT, QKV, LayerWeights

KEYS, VALUES = "keys", "values"
"""Names `Observe` gets besides those of the groups: what would go into a KV cache."""
Observe = Callable[[str, torch.Tensor], None]
"""Told a group's name and its input, [tokens, K]; `KEYS` (after the rotation) and `VALUES`, [tokens, kv_heads · D]."""
Tables = tuple[torch.Tensor, torch.Tensor]


def rotary_tables_of(spec: ModelSpec, tokens: int, device: torch.device) -> Tables:
    """(cos, sin) of the positions 0 to tokens - 1, float32 [tokens, 1, D]."""
    return RotaryEmbedding(spec.rope, device)(torch.arange(tokens, device=device))


def forward_layer(
    spec: ModelSpec, layer: int, weights: LayerWeights, x: torch.Tensor, tables: Tables, observe: Observe | None = None
) -> torch.Tensor:
    """The residual stream after decoder layer `layer`.

    x: [B, T, hidden], the residual stream before it, B windows at positions 0 to T - 1; weights: of x's type and
    device; tables: `rotary_tables_of` T tokens. Returns [B, T, hidden].
    """
    inner, residual = _until_down(spec, layer, weights, x, tables, observe)
    return residual + _linear(weights, "mlp.down_proj", inner)


def observe_layer(
    spec: ModelSpec, layer: int, weights: LayerWeights, x: torch.Tensor, tables: Tables, observe: Observe
) -> None:
    """`forward_layer` for what it shows to `observe` alone: the last projection, a quarter of the work, is left out."""
    _until_down(spec, layer, weights, x, tables, observe)


def _until_down(
    spec: ModelSpec, layer: int, weights: LayerWeights, x: torch.Tensor, tables: Tables, observe: Observe | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(the input of the down projection, the residual stream it is added to)."""
    normed = rms_norm(x, weights["input_layernorm.weight"], spec.rms_norm_eps)
    _show(observe, QKV.name, normed)
    attended = _attention(spec, layer, weights, normed, tables, observe)
    _show(observe, OUTPUT.name, attended)
    x = x + _linear(weights, "self_attn.o_proj", attended)
    normed = rms_norm(x, weights["post_attention_layernorm.weight"], spec.rms_norm_eps)
    _show(observe, GATE_UP.name, normed)
    inner = F.silu(_linear(weights, "mlp.gate_proj", normed)).mul_(_linear(weights, "mlp.up_proj", normed))
    _show(observe, DOWN.name, inner)
    return inner, x


def _attention(
    spec: ModelSpec, layer: int, weights: LayerWeights, x: torch.Tensor, tables: Tables, observe: Observe | None
) -> torch.Tensor:
    """[B, T, hidden] -> the input of the output projection, [B, T, heads · D]."""
    q, k, v = (
        _linear(weights, f"self_attn.{name}_proj", x).unflatten(-1, (-1, spec.head_dim)) for name in ("q", "k", "v")
    )
    if spec.qk_norm:
        q = rms_norm(q, weights["self_attn.q_norm.weight"], spec.rms_norm_eps)
        k = rms_norm(k, weights["self_attn.k_norm.weight"], spec.rms_norm_eps)
    q, k = rotary(q, *tables), rotary(k, *tables)
    _show(observe, KEYS, k.flatten(2))
    _show(observe, VALUES, v.flatten(2))
    out = _attend(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), spec.windows[layer])
    return out.transpose(1, 2).flatten(2)


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int | None) -> torch.Tensor:
    """Causal attention: q [B, heads, T, D], k and v [B, kv_heads, T, D] -> [B, heads, T, D]."""
    tokens = q.shape[2]
    if window is None or window >= tokens:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    # With a mask and shared key heads only the slowest implementation is left; repeated heads leave a better one.
    shared = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(shared, 1), v.repeat_interleave(shared, 1)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=_window_mask(tokens, window, q.device))


def _window_mask(tokens: int, window: int, device: torch.device) -> torch.Tensor:
    """Whether query i sees key j: the newest `window` keys up to its own. bool [tokens, tokens]."""
    seen = torch.ones(tokens, tokens, dtype=torch.bool, device=device).tril()
    return seen.triu(1 - window)


def _linear(weights: LayerWeights, module: str, x: torch.Tensor) -> torch.Tensor:
    return F.linear(x, weights[f"{module}.weight"], weights.get(f"{module}.bias"))


def _show(observe: Observe | None, name: str, x: torch.Tensor) -> None:
    if observe is not None:
        observe(name, x.flatten(0, 1))
