"""Which tensors a checkpoint must hold, and how they are packed into the decoder's fused parameters."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from bladellm_runtime.models.config import ModelSpec
from bladellm_runtime.models.cut import Cut

HARMLESS_SUFFIXES = ("rotary_emb.inv_freq",)
"""Tensors older checkpoints carry although they follow from the config."""


@dataclass(frozen=True, slots=True)
class Part:
    """A checkpoint tensor: its key, the shape config.json gives it, and the fields that shape comes from.

    `module`: the linear layer, by its name in the checkpoint, whose weight [out, in] this is; None for other tensors.
    `rows` and `columns`: what a tensor-parallel rank holds of its dimensions; None for all. `whole`: the shape in the
    whole model, where the checkpoint has the rank's share alone and `shape` is that.
    """

    key: str
    shape: tuple[int, ...]
    fields: str
    module: str | None = None
    rows: Cut | None = None
    columns: Cut | None = None
    whole: tuple[int, ...] | None = None

    @property
    def is_cut(self) -> bool:
        return self.rows is not None or self.columns is not None

    @property
    def held(self) -> tuple[int, ...]:
        """The shape of what is held of it."""
        rows = self.shape[0] if self.rows is None else self.rows.size
        return (rows, *self.shape[1:]) if self.columns is None else (rows, self.columns.size)

    def take(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copy what is held of the tensor to `target`, cast on the way. At most one dimension is cut."""
        if self.columns is not None:
            self.columns.copy(source, target, 1)
        elif self.rows is not None:
            self.rows.copy(source, target, 0)
        else:
            target.copy_(source)


WeightTable = dict[str, tuple[Part, ...]]
"""The decoder's parameters by name; each is its parts one below the other (concatenated on dimension 0)."""


def weight_table(spec: ModelSpec) -> WeightTable:
    """Every parameter of the decoder. Keys are those of the Llama layout, which all families here share."""
    table: WeightTable = {
        "embedding.weight": (_embedding("model.embed_tokens.weight", spec),),
        "norm.weight": (Part("model.norm.weight", (spec.hidden_size,), "hidden_size"),),
    }
    if not spec.tie_word_embeddings:
        table["head.weight"] = (_embedding("lm_head.weight", spec, "lm_head"),)
    for layer in range(spec.layers):
        table |= _layer_table(spec, layer)
    return table


def is_harmless(key: str, spec: ModelSpec) -> bool:
    """Whether a tensor the table does not name may be there all the same."""
    return key.endswith(HARMLESS_SUFFIXES) or (spec.tie_word_embeddings and key == "lm_head.weight")


def parameter_shape(parts: Sequence[Part]) -> tuple[int, ...]:
    """The shape of a fused parameter."""
    return (sum(part.held[0] for part in parts), *parts[0].held[1:])


def _embedding(key: str, spec: ModelSpec, module: str | None = None) -> Part:
    return Part(key, (spec.vocab_size, spec.hidden_size), "vocab_size, hidden_size", module)


def _layer_table(spec: ModelSpec, layer: int) -> WeightTable:
    source, own = f"model.layers.{layer}.", f"layers.{layer}."
    hidden, inner = (spec.hidden_size, "hidden_size"), (spec.intermediate_size, "intermediate_size")
    queries = (spec.heads * spec.head_dim, "num_attention_heads × head_dim")
    keys = (spec.kv_heads * spec.head_dim, "num_key_value_heads × head_dim")
    table: WeightTable = {}

    def linear(name: str, parts: tuple[tuple[str, tuple[int, str]], ...], width: tuple[int, str], bias: bool) -> None:
        table[f"{own}{name}.weight"] = tuple(
            Part(f"{source}{key}.weight", (rows[0], width[0]), f"{rows[1]}, {width[1]}", f"{source}{key}")
            for key, rows in parts
        )
        if bias:
            table[f"{own}{name}.bias"] = tuple(Part(f"{source}{key}.bias", (rows[0],), rows[1]) for key, rows in parts)

    def norm(name: str, key: str, size: tuple[int, str]) -> None:
        table[f"{own}{name}.weight"] = (Part(f"{source}{key}.weight", (size[0],), size[1]),)

    qkv = (("self_attn.q_proj", queries), ("self_attn.k_proj", keys), ("self_attn.v_proj", keys))
    linear("qkv", qkv, hidden, spec.qkv_bias)
    linear("output", (("self_attn.o_proj", hidden),), queries, spec.output_bias)
    linear("gate_up", (("mlp.gate_proj", inner), ("mlp.up_proj", inner)), hidden, spec.mlp_bias)
    linear("down", (("mlp.down_proj", hidden),), inner, spec.mlp_bias)
    norm("input_norm", "input_layernorm", hidden)
    norm("mlp_norm", "post_attention_layernorm", hidden)
    if spec.qk_norm:
        norm("q_norm", "self_attn.q_norm", (spec.head_dim, "head_dim"))
        norm("k_norm", "self_attn.k_norm", (spec.head_dim, "head_dim"))
    return table
