"""`Gptq`: linear layers stored as GPTQ does, by AutoGPTQ, GPTQModel and the many checkpoints made with them.

With N outputs, K inputs, G groups and b bits: qweight int32 [K·b/32, N], packed along K; qzeros int32 [G, N·b/32],
packed along N; scales fp16 [G, N]; g_idx int32 [K], the group of every input; weight = scale · (code − zero).
`checkpoint_format` gptq (v1) stores zero − 1, gptq_v2 the zero itself. Readers of v1 add 1 to what they unpack, so the
zero point 0 cannot be stored, and a stored 2^b − 1 means 2^b.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import torch

from bladellm_runtime.errors import CheckpointError, ConfigError
from bladellm_runtime.fields import Fields
from bladellm_runtime.quantization.checks import (
    FLOATS,
    INTEGERS,
    check_finite,
    check_groups,
    check_zeros_are,
    check_zeros_fit,
    read_group_size,
)
from bladellm_runtime.quantization.format import CheckpointFormat, StoredTensor
from bladellm_runtime.quantization.groups import g_idx_of, order_of, restore_columns, sort_columns
from bladellm_runtime.quantization.names import read_pattern, with_fused
from bladellm_runtime.quantization.packing import pack, unpack, words
from bladellm_runtime.quantization.scheme import Scheme
from bladellm_runtime.quantization.weight import QuantizedWeight


@dataclass(frozen=True, slots=True)
class Rule:
    """An entry of `dynamic`: modules whose name it matches from the start have `scheme`, or are plain (None)."""

    pattern: re.Pattern[str]
    scheme: Scheme | None


@dataclass(frozen=True)
class Gptq(CheckpointFormat):
    """`v1`: zero points are stored less one. `lm_head`: the output layer is quantized too. `modules`: name endings of
    the quantized layers, None for all. `values`: the `quantization_config`."""

    scheme: Scheme
    values: dict[str, Any] = field(hash=False)
    v1: bool = True
    scrambled: bool = False
    lm_head: bool = False
    modules: tuple[str, ...] | None = None
    rules: tuple[Rule, ...] = ()

    name = "gptq"
    lowest_zero = 1

    @classmethod
    def parse(cls, fields: Fields) -> Self:
        checkpoint_format = _read_checkpoint_format(fields)
        scheme = _read_scheme(fields, None)
        return cls(
            scheme,
            fields.values,
            v1=checkpoint_format == "gptq",
            scrambled=fields.boolean("desc_act", default=False),
            lm_head=fields.boolean("lm_head", default=False),
            modules=_read_modules(fields),
            rules=tuple(_read_rules(fields, scheme)),
        )

    @classmethod
    def refusal(cls, scheme: Scheme) -> str | None:
        if scheme.kind != "int" or scheme.activations != "none":
            return "gptq stores integer weights only, and keeps activations as they are"
        if scheme.bits not in (4, 8):
            return "gptq stores 4 or 8 bits here"
        return None

    @classmethod
    def plan(cls, scheme: Scheme, ignore: Sequence[str], *, kv_scales: bool = False, scrambled: bool = False) -> Self:
        if kv_scales:
            raise ConfigError("--kv_scales needs --format compressed-tensors: gptq has no place for them")
        if problem := cls.refusal(scheme):
            raise ConfigError(f"--format gptq cannot hold {scheme.name}: {problem}")
        ignored = [module for module in with_fused(ignore) if module != "lm_head"]
        patterns = [f"^{re.escape(module)}$" for module in ignored]
        lm_head = "lm_head" not in ignore
        values = _plan_config(scheme, scrambled, patterns, lm_head)
        rules = tuple(Rule(re.compile(pattern), None) for pattern in patterns)
        return cls(scheme, values, scrambled=scrambled, lm_head=lm_head, rules=rules)

    def config(self) -> dict[str, Any]:
        return self.values

    def scale_dtype(self, model_dtype: torch.dtype) -> torch.dtype:
        return torch.float16

    def scheme_of(self, module: str, keys: Collection[str]) -> Scheme | None:
        """Layers with a `weight` and no `qweight` are plain, whatever the config says."""
        rule = next((rule for rule in self.rules if rule.pattern.match(module)), None)
        scheme = self.scheme if rule is None else rule.scheme
        if f"{module}.qweight" in keys:
            return scheme or self.scheme
        if f"{module}.weight" in keys or not self._is_covered(module):
            return None
        return scheme

    def tensors(self, scheme: Scheme, rows: int, columns: int) -> tuple[StoredTensor, ...]:
        per_word = 32 // scheme.bits
        check_groups("qweight", scheme, columns)
        for count, what in ((rows, "outputs"), (columns, "inputs")):
            if count % per_word:
                raise CheckpointError(f"qweight has {count} {what}, not a multiple of {per_word}, which gptq needs")
        groups = scheme.groups(columns)
        scrambled = self.scrambled and scheme.group_size is not None
        return (
            StoredTensor("qweight", (words(columns, scheme.bits), rows), ("I32",)),
            StoredTensor("qzeros", (groups, words(rows, scheme.bits)), ("I32",), required=not scheme.symmetric),
            StoredTensor("scales", (groups, rows), FLOATS),
            StoredTensor("g_idx", (columns,), INTEGERS, required=scrambled),
        )

    def unpack(self, scheme: Scheme, rows: int, columns: int, tensors: Mapping[str, torch.Tensor]) -> QuantizedWeight:
        scales = check_finite("scales", tensors["scales"]).t().contiguous()
        zeros = self._unpack_zeros(scheme, rows, tensors)
        groups = scheme.groups(columns)
        order = order_of(tensors["g_idx"], groups) if "g_idx" in tensors else None
        codes = unpack(tensors["qweight"].t(), scheme.bits, 1, columns)
        return QuantizedWeight(scheme, sort_columns(codes, order), scales, zeros, order)

    def pack(self, weight: QuantizedWeight) -> dict[str, torch.Tensor]:
        bits, groups = weight.scheme.bits, weight.scales.shape[1]
        codes = restore_columns(weight.codes, weight.order)
        return {
            "qweight": pack(codes, bits, 1).t().contiguous(),
            "qzeros": pack(self._stored_zeros(weight), bits, 1),
            "scales": weight.scales.to(torch.float16).t().contiguous(),
            "g_idx": g_idx_of(weight.order, weight.columns, groups, codes.device),
        }

    def is_harmless(self, key: str) -> bool:
        """AutoGPTQ stored a bias, all 0, for layers that have none."""
        return key.endswith("_proj.bias")

    def _is_covered(self, module: str) -> bool:
        if module.rpartition(".")[2] == "lm_head":
            return self.lm_head
        return self.modules is None or any(f".{module}".endswith(f".{ending}") for ending in self.modules)

    def _unpack_zeros(self, scheme: Scheme, rows: int, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
        if "qzeros" not in tensors:
            return None
        stored = unpack(tensors["qzeros"], scheme.bits, 1, rows)
        if self.v1 and bool((stored == 255).any()):
            raise CheckpointError("qzeros has the zero point 256, which 8 bits cannot hold")
        zeros = (stored + 1 if self.v1 else stored).t().contiguous()
        if not scheme.symmetric:
            return zeros
        check_zeros_are("qzeros", zeros, scheme.middle, "sym true")
        return None

    def _stored_zeros(self, weight: QuantizedWeight) -> torch.Tensor:
        """Zero points [G, N] as they are stored, before packing."""
        zeros = weight.zeros
        if zeros is None:
            zeros = torch.full_like(weight.scales, weight.scheme.middle, dtype=torch.uint8)
        if self.v1 and bool((zeros == 0).any()):
            raise CheckpointError("qzeros cannot hold the zero point 0, since gptq stores it less one")
        return check_zeros_fit("qzeros", zeros - 1 if self.v1 else zeros, weight.scheme).t()


def _plan_config(scheme: Scheme, scrambled: bool, ignored: Sequence[str], lm_head: bool) -> dict[str, Any]:
    """`ignored` are regular expressions."""
    values: dict[str, Any] = {
        "quant_method": "gptq",
        "checkpoint_format": "gptq",
        "bits": scheme.bits,
        "group_size": -1 if scheme.group_size is None else scheme.group_size,
        "sym": scheme.symmetric,
        "desc_act": scrambled,
        "lm_head": lm_head,
        "pack_dtype": "int32",
    }
    if ignored:
        values["dynamic"] = {f"-:{pattern}": {} for pattern in ignored}
    return values


def _read_checkpoint_format(fields: Fields) -> str:
    name = "checkpoint_format" if fields.has("checkpoint_format") else "format"
    value = fields.text(name, default="gptq").lower()
    if value not in ("gptq", "gptq_v2"):
        raise fields.error(name, f"{value!r:.60} is not supported; it must be gptq or gptq_v2")
    if fields.boolean("is_marlin_format", default=False):
        raise fields.error("is_marlin_format", "is true, which is not supported; convert the checkpoint to gptq")
    if fields.text("pack_dtype", default="int32") != "int32":
        raise fields.error("pack_dtype", f"{fields.values['pack_dtype']!r:.60} is not supported; it must be int32")
    return value


def _read_scheme(fields: Fields, base: Scheme | None) -> Scheme:
    """bits, group_size and sym; what is missing is taken from `base`."""
    bits = fields.integer("bits", 1, 16, default=None if base is None else base.bits)
    if bits not in (4, 8):
        raise fields.error("bits", f"{bits} is not supported; it must be 4 or 8")
    group_size = read_group_size(fields, "group_size", None if base is None else base.group_size or -1)
    symmetric = fields.boolean("sym", default=True if base is None else base.symmetric)
    return Scheme(bits, "int", group_size, symmetric)


def _read_rules(fields: Fields, base: Scheme) -> list[Rule]:
    """`dynamic`: `-:expression` leaves modules plain, `+:expression` or the bare expression overrides fields."""
    rules = []
    dynamic = fields.nested("dynamic")
    for key in dynamic.values:
        pattern = read_pattern(fields, "dynamic", key.removeprefix("-:").removeprefix("+:"))
        scheme = None if key.startswith("-:") else _read_scheme(dynamic.nested(key), base)
        rules.append(Rule(pattern, scheme))
    return rules


def _read_modules(fields: Fields) -> tuple[str, ...] | None:
    """`modules_in_block_to_quantize`: a list of names, or of lists of names."""
    name = "modules_in_block_to_quantize"
    if not fields.has(name):
        return None
    values = fields.values[name]
    entries = values if isinstance(values, list) else [values]
    flat = [inner for entry in entries for inner in (entry if isinstance(entry, list) else [entry])]
    if not isinstance(values, list) or not all(isinstance(entry, str) for entry in flat):
        raise fields.error(name, f"must be a list of lists of names, got {values!r:.60}")
    return tuple(flat)
