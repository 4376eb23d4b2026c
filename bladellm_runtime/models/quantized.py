"""Which linear layers of a checkpoint are quantized, the tensors they are stored in, and what they take when loaded."""

from collections.abc import Collection
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch

from bladellm_runtime.errors import CheckpointError
from bladellm_runtime.layers.quantized_linear import OPERATORS, packed_bytes
from bladellm_runtime.models.config import ModelSpec
from bladellm_runtime.models.weights import Part, WeightTable
from bladellm_runtime.quantization.format import CheckpointFormat
from bladellm_runtime.quantization.scheme import Scheme

PLAIN_DTYPES = ("F32", "BF16", "F16")

Schemes = dict[str, Scheme]
"""The schemes of quantized linear layers by module; other modules are plain."""


@dataclass(frozen=True, slots=True)
class Expected:
    """A tensor a checkpoint holds: its shape, what that follows from, and the safetensors types it may have."""

    shape: tuple[int, ...]
    fields: str
    dtypes: tuple[str, ...] = PLAIN_DTYPES
    required: bool = True


def find_schemes(spec: ModelSpec, table: WeightTable, keys: Collection[str], file: Path) -> Schemes:
    """The scheme of every quantized linear layer; `keys` are the checkpoint's tensors, none for dummy weights.

    Raises `CheckpointError`, naming `file`, for a scheme that no operator runs.
    """
    schemes: Schemes = {}
    modules = [part.module for parts in table.values() for part in parts if part.module is not None]
    for module in modules if spec.quantization is not None else []:
        scheme = _quantization(spec).scheme_of(module, keys)
        if scheme is not None and scheme.name not in OPERATORS:
            known = ", ".join(OPERATORS)
            raise CheckpointError(f"{file}: {module} is quantized as {scheme.name}; supported are {known}")
        if scheme is not None:
            schemes[module] = scheme
    return schemes


def expected_tensors(spec: ModelSpec, table: WeightTable, schemes: Schemes, file: Path) -> dict[str, Expected]:
    """Every tensor of the checkpoint by key.

    Raises `CheckpointError`, naming `file`, for a shape that a scheme cannot store.
    """
    expected: dict[str, Expected] = {}
    for part in (part for parts in table.values() for part in parts):
        scheme = schemes.get(part.module) if part.module is not None else None
        if scheme is None:
            expected[part.key] = Expected(part.shape, part.fields)
        else:
            expected |= _stored(_quantization(spec), scheme, part, file)
    return expected


def weight_bytes(table: WeightTable, schemes: Schemes, dtype: torch.dtype, device: torch.device) -> int:
    """What the loaded parameters take on `device` with plain ones of `dtype`."""
    return sum(_part_bytes(part, schemes, dtype, device) for parts in table.values() for part in parts)


def loading_bytes(table: WeightTable, schemes: Schemes, dtype: torch.dtype) -> int:
    """What loading takes for a moment beside the parameters: the largest quantized layer, unpacked and then stacked, or
    the largest plain one of which a part is held, whole."""
    layers = [parts for parts in table.values() if parts[0].module is not None]
    unpacked = (sum(prod(part.shape) for part in parts if part.module in schemes) for parts in layers)
    cut = (sum(prod(part.shape) for part in parts if part.is_cut) for parts in table.values())
    return max(2 * max(unpacked, default=0), dtype.itemsize * max(cut, default=0))


def _stored(quantization: CheckpointFormat, scheme: Scheme, part: Part, file: Path) -> dict[str, Expected]:
    rows, columns = part.shape
    try:
        tensors = quantization.tensors(scheme, rows, columns)
    except CheckpointError as error:
        raise CheckpointError(f"{file}: {part.module}.{error}") from error
    fields = f"{part.fields} and quantization_config"
    return {
        f"{part.module}.{tensor.suffix}": Expected(tensor.shape, fields, tensor.dtypes, tensor.required)
        for tensor in tensors
    }


def _part_bytes(part: Part, schemes: Schemes, dtype: torch.dtype, device: torch.device) -> int:
    scheme = schemes.get(part.module) if part.module is not None else None
    if scheme is None:
        return prod(part.held) * dtype.itemsize
    rows, columns = part.held
    return packed_bytes(scheme, rows, columns, dtype, device)


def _quantization(spec: ModelSpec) -> CheckpointFormat:
    assert spec.quantization is not None, "schemes exist only where config.json has a quantization_config"
    return spec.quantization
