"""How the KV cache stores numbers: `KvFormat`, and the formats there are (`KV_FORMATS`, by name).

A quantized format rounds the D numbers of one token's key, or value, in one KV head together:
number = (code - offset) * scale + zero, with scale and zero in float16, and zero only where the format is affine.

The codes of `fp12_e4m7` are float16 without their highest exponent bit and their last three of the mantissa, and scales
are powers of two: of a vector whose largest number is below 2^(e + 1) what bfloat16 holds from 2^(e - 14) on is kept as
it is, and what is smaller moves by 2^(e - 22) at most, about what sums in float32 round to.
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class KvFormat:
    """One format of stored keys and values.

    storage: the type of the stored elements; None is the model's own type, unquantized. bits: of a code. With 4,
    numbers i and i + D/2 share a byte, low nibble first; with 12 that holds the upper four bits of both, behind D bytes
    with the lower ones. lowest, highest: the codes (the finite range of a float). offset: what a code has to be lowered
    by.
    """

    name: str
    storage: torch.dtype | None = None
    bits: int = 8
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

    @property
    def nibbles(self) -> bool:
        return self.bits == 4

    @property
    def float12(self) -> bool:
        return self.bits == 12

    @property
    def multiple(self) -> int:
        """What head sizes must be a multiple of."""
        return 1 if self.bits % 8 == 0 else 2

    def width(self, head_dim: int) -> int:
        """Stored elements a head."""
        return head_dim * self.bits // 8 if self.quantized else head_dim

    def head_dim(self, width: int) -> int:
        """Numbers of a head of so many elements."""
        return width * 8 // self.bits if self.quantized else width

    def number_bytes(self, model: torch.dtype) -> float:
        """Of a stored number, scales left out."""
        return self.bits / 8 if self.quantized else model.itemsize

    def dtype(self, model: torch.dtype) -> torch.dtype:
        """Type of the stored elements for a model that computes in `model`."""
        return model if self.storage is None else self.storage


NO_QUANT = KvFormat("no_quant")
KV_FORMATS = {
    item.name: item
    for item in (
        NO_QUANT,
        KvFormat("int8", torch.int8, lowest=-127, highest=127),
        KvFormat("int4", torch.uint8, bits=4, lowest=1, highest=15, offset=8),
        KvFormat("int8_affine", torch.uint8, highest=255, affine=True),
        KvFormat("int4_affine", torch.uint8, bits=4, highest=15, affine=True),
        KvFormat("fp8_e4m3", torch.float8_e4m3fn, lowest=-448, highest=448),
        KvFormat("fp8_e5m2", torch.float8_e5m2, lowest=-57344, highest=57344),
        KvFormat("fp12_e4m7", torch.uint8, bits=12, lowest=-255 / 128, highest=255 / 128),
    )
}
