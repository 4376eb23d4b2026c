"""The rotary part of config.json, in transformers' old form (`rope_scaling`, `type`) and new (`rope_parameters`)."""

import dataclasses
import typing

from bladellm_runtime.fields import Fields
from bladellm_runtime.layers.rotary import RopeSpec, RopeType, yarn_attention_factor

MAX_POSITIONS = 2**27
MAX_FACTOR = 4096.0


def read_rope(config: Fields, head_dim: int, max_positions: int) -> RopeSpec:
    """The rotary description. Raises `CheckpointError` naming the field for a type or value that cannot be used."""
    section = config.nested("rope_scaling" if config.values.get("rope_scaling") else "rope_parameters")
    for name, value in section.values.items():
        if isinstance(value, dict):
            raise section.error(name, "is a rotation of its own for some layers, which is not supported")
    rope_type = _read_type(section)
    for fields in (config, section):
        if fields.number("partial_rotary_factor", 0.0, 1.0, default=1.0) != 1.0:
            raise fields.error("partial_rotary_factor", "below 1 is not supported by these architectures")
    theta = config.number("rope_theta", 2.0, 1e12, default=10_000.0)
    plain = RopeSpec(head_dim, rope_type, section.number("rope_theta", 2.0, 1e12, default=theta))
    if rope_type == "default":
        return plain
    original = _read_original_positions(config, section, max_positions, rope_type)
    if rope_type == "yarn":
        return _read_yarn(section, plain, original, max_positions)
    scaled = dataclasses.replace(plain, factor=section.number("factor", 1.0, MAX_FACTOR), original_positions=original)
    return _read_llama3(section, scaled) if rope_type == "llama3" else scaled


def longest_sequence(rope: RopeSpec, max_positions: int) -> int:
    """Tokens a sequence may have, rope scaling included where `max_position_embeddings` does not count it yet."""
    if rope.type in ("dynamic", "yarn"):
        return max(max_positions, min(int(rope.original_positions * rope.factor), MAX_POSITIONS))
    return max_positions


def _read_type(section: Fields) -> RopeType:
    known = typing.get_args(RopeType)
    name = "rope_type" if section.has("rope_type") else "type"
    value = section.text(name, default="default")
    for rope_type in known:
        if value == rope_type:
            return typing.cast(RopeType, rope_type)
    raise section.error(name, f"{value!r:.60} is not supported; it must be one of {', '.join(known)}")


def _read_original_positions(config: Fields, section: Fields, max_positions: int, rope_type: RopeType) -> int:
    """The context before scaling. As in transformers, a field outside the rotary section comes first, and dynamic
    scaling always starts from `max_position_embeddings`."""
    name = "original_max_position_embeddings"
    if rope_type == "dynamic":
        return max_positions
    return (config if config.has(name) else section).integer(name, 1, MAX_POSITIONS, default=max_positions)


def _read_llama3(section: Fields, scaled: RopeSpec) -> RopeSpec:
    low = section.number("low_freq_factor", 1e-3, 1e6)
    high = section.number("high_freq_factor", 1e-3, 1e6)
    if high <= low:
        raise section.error("high_freq_factor", f"must be above low_freq_factor {low:g}, got {high:g}")
    return dataclasses.replace(scaled, low_freq_factor=low, high_freq_factor=high)


def _read_yarn(section: Fields, plain: RopeSpec, original: int, max_positions: int) -> RopeSpec:
    factor = section.number("factor", 1.0, MAX_FACTOR, default=max_positions / original)
    mscale = section.number("mscale", 0.0, 100.0, default=0.0)
    mscale_all = section.number("mscale_all_dim", 0.0, 100.0, default=0.0)
    return dataclasses.replace(
        plain,
        factor=factor,
        original_positions=original,
        beta_fast=section.number("beta_fast", 0.0, 1e6, default=0.0) or 32.0,
        beta_slow=section.number("beta_slow", 0.0, 1e6, default=0.0) or 1.0,
        attention_factor=section.number(
            "attention_factor", 1e-3, 1e3, default=yarn_attention_factor(factor, mscale, mscale_all)
        ),
        truncate=section.boolean("truncate", default=True),
    )
