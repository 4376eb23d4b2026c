"""`ModelSpec`: config.json and generation_config.json as checked values; everything the runtime knows of a model."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bladellm_runtime.fields import Fields
from bladellm_runtime.layers.rotary import RopeSpec
from bladellm_runtime.models.family import Family, read_flag, read_windows
from bladellm_runtime.models.folder import file_in, read_json, vocab_size_of
from bladellm_runtime.models.registry import find_family
from bladellm_runtime.models.rope import MAX_POSITIONS, longest_sequence, read_rope
from bladellm_runtime.quantization.format import CheckpointFormat
from bladellm_runtime.quantization.registry import read_quantization

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
GENERATION_BOUNDS: dict[str, tuple[float, float]] = {
    "temperature": (0.0, 100.0),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (1e-3, 100.0),
}


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Shapes and options of a decoder.

    `windows` holds each layer's sliding window in tokens (None: full attention). `max_position_embeddings` is the
    longest sequence, counting rope scaling. `dtype` is the checkpoint's. `eos_token_ids` are those of
    generation_config.json and config.json together. `quantization`: how linear layers are stored, None for plain ones.
    """

    architecture: str
    hidden_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    max_position_embeddings: int
    rms_norm_eps: float
    activation: str
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    tie_word_embeddings: bool
    rope: RopeSpec
    windows: tuple[int | None, ...]
    dtype: torch.dtype
    eos_token_ids: tuple[int, ...]
    quantization: CheckpointFormat | None = None


def read_model_spec(folder: Path) -> ModelSpec:
    """Read and check a model folder's config. Raises `CheckpointError` naming the file and the field."""
    file = file_in(folder, "config.json")
    config = Fields(file, read_json(file))
    family = find_family(config)
    heads, kv_heads, head_dim = _read_heads(config, family)
    layers = config.integer("num_hidden_layers", 1, 1024)
    vocab_size = vocab_size_of(config)
    positions = config.integer("max_position_embeddings", 1, MAX_POSITIONS)
    rope = read_rope(config, head_dim, positions)
    return ModelSpec(
        architecture=family.architecture,
        hidden_size=config.integer("hidden_size", 1, 2**17),
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=config.integer("intermediate_size", 1, 2**20),
        vocab_size=vocab_size,
        max_position_embeddings=longest_sequence(rope, positions),
        rms_norm_eps=config.number("rms_norm_eps", 0.0, 1.0, default=1e-6),
        activation=_read_activation(config),
        qkv_bias=read_flag(config, family.qkv_bias),
        output_bias=read_flag(config, family.output_bias),
        mlp_bias=read_flag(config, family.mlp_bias),
        qk_norm=family.qk_norm,
        tie_word_embeddings=config.boolean("tie_word_embeddings", default=False),
        rope=rope,
        windows=read_windows(config, family.windows, layers),
        dtype=_read_dtype(config),
        eos_token_ids=_read_eos_token_ids(folder, config, vocab_size),
        quantization=_read_quantization(config),
    )


def read_generation_defaults(folder: Path) -> dict[str, float | int]:
    """The sampling defaults of generation_config.json: those of temperature, top_k, top_p, min_p and
    repetition_penalty it sets. Raises `CheckpointError` naming the field."""
    fields = _read_generation_config(folder)
    defaults: dict[str, float | int] = {}
    for name, (low, high) in GENERATION_BOUNDS.items():
        if fields.has(name):
            defaults[name] = fields.number(name, low, high)
    if fields.has("top_k"):
        defaults["top_k"] = fields.integer("top_k", 0, 2**22)
    return defaults


def _read_heads(config: Fields, family: Family) -> tuple[int, int, int]:
    heads = config.integer("num_attention_heads", 1, 1024)
    kv_heads = config.integer("num_key_value_heads", 1, 1024, default=heads)
    if heads % kv_heads:
        raise config.error("num_key_value_heads", f"{kv_heads} does not divide num_attention_heads {heads}")
    hidden_size = config.integer("hidden_size", 1, 2**17)
    if not config.has("head_dim") and family.head_dim is None and hidden_size % heads:
        raise config.error("num_attention_heads", f"{heads} does not divide hidden_size {hidden_size}")
    head_dim = config.integer("head_dim", 4, 1024, default=family.head_dim or hidden_size // heads)
    if head_dim % 2:
        raise config.error("head_dim", f"must be even, got {head_dim}")
    return heads, kv_heads, head_dim


def _read_activation(config: Fields) -> str:
    activation = config.text("hidden_act", default="silu")
    if activation not in ("silu", "swish"):
        raise config.error("hidden_act", f"{activation!r:.60} is not supported; it must be silu")
    return "silu"


def _read_dtype(config: Fields) -> torch.dtype:
    name = "dtype" if config.has("dtype") else "torch_dtype"
    value = config.text(name, default="float32").removeprefix("torch.")
    if value not in DTYPES:
        raise config.error(name, f"{value!r:.60} is not supported; it must be one of {', '.join(DTYPES)}")
    return DTYPES[value]


def _read_quantization(config: Fields) -> CheckpointFormat | None:
    name = "quantization_config"
    return read_quantization(config.nested(name)) if config.has(name) else None


def _read_generation_config(folder: Path) -> Fields:
    name = "generation_config.json"
    values = read_json(file_in(folder, name)) if (folder / name).exists() else {}
    return Fields(folder / name, values)


def _read_eos_token_ids(folder: Path, config: Fields, vocab_size: int) -> tuple[int, ...]:
    """Ids that end a sequence, generation_config.json's first, each once."""
    ids: dict[int, None] = {}
    for fields in (_read_generation_config(folder), config):
        value: Any = fields.values.get("eos_token_id")
        for token in value if isinstance(value, list) else [] if value is None else [value]:
            if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocab_size:
                raise fields.error("eos_token_id", f"must be ids below vocab_size {vocab_size}, got {value!r:.60}")
            ids[token] = None
    return tuple(ids)
