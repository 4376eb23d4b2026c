"""How the KV cache stores numbers: `KvFormat`, and the formats there are (`KV_FORMATS`, by name).

A quantized format rounds the D numbers of one token's key, or value, in one KV head together:
number = (code - offset) * scale + zero, with scale and zero in float16, and zero only where the format is affine.
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class KvFormat:
    """One format of stored keys and values.

    storage: the type of the stored elements; None is the model's own type, unquantized. per_element: numbers in one
    stored element; with two, numbers i and i + D/2 share a byte, low nibble first. lowest, highest: the codes (the
    finite range of a float8). offset: what a code has to be lowered by.
    """

    name: str
    storage: torch.dtype | None = None
    per_element: int = 1
    lowest: float = 0.0
    highest: float = 0.0
    offset: float = 0.0
    affine: bool = False

    @property
    def quantized(self) -> bool:
        return self.storage is not None

    @property
    def planes(self) -> int:
        """float16 numbers kept beside each token's key, and value, of a head: none, scale, or scale and zero."""
        return (2 if self.affine else 1) if self.quantized else 0

    def width(self, head_dim: int) -> int:
        """Stored elements a head."""
        return head_dim // self.per_element

    def dtype(self, model: torch.dtype) -> torch.dtype:
        """Type of the stored elements for a model that computes in `model`."""
        return model if self.storage is None else self.storage


NO_QUANT = KvFormat("no_quant")
KV_FORMATS = {
    item.name: item
    for item in (
        NO_QUANT,
        KvFormat("int8", torch.int8, lowest=-127, highest=127),
        KvFormat("int4", torch.uint8, per_element=2, lowest=1, highest=15, offset=8),
        KvFormat("int8_affine", torch.uint8, highest=255, affine=True),
        KvFormat("int4_affine", torch.uint8, per_element=2, highest=15, affine=True),
        KvFormat("fp8_e4m3", torch.float8_e4m3fn, lowest=-448, highest=448),
        KvFormat("fp8_e5m2", torch.float8_e5m2, lowest=-57344, highest=57344),
    )
}
