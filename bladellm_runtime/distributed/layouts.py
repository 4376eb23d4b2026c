"""How families of models name and arrange their tensors, as data: what is cut, along which axis, and in which order.

A family that is served has to be here; Bloom, ChatGLM and OPT, which are not, can be split all the same.
"""

from dataclasses import dataclass, field
from typing import Literal

from bladellm_runtime.distributed.plan import ModelShape, RankCut
from bladellm_runtime.fields import Fields

Axis = Literal["queries", "kv", "qkv", "mlp", "vocab"]
"""What a dimension runs over: the query heads, the KV heads, query, key and value of one head after the other (Bloom),
the MLP's inner channels, the vocabulary."""
Dimension = Literal["outputs", "inputs"]


@dataclass(frozen=True, slots=True)
class Rule:
    """The layer `module` is cut along `dimension`, which holds the `axes` one after the other."""

    module: str
    dimension: Dimension
    axes: tuple[Axis, ...]


@dataclass(frozen=True, slots=True)
class Layout:
    """A family's tensors.

    `names`: its architectures and model types. `prefixes`: what keys may begin with, of all but the `head`. `layers`:
    where the decoder layers are; `rules`: which of their layers are cut. `first`, `last`: modules besides embedding and
    head that only the first or last stage has. `counts`: names in config.json that differ from `COUNTS`, the first one
    there counts; `head_dim`: where config.json may leave it out. `needs`: a field that config.json must have.
    """

    name: str
    names: tuple[str, ...]
    prefixes: tuple[str, ...]
    layers: str
    rules: tuple[Rule, ...]
    embedding: str
    head: str
    first: tuple[str, ...] = ()
    last: tuple[str, ...] = ()
    counts: dict[str, tuple[str, ...]] = field(default_factory=dict)
    head_dim: int | None = None
    needs: str | None = None


COUNTS = {
    "layers": ("num_hidden_layers",),
    "heads": ("num_attention_heads",),
    "kv_heads": ("num_key_value_heads",),
    "head_dim": ("head_dim",),
    "hidden_size": ("hidden_size",),
    "intermediate_size": ("intermediate_size",),
    "vocab_size": ("vocab_size",),
}
"""Names in config.json of what `ModelShape` holds, as most families have them."""

ATTENTION = (
    Rule("self_attn.q_proj", "outputs", ("queries",)),
    Rule("self_attn.k_proj", "outputs", ("kv",)),
    Rule("self_attn.v_proj", "outputs", ("kv",)),
)
GATED = (
    *ATTENTION,
    Rule("self_attn.o_proj", "inputs", ("queries",)),
    Rule("mlp.gate_proj", "outputs", ("mlp",)),
    Rule("mlp.up_proj", "outputs", ("mlp",)),
    Rule("mlp.down_proj", "inputs", ("mlp",)),
)


def _gated(name: str, names: tuple[str, ...], head_dim: int | None = None) -> Layout:
    return Layout(
        name, names, ("",), "model.layers", GATED, "model.embed_tokens", "lm_head", last=("model.norm",),
        head_dim=head_dim,
    )  # fmt: skip


LAYOUTS = (
    _gated("llama", ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "llama", "mistral", "qwen2")),
    _gated("qwen3", ("Qwen3ForCausalLM", "qwen3"), head_dim=128),
    Layout(
        "bloom",
        ("BloomForCausalLM", "BloomModel", "bloom"),
        ("transformer.", ""),
        "h",
        (
            Rule("self_attention.query_key_value", "outputs", ("qkv",)),
            Rule("self_attention.dense", "inputs", ("queries",)),
            Rule("mlp.dense_h_to_4h", "outputs", ("mlp",)),
            Rule("mlp.dense_4h_to_h", "inputs", ("mlp",)),
        ),
        "word_embeddings",
        "lm_head",
        first=("word_embeddings_layernorm",),
        last=("ln_f",),
        counts={
            "layers": ("n_layer", "num_hidden_layers"),
            "heads": ("n_head", "num_attention_heads"),
            "hidden_size": ("hidden_size", "n_embed"),
        },
    ),
    Layout(
        "chatglm",
        ("ChatGLMModel", "ChatGLMForConditionalGeneration", "chatglm"),
        ("transformer.",),
        "encoder.layers",
        (
            Rule("self_attention.query_key_value", "outputs", ("queries", "kv", "kv")),
            Rule("self_attention.dense", "inputs", ("queries",)),
            Rule("mlp.dense_h_to_4h", "outputs", ("mlp", "mlp")),
            Rule("mlp.dense_4h_to_h", "inputs", ("mlp",)),
        ),
        "embedding.word_embeddings",
        "transformer.output_layer",
        last=("encoder.final_layernorm",),
        counts={
            "layers": ("num_layers",),
            "kv_heads": ("multi_query_group_num",),
            "head_dim": ("kv_channels",),
            "intermediate_size": ("ffn_hidden_size",),
            "vocab_size": ("padded_vocab_size", "vocab_size"),
        },
        needs="multi_query_group_num",
    ),
    Layout(
        "chatglm-6b",
        ("ChatGLMModel", "ChatGLMForConditionalGeneration", "chatglm"),
        ("transformer.", ""),
        "layers",
        (
            Rule("attention.query_key_value", "outputs", ("qkv",)),
            Rule("attention.dense", "inputs", ("queries",)),
            Rule("mlp.dense_h_to_4h", "outputs", ("mlp",)),
            Rule("mlp.dense_4h_to_h", "inputs", ("mlp",)),
        ),
        "word_embeddings",
        "lm_head",
        last=("final_layernorm",),
        counts={"layers": ("num_layers",), "intermediate_size": ("inner_hidden_size",)},
        needs="inner_hidden_size",
    ),
    Layout(
        "opt",
        ("OPTForCausalLM", "OPTModel", "opt"),
        ("model.decoder.", "decoder.", ""),
        "layers",
        (
            *ATTENTION,
            Rule("self_attn.out_proj", "inputs", ("queries",)),
            Rule("fc1", "outputs", ("mlp",)),
            Rule("fc2", "inputs", ("mlp",)),
        ),
        "embed_tokens",
        "lm_head",
        first=("embed_positions", "project_in"),
        last=("final_layer_norm", "project_out"),
        counts={"intermediate_size": ("ffn_dim",)},
    ),
)


def find_layout(config: Fields) -> Layout:
    """The layout of a config.json. Raises `CheckpointError` naming the families there are."""
    name = "architectures" if config.has("architectures") else "model_type"
    value = config.values.get(name)
    asked = value if isinstance(value, list) else [value]
    for layout in LAYOUTS:
        if len(asked) == 1 and asked[0] in layout.names and (layout.needs is None or config.has(layout.needs)):
            return layout
    known = ", ".join(layout.name for layout in LAYOUTS)
    raise config.error(name, f"{value!r:.80} cannot be split; use a model of a family with the layout of {known}")


def read_shape(layout: Layout, config: Fields, mlp_unit: int = 1) -> ModelShape:
    """The shape of a model. Raises `CheckpointError` naming file and field."""
    every = COUNTS | layout.counts
    names = {what: next(filter(config.has, options), options[0]) for what, options in every.items()}
    heads = config.integer(names["heads"], 1, 1024)
    kv_heads = config.integer(names["kv_heads"], 1, 1024, default=heads)
    hidden = config.integer(names["hidden_size"], 1, 2**17)
    if heads % kv_heads:
        raise config.error(names["kv_heads"], f"{kv_heads} does not divide {names['heads']} {heads}")
    return ModelShape(
        layers=config.integer(names["layers"], 1, 1024),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=config.integer(names["head_dim"], 1, 1024, default=layout.head_dim or hidden // heads),
        hidden_size=hidden,
        intermediate_size=config.integer(names["intermediate_size"], 1, 2**20, default=4 * hidden),
        vocab_size=config.integer(names["vocab_size"], 1, 2**22),
        mlp_unit=mlp_unit,
    )


def axis_size(axis: Axis, shape: ModelShape) -> int:
    """Elements along an axis of the whole model."""
    return {
        "queries": shape.heads * shape.head_dim,
        "kv": shape.kv_heads * shape.head_dim,
        "qkv": 3 * shape.heads * shape.head_dim,
        "mlp": shape.intermediate_size,
        "vocab": shape.vocab_size,
    }[axis]


def axis_range(axis: Axis, shape: ModelShape, rank: RankCut) -> range:
    """A rank's elements along an axis."""
    if axis in ("mlp", "vocab"):
        return rank.mlp if axis == "mlp" else rank.vocab
    heads, width = (rank.kv_heads if axis == "kv" else rank.queries), shape.head_dim * (3 if axis == "qkv" else 1)
    return range(heads.start * width, heads.stop * width)
