"""Random quantized layers and the error their operators may have."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from bladellm_kernels.fp8_linear import fp8_linear, fp8_linear_reference, pack_fp8
from bladellm_kernels.w4a16_linear import KERNEL_ROWS, pack_w4a16, w4a16_linear, w4a16_linear_reference
from bladellm_kernels.w8a8_linear import pack_w8a8, w8a8_linear, w8a8_linear_reference
from bladellm_kernels.w8a16_linear import pack_w8a16, w8a16_linear, w8a16_linear_reference

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
FLOAT32_ROUNDING = 2.0**-20
"""Far coarser than float32, for thousands of terms summed in any order."""


@dataclass(frozen=True)
class Layer:
    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None

    def run(self, name: str, x: torch.Tensor, bias: torch.Tensor | None = None, **options) -> torch.Tensor:
        """The operator's result, packed for x's type."""
        if name == "fp8":
            return fp8_linear(x, pack_fp8(self.codes, self.scales, x.dtype), bias, **options)
        pack, linear, _ = OPERATORS[name]
        return linear(x, pack(self.codes, self.scales, self.zeros, x.dtype), bias, **options)

    def reference(self, name: str, x: torch.Tensor, bias: torch.Tensor | None = None, **options) -> torch.Tensor:
        if name == "fp8":
            return fp8_linear_reference(x, self.codes, self.scales, bias, **options)
        return OPERATORS[name][2](x, self.codes, self.scales, self.zeros, bias, **options)

    def weight(self, middle: float) -> torch.Tensor:
        """float64 [N, K], element by element."""
        groups = torch.arange(self.codes.shape[1], device=self.codes.device) // (
            self.codes.shape[1] // self.scales.shape[1]
        )
        zeros = middle if self.zeros is None else self.zeros.double()[:, groups]
        return (self.codes.double() - zeros) * self.scales.double()[:, groups]


OPERATORS: dict[str, tuple[Callable, Callable, Callable]] = {
    "w4a16": (pack_w4a16, w4a16_linear, w4a16_linear_reference),
    "w8a16": (pack_w8a16, w8a16_linear, w8a16_linear_reference),
    "w8a8": (pack_w8a8, w8a8_linear, w8a8_linear_reference),
}
MIDDLE = {"w4a16": 8, "w8a16": 128, "w8a8": 128, "fp8": 0}


def make_layer(name: str, rows: int, columns: int, groups: int, zeros: bool, device: str) -> Layer:
    """Random codes over their whole range, strided scales of one order of magnitude, zero points anywhere."""
    groups = groups if name in ("w4a16", "w8a16") else 1
    scales = (torch.rand(rows, groups + 1, device=device) * 0.01 + 0.001)[:, :groups]
    if name == "fp8":
        return Layer((torch.randn(rows, columns, device=device) * 60).to(torch.float8_e4m3fn), scales, None)
    levels = 16 if name == "w4a16" else 256
    codes = torch.randint(0, levels, (rows, columns), dtype=torch.uint8, device=device)
    points = torch.randint(0, levels, scales.shape, dtype=torch.uint8, device=device) if zeros else None
    return Layer(codes, scales, points)


def rounding(name: str, x: torch.Tensor, groups: int) -> float:
    """The relative rounding of the arithmetic an operator may use for `x`."""
    packed_kernel = name == "w4a16" or (name == "w8a16" and groups > 1)
    if x.is_cpu and packed_kernel and len(x) <= KERNEL_ROWS:
        return torch.finfo(torch.bfloat16).eps
    return max(torch.finfo(x.dtype).eps, FLOAT32_ROUNDING)


def assert_close(y: torch.Tensor, expected: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, unit: float) -> None:
    """|y − expected| within roundings of `unit` of the inputs (as a random sum) and a few of the result."""
    assert y.shape == expected.shape
    assert y.dtype == x.dtype
    spread = x.double().norm(dim=1, keepdim=True) * weight.norm(dim=1)
    allowed = unit * (3 * spread + 2 * expected.abs() + 2) + torch.finfo(torch.float16).tiny
    worst = ((y.double() - expected).abs() / allowed).max().item() if y.numel() else 0.0
    assert worst <= 1, f"{worst:.3g} times the allowed error"
