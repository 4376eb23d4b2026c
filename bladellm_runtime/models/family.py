"""What a model family is: a description of how it differs from a plain Llama decoder."""

from dataclasses import dataclass
from typing import Literal

from bladellm_runtime.fields import Fields

WindowRule = Literal["never", "every_layer", "by_layer"]
DEFAULT_WINDOW = 4096
DEFAULT_MAX_WINDOW_LAYERS = 28


@dataclass(frozen=True, slots=True)
class Family:
    """One architecture of config.json. A bias is there, is not, or is what the named config field says.

    `head_dim` is used when the config gives none; None stands for hidden_size / num_attention_heads.
    """

    architecture: str
    model_type: str
    qkv_bias: bool | str = False
    output_bias: bool | str = False
    mlp_bias: bool | str = False
    qk_norm: bool = False
    head_dim: int | None = None
    windows: WindowRule = "never"


def read_flag(fields: Fields, rule: bool | str) -> bool:
    """What a bias rule of a family comes to in this config."""
    return rule if isinstance(rule, bool) else fields.boolean(rule, default=False)


def read_windows(fields: Fields, rule: WindowRule, layers: int) -> tuple[int | None, ...]:
    """The sliding window of each layer in tokens, None for full attention.

    Raises `CheckpointError` naming the field when the config asks for a window its family does not have.
    """
    asked = _read_layer_types(fields, layers)
    window = _read_window(fields, rule)
    if asked is None:
        first = _first_sliding_layer(fields, rule, layers)
        return tuple(window if layer >= first else None for layer in range(layers))
    if window is None and any(asked):
        raise fields.error("layer_types", "asks for sliding_attention, but no sliding_window is in use")
    if rule == "every_layer" and window is not None and not all(asked):
        raise fields.error("layer_types", "mixes kinds of attention, which this architecture does not")
    return tuple(window if sliding else None for sliding in asked)


def _read_window(fields: Fields, rule: WindowRule) -> int | None:
    if rule == "never":
        if fields.has("sliding_window"):
            raise fields.error("sliding_window", "is set, but this architecture has none; remove it")
        return None
    if rule == "by_layer" and not fields.boolean("use_sliding_window", default=False):
        return None
    if "sliding_window" in fields.values and not fields.has("sliding_window"):
        return None
    return fields.integer("sliding_window", 1, 2**31, default=DEFAULT_WINDOW)


def _first_sliding_layer(fields: Fields, rule: WindowRule, layers: int) -> int:
    if rule == "by_layer":
        return fields.integer("max_window_layers", 0, 2**31, default=DEFAULT_MAX_WINDOW_LAYERS)
    return 0 if rule == "every_layer" else layers


def _read_layer_types(fields: Fields, layers: int) -> list[bool] | None:
    """For each layer whether its attention slides; None when the config does not say."""
    types = fields.values.get("layer_types")
    if types is None:
        return None
    known = ("full_attention", "sliding_attention")
    if not isinstance(types, list) or len(types) != layers or any(item not in known for item in types):
        raise fields.error("layer_types", f"must list {' or '.join(known)} for each of the {layers} layers")
    return [item == "sliding_attention" for item in types]
