"""`CompressedTensors`: linear layers stored as the compressed-tensors library does, by llm-compressor and others.

With N outputs, K inputs, G groups and b bits, stored codes are signed: code − 2^(b − 1).

- pack-quantized: weight_packed int32 [N, ceil(K·b/32)] holds the unsigned codes, packed along K; weight_zero_point
  int32 [ceil(N·b/32), G] the unsigned zero points, packed along N; weight_scale [N, G]; weight_shape [2] holds N, K;
  weight_g_idx [K] is the group of every input, only with `actorder` group. The library dropped that in 2026, so it is
  read, and not planned for new checkpoints.
- int-quantized: weight int8 [N, K], weight_scale [N, 1], weight_zero_point int8 [N, 1], input_scale [1] when static.
- float-quantized: weight float8_e4m3fn [N, K], weight_scale [N, 1], or [1] with strategy tensor; input_scale likewise.
"""

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
    check_fp8,
    check_groups,
    check_zeros_are,
    check_zeros_fit,
    read_input_scale,
)
from bladellm_runtime.quantization.compressed_tensors_config import (
    ConfigGroup,
    Storage,
    choose_packing,
    read_groups,
    write_config,
)
from bladellm_runtime.quantization.format import CheckpointFormat, StoredTensor
from bladellm_runtime.quantization.groups import g_idx_of, order_of, restore_columns, sort_columns
from bladellm_runtime.quantization.names import NameList
from bladellm_runtime.quantization.packing import pack, unpack, words
from bladellm_runtime.quantization.scheme import Scheme
from bladellm_runtime.quantization.weight import QuantizedWeight

KV_CACHE_SCHEME = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
KV_SUFFIXES = tuple(
    f".{suffix}"
    for which in "kv"
    for suffix in (f"self_attn.{which}_scale", f"self_attn.{which}_zero_point", f"{which}_proj.output_scale")
)
"""Endings of the tensors that `kv_cache_scheme` announces, older spellings included."""


@dataclass(frozen=True)
class CompressedTensors(CheckpointFormat):
    """`values`: the `quantization_config`.

    Dynamic activations of strategy tensor are read as one scale a row: a scale of the whole batch would make a row's
    result depend on its neighbours, and one a row is at least as exact.
    """

    groups: tuple[ConfigGroup, ...]
    ignore: NameList
    values: dict[str, Any] = field(hash=False)

    name = "compressed-tensors"

    @classmethod
    def parse(cls, fields: Fields) -> Self:
        for name in ("sparsity_config", "transform_config"):
            section = fields.nested(name)
            if section.values and section.values.get("format") != "dense":
                raise fields.error(name, "is set, which is not supported; only quantized dense weights are")
        fields.nested("kv_cache_scheme")
        return cls(read_groups(fields), NameList.read(fields, "ignore"), fields.values)

    @classmethod
    def refusal(cls, scheme: Scheme) -> str | None:
        if scheme.bits not in (4, 8) or (scheme.kind == "fp8" and scheme.bits != 8):
            return "compressed-tensors stores integers of 4 or 8 bits and fp8 here"
        if scheme.kind == "fp8" and (scheme.group_size is not None or not scheme.symmetric):
            return "fp8 weights have one scale an output channel and no zero points"
        if scheme.activations != "none" and (scheme.bits != 8 or scheme.group_size is not None):
            return "quantized activations need 8-bit weights with one scale an output channel"
        return None

    @classmethod
    def plan(cls, scheme: Scheme, ignore: Sequence[str], *, kv_scales: bool = False, scrambled: bool = False) -> Self:
        if problem := cls.refusal(scheme):
            raise ConfigError(f"--format compressed-tensors cannot hold {scheme.name}: {problem}")
        if scrambled:
            raise ConfigError("--static_groups false needs --format gptq: compressed-tensors no longer reads its g_idx")
        storage = Storage(choose_packing(scheme))
        values = write_config(scheme, storage.packing, ignore, KV_CACHE_SCHEME if kv_scales else None)
        group = ConfigGroup(NameList(frozenset({"Linear"}), ()), scheme, storage)
        return cls((group,), NameList(frozenset(ignore), ()), values)

    def config(self) -> dict[str, Any]:
        return self.values

    def scale_dtype(self, model_dtype: torch.dtype) -> torch.dtype:
        return model_dtype

    def scheme_of(self, module: str, keys: Collection[str]) -> Scheme | None:
        """Of the groups that name the layer, the one that does so most closely: by name, by pattern, by class."""
        if self.ignore.match(module) is not None:
            return None
        matches = [(match, group.scheme) for group in self.groups if (match := group.targets.match(module)) is not None]
        if not matches:
            return None
        best = min(match for match, _ in matches)
        return next(scheme for match, scheme in reversed(matches) if match == best)

    def tensors(self, scheme: Scheme, rows: int, columns: int) -> tuple[StoredTensor, ...]:
        storage, groups = self._storage(scheme), scheme.groups(columns)
        weight = "weight_packed" if storage.packing == "pack-quantized" else "weight"
        check_groups(weight, scheme, columns)
        scale = StoredTensor("weight_scale", (1,) if storage.per_tensor else (rows, groups), FLOATS)
        if storage.packing == "pack-quantized":
            packed = (rows, words(columns, scheme.bits))
            return (StoredTensor(weight, packed, ("I32",)), scale, *_packed_extras(scheme, storage, rows, columns))
        dtype = "F8_E4M3" if scheme.kind == "fp8" else "I8"
        stored = StoredTensor(weight, (rows, columns), (dtype,))
        zeros = StoredTensor("weight_zero_point", scale.shape, (dtype,), required=not scheme.symmetric)
        extras = (StoredTensor("weight_g_idx", (columns,), INTEGERS),) if storage.scrambled else ()
        return (stored, scale, zeros, *extras, *_input_tensors(scheme, dtype))

    def unpack(self, scheme: Scheme, rows: int, columns: int, tensors: Mapping[str, torch.Tensor]) -> QuantizedWeight:
        storage, scales = self._storage(scheme), check_finite("weight_scale", tensors["weight_scale"])
        groups = scales.shape[1] if scales.dim() == 2 else 1
        _check_shape(rows, columns, tensors)
        scales = scales.reshape(-1, groups).expand(rows, groups)
        codes = _unpack_codes(scheme, storage, columns, tensors)
        zeros = _unpack_zeros(scheme, storage, rows, tensors)
        order = _unpack_order(tensors, groups)
        input_scale = None
        if scheme.activations == "static":
            input_scale = read_input_scale(tensors)
        if "input_zero_point" in tensors:
            check_zeros_are("input_zero_point", tensors["input_zero_point"].float(), 0, "symmetric true")
        return QuantizedWeight(scheme, sort_columns(codes, order), scales.contiguous(), zeros, order, input_scale)

    def pack(self, weight: QuantizedWeight) -> dict[str, torch.Tensor]:
        scheme, storage, groups = weight.scheme, self._storage(weight.scheme), weight.scales.shape[1]
        codes = restore_columns(weight.codes, weight.order)
        tensors = {"weight_scale": _pack_scales(weight.scales, storage)}
        if storage.packing == "pack-quantized":
            tensors["weight_packed"] = pack(codes, scheme.bits, 1)
            tensors["weight_shape"] = torch.tensor(codes.shape, dtype=torch.int64, device=codes.device)
            if weight.zeros is not None:
                zeros = check_zeros_fit("weight_zero_point", weight.zeros, scheme)
                tensors["weight_zero_point"] = pack(zeros, scheme.bits, 0)
        else:
            tensors["weight"] = codes if scheme.kind == "fp8" else _signed(codes)
            if weight.zeros is not None:
                tensors["weight_zero_point"] = _signed(weight.zeros)
        if storage.scrambled:
            tensors["weight_g_idx"] = g_idx_of(weight.order, weight.columns, groups, codes.device)
        elif weight.order is not None and groups > 1:
            raise CheckpointError("weight_g_idx is needed for scrambled columns, but the config has no actorder group")
        if weight.input_scale is not None:
            tensors["input_scale"] = torch.tensor([weight.input_scale], dtype=torch.float32, device=codes.device)
        return tensors

    def is_harmless(self, key: str) -> bool:
        return self.values.get("kv_cache_scheme") is not None and key.endswith(KV_SUFFIXES)

    def _storage(self, scheme: Scheme) -> Storage:
        return next(group.storage for group in self.groups if group.scheme == scheme)


def _packed_extras(scheme: Scheme, storage: Storage, rows: int, columns: int) -> list[StoredTensor]:
    extras = [StoredTensor("weight_shape", (2,), INTEGERS)]
    if not scheme.symmetric:
        shape = (words(rows, scheme.bits), scheme.groups(columns))
        extras.append(StoredTensor("weight_zero_point", shape, ("I32",)))
    if storage.scrambled:
        extras.append(StoredTensor("weight_g_idx", (columns,), INTEGERS))
    return extras


def _input_tensors(scheme: Scheme, dtype: str) -> list[StoredTensor]:
    if scheme.activations != "static":
        return []
    return [StoredTensor("input_scale", (1,), FLOATS), StoredTensor("input_zero_point", (1,), (dtype,), required=False)]


def _check_shape(rows: int, columns: int, tensors: Mapping[str, torch.Tensor]) -> None:
    shape = tensors["weight_shape"].tolist() if "weight_shape" in tensors else [rows, columns]
    if shape != [rows, columns]:
        raise CheckpointError(f"weight_shape is {shape}, but config.json makes it {[rows, columns]}")


def _unpack_codes(scheme: Scheme, storage: Storage, columns: int, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    if storage.packing == "pack-quantized":
        return unpack(tensors["weight_packed"], scheme.bits, 1, columns).contiguous()
    return check_fp8("weight", tensors["weight"]) if scheme.kind == "fp8" else _unsigned(tensors["weight"])


def _unpack_zeros(
    scheme: Scheme, storage: Storage, rows: int, tensors: Mapping[str, torch.Tensor]
) -> torch.Tensor | None:
    if "weight_zero_point" not in tensors:
        return None
    stored = tensors["weight_zero_point"]
    if storage.packing == "pack-quantized":
        return unpack(stored, scheme.bits, 0, rows).contiguous()
    if scheme.symmetric:
        check_zeros_are("weight_zero_point", stored.float(), 0, "symmetric true")
        return None
    return _unsigned(stored)


def _unpack_order(tensors: Mapping[str, torch.Tensor], groups: int) -> torch.Tensor | None:
    """A g_idx of -1 throughout is one that was never set: the natural order."""
    g_idx = tensors.get("weight_g_idx")
    if g_idx is None or bool((g_idx == -1).all()):
        return None
    return order_of(g_idx, groups, "weight_g_idx")


def _pack_scales(scales: torch.Tensor, storage: Storage) -> torch.Tensor:
    if not storage.per_tensor:
        return scales
    if not bool((scales == scales[0, 0]).all()):
        raise CheckpointError("weight_scale differs between outputs, but the config has strategy tensor")
    return scales[0].contiguous()


def _signed(codes: torch.Tensor) -> torch.Tensor:
    """int8 of uint8, less 128: the upper bit flipped."""
    return (codes ^ 128).view(torch.int8)


def _unsigned(codes: torch.Tensor) -> torch.Tensor:
    """uint8 of int8, plus 128: the inverse of `_signed`."""
    return codes.contiguous().view(torch.uint8) ^ 128
