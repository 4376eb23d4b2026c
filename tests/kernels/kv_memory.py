"""KV layers of random bytes to write into, and keys and values of every kind."""

from dataclasses import dataclass

import torch
from bladellm_kernels.kv_format import KV_FORMATS, KvFormat
from bladellm_kernels.kv_layer import KvLayer
from bladellm_kernels.kv_read import dequantize_kv

QUANTIZED = [name for name, format in KV_FORMATS.items() if format.quantized]
INTEGER = [name for name in QUANTIZED if not name.startswith("fp")]
KINDS = ("normal", "outliers", "mixed", "zeros", "constant", "one side", "sparse", "subnormal", "tiny", "huge")


def numbers(kind: str, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Fresh random numbers of a kind, finite in `dtype`."""
    x = torch.randn(shape)
    if kind == "outliers":
        x[..., torch.randint(0, shape[-1], (2,))] *= 50.0
    elif kind == "mixed":
        x *= torch.exp(3 * torch.randn(*shape[:-1], 1)).clamp(max=1e3)
    elif kind == "zeros":
        x = torch.zeros(shape)
    elif kind == "constant":
        x = torch.randn(*shape[:-1], 1).expand(shape).clone()
    elif kind == "one side":
        x = x.abs() * 0.1 + 30.0 * torch.randn(*shape[:-1], 1)
    elif kind == "sparse":
        x *= torch.rand(shape) < 1.5 / shape[-1]
    elif kind in ("subnormal", "tiny", "huge"):
        x *= {"subnormal": 1e-41, "tiny": 1e-7, "huge": 1e9}[kind]
    return x.clamp(torch.finfo(dtype).min, torch.finfo(dtype).max).to(dtype)


@dataclass
class Memory:
    """A layer between two others, all random bytes, and a copy of what it was."""

    kv: KvLayer
    payload: torch.Tensor
    kept: torch.Tensor
    kept_scales: torch.Tensor | None

    def untouched_but(self, rows: torch.Tensor, granule_rows: torch.Tensor) -> None:
        """Assert that nothing changed outside these rows of this layer."""
        for before, after in ((self.kept, self.payload), (self.kept_scales, self.kv.scales)):
            if before is None or after is None:
                continue
            before, after = before.clone(), after.clone()
            for each in (before, after):
                if before.dtype == torch.uint8:
                    each[rows, 1] = 0
                else:
                    each[granule_rows // self.kv.granule_tokens, ..., granule_rows % self.kv.granule_tokens] = 0
            torch.testing.assert_close(before, after, atol=0, rtol=0, equal_nan=True)


def memory(
    name: str, kv_heads: int, head_dim: int, dtype: torch.dtype, device: str, granule_tokens: int = 8, **kind: bool
) -> Memory:
    """48 rows in granules of `granule_tokens`; `paged`; `mapped`: laid out [row, layer, head, K|V, width]."""
    format = KV_FORMATS[name]
    stored, width = format.dtype(dtype), format.width(head_dim)
    order = (kv_heads, 2) if kind.get("mapped") else (2, kv_heads)
    payload = torch.randint(0, 256, (48, 3, *order, width * stored.itemsize), dtype=torch.uint8, device=device)
    view = payload.view(stored)[:, 1]
    granules = 48 // granule_tokens
    table = torch.randperm(granules, device=device).int()[None]
    scales = None
    if format.planes:
        shape = (granules, kv_heads, 2, format.planes, granule_tokens)
        scales = torch.full(shape, torch.nan, dtype=torch.float16, device=device)
    view = view.transpose(1, 2) if kind.get("mapped") else view
    kv = KvLayer(view, format, granule_tokens, table, scales, kind.get("paged", False))
    return Memory(kv, payload, payload.clone(), None if scales is None else scales.clone())


def check_nearest(x: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, format: KvFormat) -> None:
    """Every number reads back as close as its format allows. x: float [..., D], no scale beyond float16's range."""
    x, scale = x.double(), scales[..., :1].double()
    error = (dequantize_kv(codes, scales, format).double() - x).abs()
    if format.name.startswith("fp"):
        bits, least = {"fp8_e4m3": (3, -6), "fp8_e5m2": (2, -14), "fp12_e4m7": (7, -14)}[format.name]
        # Half the distance of two codes: of their power of two, of the least normal one among subnormals.
        limit = torch.maximum(x.abs() / 2, scale * 2.0 ** (least - 1)) * 2.0**-bits
    else:
        limit = scale / 2
    # Rounding of float32, of its subnormal numbers too.
    slack = 2.0**-21 * (scale * format.highest + x.abs().amax(-1, keepdim=True)) + 2.0**-126
    assert (error <= limit + slack).all(), float((error - limit).max())
