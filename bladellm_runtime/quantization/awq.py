"""`Awq`: linear layers stored as AutoAWQ's GEMM version does.

With N outputs, K inputs and G groups of 4-bit codes: qweight int32 [K, N/8] and qzeros int32 [G, N/8], both packed
along N with the columns of a word in the order 0, 2, 4, 6, 1, 3, 5, 7; scales fp16 [G, N];
weight = scale · (code − zero).
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import torch

from bladellm_runtime.errors import CheckpointError, ConfigError
from bladellm_runtime.fields import Fields
from bladellm_runtime.quantization.checks import (
    FLOATS,
    check_finite,
    check_groups,
    check_zeros_are,
    check_zeros_fit,
    read_group_size,
)
from bladellm_runtime.quantization.format import CheckpointFormat, StoredTensor
from bladellm_runtime.quantization.names import read_names, with_fused
from bladellm_runtime.quantization.packing import pack_awq, unpack_awq
from bladellm_runtime.quantization.scheme import Scheme
from bladellm_runtime.quantization.weight import QuantizedWeight


@dataclass(frozen=True)
class Awq(CheckpointFormat):
    """`ignore`: a layer whose name has one of them anywhere in it is plain. `values`: the `quantization_config`."""

    scheme: Scheme
    values: dict[str, Any] = field(hash=False)
    ignore: tuple[str, ...] = ()

    name = "awq"

    @classmethod
    def parse(cls, fields: Fields) -> Self:
        _check_version(fields)
        bits = _name_of(fields, "bits", "w_bit")
        if fields.integer(bits, 1, 16) != 4:
            raise fields.error(bits, f"{fields.values[bits]} is not supported; it must be 4")
        group = _name_of(fields, "group_size", "q_group_size")
        symmetric = not fields.boolean("zero_point", default=True)
        scheme = Scheme(4, "int", read_group_size(fields, group), symmetric)
        return cls(scheme, fields.values, read_names(fields, "modules_to_not_convert"))

    @classmethod
    def refusal(cls, scheme: Scheme) -> str | None:
        if scheme.kind != "int" or scheme.bits != 4 or scheme.activations != "none":
            return "awq stores 4-bit integer weights only, and keeps activations as they are"
        return None

    @classmethod
    def plan(cls, scheme: Scheme, ignore: Sequence[str], *, kv_scales: bool = False, scrambled: bool = False) -> Self:
        """A symmetric scheme is stored with its zero points, all 8, which every loader reads."""
        if kv_scales:
            raise ConfigError("--kv_scales needs --format compressed-tensors: awq has no place for them")
        if scrambled:
            raise ConfigError("--static_groups false needs --format gptq: awq has no g_idx")
        if problem := cls.refusal(scheme):
            raise ConfigError(f"--format awq cannot hold {scheme.name}: {problem}")
        names = with_fused(ignore)
        values = {
            "quant_method": "awq",
            "version": "gemm",
            "bits": 4,
            "group_size": -1 if scheme.group_size is None else scheme.group_size,
            "zero_point": True,
            "modules_to_not_convert": list(names),
        }
        return cls(scheme, values, names)

    def config(self) -> dict[str, Any]:
        return self.values

    def scale_dtype(self, model_dtype: torch.dtype) -> torch.dtype:
        return torch.float16

    def scheme_of(self, module: str, keys: Collection[str]) -> Scheme | None:
        """Layers with a `weight` and no `qweight` are plain, whatever the config says; so is lm_head by default."""
        if f"{module}.qweight" in keys:
            return self.scheme
        is_head = module.rpartition(".")[2] == "lm_head"
        if is_head or f"{module}.weight" in keys or any(part in module for part in self.ignore):
            return None
        return self.scheme

    def tensors(self, scheme: Scheme, rows: int, columns: int) -> tuple[StoredTensor, ...]:
        check_groups("qweight", scheme, columns)
        if rows % 8:
            raise CheckpointError(f"qweight has {rows} outputs, not a multiple of 8, which awq needs")
        groups = scheme.groups(columns)
        return (
            StoredTensor("qweight", (columns, rows // 8), ("I32",)),
            StoredTensor("qzeros", (groups, rows // 8), ("I32",), required=not scheme.symmetric),
            StoredTensor("scales", (groups, rows), FLOATS),
        )

    def unpack(self, scheme: Scheme, rows: int, columns: int, tensors: Mapping[str, torch.Tensor]) -> QuantizedWeight:
        scales = check_finite("scales", tensors["scales"]).t().contiguous()
        codes = unpack_awq(tensors["qweight"]).t().contiguous()
        zeros = unpack_awq(tensors["qzeros"]).t().contiguous() if "qzeros" in tensors else None
        if scheme.symmetric and zeros is not None:
            check_zeros_are("qzeros", zeros, scheme.middle, "zero_point false")
            zeros = None
        return QuantizedWeight(scheme, codes, scales, zeros)

    def pack(self, weight: QuantizedWeight) -> dict[str, torch.Tensor]:
        zeros = weight.zeros
        if zeros is None:
            zeros = torch.full_like(weight.scales, weight.scheme.middle, dtype=torch.uint8)
        return {
            "qweight": pack_awq(weight.codes.t()),
            "qzeros": pack_awq(check_zeros_fit("qzeros", zeros, weight.scheme).t()),
            "scales": weight.scales.to(torch.float16).t().contiguous(),
        }


def _name_of(fields: Fields, name: str, other: str) -> str:
    """Which of two spellings a config uses; the first where it uses neither."""
    return other if fields.has(other) and not fields.has(name) else name


def _check_version(fields: Fields) -> None:
    name = _name_of(fields, "version", "format")
    version = fields.text(name, default="gemm").lower()
    if version != "gemm":
        raise fields.error(name, f"{version!r:.60} is not supported; it must be gemm")
    if fields.values.get("backend") == "llm-awq":
        raise fields.error("backend", "'llm-awq' is not supported; it must be autoawq's GEMM version")
