"""The `config_groups` of compressed-tensors: read, checked, and written."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from bladellm_runtime.fields import Fields
from bladellm_runtime.quantization.checks import MAX_GROUP
from bladellm_runtime.quantization.names import NameList
from bladellm_runtime.quantization.scheme import Activations, Kind, Scheme

Packing = Literal["pack-quantized", "int-quantized", "float-quantized"]
GROUPED_INPUTS = ("group", "dynamic")
"""Values of `actorder` that come with a g_idx."""


@dataclass(frozen=True, slots=True)
class Storage:
    """How weights of a scheme are stored. `per_tensor`: one scale for the whole weight. `scrambled`: with a g_idx."""

    packing: Packing
    per_tensor: bool = False
    scrambled: bool = False


@dataclass(frozen=True, slots=True)
class ConfigGroup:
    """The linear layers that `targets` names have `scheme`, stored as `storage` says."""

    targets: NameList
    scheme: Scheme
    storage: Storage


def read_groups(fields: Fields) -> tuple[ConfigGroup, ...]:
    """Every group of `config_groups`. Raises `CheckpointError` for what cannot be run, by field."""
    groups = fields.nested("config_groups")
    if not groups.values:
        raise fields.error("config_groups", "must have at least one group")
    read = tuple(_read_group(groups.nested(name), fields) for name in groups.values)
    storages: dict[Scheme, Storage] = {}
    for group in read:
        if storages.setdefault(group.scheme, group.storage) != group.storage:
            raise fields.error("config_groups", "stores equal schemes in two ways, which is not supported")
    return read


def choose_packing(scheme: Scheme) -> Packing:
    """The packing compressed-tensors itself would choose for a scheme this engine runs."""
    if scheme.kind == "fp8":
        return "float-quantized"
    return "pack-quantized" if scheme.activations == "none" else "int-quantized"


def write_config(
    scheme: Scheme, packing: Packing, ignore: Sequence[str], kv_cache_scheme: dict[str, Any] | None
) -> dict[str, Any]:
    """A `quantization_config` with one group for all linear layers but those of `ignore`."""
    group = {
        "targets": ["Linear"],
        "format": packing,
        "weights": _write_weights(scheme),
        "input_activations": _write_activations(scheme),
        "output_activations": None,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": packing,
        "quantization_status": "compressed",
        "global_compression_ratio": None,
        "config_groups": {"group_0": group},
        "ignore": list(ignore),
        "kv_cache_scheme": kv_cache_scheme,
    }


def _write_weights(scheme: Scheme) -> dict[str, Any]:
    return {
        "num_bits": scheme.bits,
        "type": "float" if scheme.kind == "fp8" else "int",
        "symmetric": scheme.symmetric,
        "strategy": "channel" if scheme.group_size is None else "group",
        "group_size": scheme.group_size,
        "actorder": None,
        "dynamic": False,
    }


def _write_activations(scheme: Scheme) -> dict[str, Any] | None:
    if scheme.activations == "none":
        return None
    is_dynamic = scheme.activations == "dynamic"
    return {
        "num_bits": 8,
        "type": "float" if scheme.kind == "fp8" else "int",
        "symmetric": True,
        "strategy": "token" if is_dynamic else "tensor",
        "group_size": None,
        "dynamic": is_dynamic,
    }


def _read_group(group: Fields, whole: Fields) -> ConfigGroup:
    if not group.has("weights"):
        raise group.error("weights", "is missing; groups that quantize activations only are not supported")
    if group.has("output_activations"):
        raise group.error("output_activations", "is set, and quantized outputs are not supported")
    weights = group.nested("weights")
    kind, bits = _read_numbers(weights)
    group_size, per_tensor = _read_strategy(weights, kind)
    symmetric = weights.boolean("symmetric", default=True)
    if not symmetric and (kind == "fp8" or per_tensor):
        raise weights.error("symmetric", "must be true for fp8 and for strategy tensor, got false")
    scheme = Scheme(bits, kind, group_size, symmetric, _read_activations(group, kind))
    if scheme.activations != "none" and (bits != 8 or group_size is not None):
        raise group.error("input_activations", "is set, which needs 8-bit weights of strategy channel or tensor")
    packing = _read_packing(group if group.has("format") else whole, scheme)
    return ConfigGroup(_read_targets(group), scheme, Storage(packing, per_tensor, _read_scrambled(weights)))


def _read_targets(group: Fields) -> NameList:
    targets = NameList.read(group, "targets")
    for target in targets.exact:
        if target != "Linear" and "." not in target and target[:1].isupper():
            raise group.error("targets", f"names the class {target!r:.60}; only Linear layers can be quantized")
    return targets


def _read_numbers(weights: Fields) -> tuple[Kind, int]:
    kind = weights.text("type", default="int").lower()
    bits = weights.integer("num_bits", 1, 16, default=8)
    if (kind, bits) not in (("int", 4), ("int", 8), ("float", 8)):
        problem = f"{bits} of type {kind!r:.60} is not supported; int weights have 4 or 8 bits, float weights 8"
        raise weights.error("num_bits", problem)
    if weights.values.get("dynamic"):
        raise weights.error("dynamic", "must be false for weights")
    return ("fp8" if kind == "float" else "int"), bits


def _read_strategy(weights: Fields, kind: Kind) -> tuple[int | None, bool]:
    """(group size, whether the weight has one scale only)."""
    size = weights.integer("group_size", -1, MAX_GROUP, default=0)
    inferred = "group" if size > 0 else "channel" if size == -1 else "tensor"
    strategy = weights.text("strategy", default=inferred).lower()
    if strategy == "group" and size > 0 and kind == "int":
        return size, False
    if strategy in ("channel", "tensor") and size <= 0:
        return None, strategy == "tensor"
    allowed = "channel or tensor" if kind == "fp8" else "group with a positive group_size, channel or tensor"
    raise weights.error("strategy", f"{strategy!r:.60} is not supported; for these weights it must be {allowed}")


def _read_scrambled(weights: Fields) -> bool:
    """`actorder`; `weight` and `static` leave no trace in the checkpoint."""
    value: Any = weights.values.get("actorder")
    name = value.lower() if isinstance(value, str) else value
    if name not in (None, False, True, "weight", "static", *GROUPED_INPUTS):
        raise weights.error("actorder", f"must be group, weight or null, got {value!r:.60}")
    return name is True or name in GROUPED_INPUTS


def _read_activations(group: Fields, kind: Kind) -> Activations:
    """How inputs are rounded. One dynamic scale of the whole input is read as one a row, see `CompressedTensors`."""
    if not group.has("input_activations"):
        return "none"
    inputs = group.nested("input_activations")
    expected = "float" if kind == "fp8" else "int"
    if inputs.integer("num_bits", 1, 32, default=8) != 8:
        raise inputs.error("num_bits", f"{inputs.values['num_bits']} is not supported; it must be 8")
    if inputs.text("type", default="int").lower() != expected:
        raise inputs.error("type", f"must be {expected}, as the weights', got {inputs.values.get('type')!r:.60}")
    if not inputs.boolean("symmetric", default=True):
        raise inputs.error("symmetric", "is false; only symmetric activations are supported")
    dynamic = inputs.boolean("dynamic", default=False)
    strategy = inputs.text("strategy", default="tensor").lower()
    if strategy not in (("token", "tensor") if dynamic else ("tensor",)):
        allowed = "token or tensor where dynamic is true, tensor where it is false"
        raise inputs.error("strategy", f"{strategy!r:.60} is not supported; it must be {allowed}")
    return "dynamic" if dynamic else "static"


def _read_packing(owner: Fields, scheme: Scheme) -> Packing:
    """The `format` of a group, or of the whole config; where that says only mixed-precision, the library's choice."""
    chosen = choose_packing(scheme)
    value = owner.text("format", default="mixed-precision").lower()
    if value == "mixed-precision":
        return chosen
    naive: Packing = "float-quantized" if scheme.kind == "fp8" else "int-quantized"
    allowed = {chosen: chosen, naive: naive, "naive-quantized": naive}
    if scheme.bits == 4:
        allowed = {chosen: chosen}
    if value not in allowed:
        raise owner.error("format", f"{value!r:.60} is not supported for {scheme.name}; it must be {chosen}")
    return allowed[value]
