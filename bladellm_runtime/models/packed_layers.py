"""Which linear layers of a loaded model keep their weight packed beside it, and what that takes."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeGuard

from bladellm_kernels.packed_weight import can_pack, pack_weight, packed_bytes

from bladellm_runtime.layers.linear import Linear, LinearLayer
from bladellm_runtime.layers.packed_linear import PackedLinear

GATED_LAYER = "gate_up"
"""The layer whose gate follows, by the last part of its name."""


@dataclass(frozen=True, slots=True)
class PackedRoom:
    """Bytes that packed weights may take, and those that stay free beside them; where there is less, none are packed.

    asked: they are asked for, so that a device where they do not fit is refused.
    """

    most: int = 0
    kept: int = 0
    asked: bool = False


NO_ROOM = PackedRoom()


def packable_bytes(linears: Mapping[str, LinearLayer]) -> int:
    """What the packed weights of all layers that have one would take."""
    return sum(packed_bytes(layer.outputs, layer.weight.shape[1]) for layer in linears.values() if _is_packable(layer))


def pack_linears(linears: Mapping[str, LinearLayer]) -> dict[str, LinearLayer]:
    """The layers, those of plain bfloat16 weights as `PackedLinear`; as they are where numbers cannot be packed."""
    return {name: _packed(name, layer) for name, layer in linears.items()}


def added_bytes(linears: Mapping[str, LinearLayer]) -> int:
    """Of all packed weights."""
    return sum(layer.packed.bytes for layer in linears.values() if isinstance(layer, PackedLinear))


def _is_packable(layer: LinearLayer) -> TypeGuard[Linear]:
    return type(layer) is Linear and layer.stacked is None and can_pack(layer.weight)


def _packed(name: str, layer: LinearLayer) -> LinearLayer:
    if not _is_packable(layer):
        return layer
    gated = name.rpartition(".")[2] == GATED_LAYER
    # The kernel has no bias beside a gate.
    packed = None if gated and layer.bias is not None else pack_weight(layer.weight, gated)
    return layer if packed is None else PackedLinear(layer.weight, packed, layer.bias)
