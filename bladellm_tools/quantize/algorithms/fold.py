"""Folding: dividing the inputs of linear layers by s without changing what the decoder layer computes.

For y = W·x, and x made channel by channel by a producer, y = (W·diag(s))·(diag(s)⁻¹·x): the producer's channel j is
divided by s_j, column j of W multiplied by it (SmoothQuant, arXiv 2211.10438, equation 3; AWQ, arXiv 2306.00978,
section 3.2). The producer is a norm's weight, or the rows of a linear layer whose output goes through nothing but
sums over tokens (v_proj, then attention) or products by channel (up_proj, then the gate).
"""

from dataclasses import dataclass

import torch

from bladellm_tools.quantize.algorithms.layer import LayerWeights, LinearGroup

VALUE = "self_attn.v_proj"


@dataclass(frozen=True, slots=True)
class Heads:
    """Heads of the attention: how many for queries, how many for keys and values, and their size."""

    query: int
    kv: int
    dim: int


def share_heads(scale: torch.Tensor, heads: Heads) -> torch.Tensor:
    """scale [query · dim] made equal for all query heads that read one KV head: their largest, [query · dim].

    Channel d of a KV head is a channel of every one of its query heads' outputs, so it can be divided only once.
    """
    return _largest(scale, heads).repeat_interleave(heads.query // heads.kv, dim=0).reshape(-1)


def can_fold(layer: LayerWeights, group: LinearGroup, heads: Heads) -> bool:
    """Whether the group's producer is there and makes exactly the channels that the members read."""
    producer = layer.get(f"{group.producer}.weight")
    if producer is None or any(f"{member}.weight" not in layer for member in group.members):
        return False
    columns = {layer[f"{member}.weight"].shape[1] for member in group.members}
    made = heads.query * heads.dim if group.producer == VALUE else producer.shape[0]
    valued = group.producer != VALUE or producer.shape[0] == heads.kv * heads.dim
    return columns == {made} and valued


def fold(
    layer: LayerWeights, group: LinearGroup, scale: torch.Tensor, heads: Heads
) -> tuple[LayerWeights, torch.Tensor]:
    """The layer with the group's inputs divided by scale [K], and the s that was really used, float32 [K].

    The result computes what `layer` does: a norm's weight is rounded to the type it is stored in first, and s taken
    from the rounded one (1 where the norm is 0 or its quotient cannot be stored). A linear producer becomes float32, to
    be rounded once, later. Members' weights become float32. `layer` is left as it is. `can_fold` must hold; query heads
    of one KV head share their largest s.
    """
    folded = dict(layer)
    if layer[f"{group.producer}.weight"].dim() == 1:
        exact = _fold_norm(folded, f"{group.producer}.weight", scale.float())
    else:
        exact = _fold_rows(folded, group.producer, scale.float(), heads)
    for member in group.members:
        folded[f"{member}.weight"] = folded[f"{member}.weight"].float() * exact
    return folded, exact


def _fold_norm(layer: LayerWeights, key: str, scale: torch.Tensor) -> torch.Tensor:
    """Divide a norm's weight in place of the old one; the s of its rounded quotient."""
    old = layer[key]
    new = (old.float() / scale).to(old.dtype)
    exact = old.float() / new.float()
    stored = torch.isfinite(exact) & (exact > 0)
    layer[key] = torch.where(stored, new, old)
    return torch.where(stored, exact, torch.ones_like(exact))


def _fold_rows(layer: LayerWeights, producer: str, scale: torch.Tensor, heads: Heads) -> torch.Tensor:
    """Divide the rows, and the bias, of a linear producer; s by input channel of the members."""
    rows = _largest(scale, heads).reshape(-1) if producer == VALUE else scale
    layer[f"{producer}.weight"] = layer[f"{producer}.weight"].float() / rows.unsqueeze(1)
    if f"{producer}.bias" in layer:
        layer[f"{producer}.bias"] = layer[f"{producer}.bias"].float() / rows
    return share_heads(scale, heads) if producer == VALUE else scale


def _largest(scale: torch.Tensor, heads: Heads) -> torch.Tensor:
    """The largest scale of each KV head's query heads, [kv, dim]."""
    return scale.view(heads.kv, heads.query // heads.kv, heads.dim).amax(1)
