"""`QuantizedLinear`: a linear layer over a packed weight; `OPERATORS` is where kernels plug in."""

from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import torch
from bladellm_kernels.delayed_norm import DelayedNorm
from bladellm_kernels.fp8_linear import fp8_linear, pack_fp8
from bladellm_kernels.int4_matmul import has_int4_kernel
from bladellm_kernels.w4a16_linear import pack_w4a16, w4a16_linear
from bladellm_kernels.w8a8_linear import pack_w8a8, w8a8_linear
from bladellm_kernels.w8a16_linear import pack_w8a16, w8a16_linear
from bladellm_kernels.weight_units import UnitWeight

from bladellm_runtime.layers.linear import LinearLayer
from bladellm_runtime.quantization.scheme import Scheme
from bladellm_runtime.quantization.weight import QuantizedWeight


@dataclass(frozen=True, slots=True)
class Operator:
    """How a scheme runs.

    pack: the canonical weight, its columns in the order of `codes`, in the layout of its device, for inputs of a type.
    apply: (x, packed weight, bias, the canonical weight's static input scale) -> outputs of x's type.
    """

    pack: Callable[[QuantizedWeight, torch.dtype], Any]
    apply: Callable[[torch.Tensor, Any, torch.Tensor | None, float | None], torch.Tensor]


def _pack_w4a16(weight: QuantizedWeight, dtype: torch.dtype) -> Any:
    return pack_w4a16(weight.codes, weight.scales, weight.zeros, dtype)


def _pack_w8a16(weight: QuantizedWeight, dtype: torch.dtype) -> Any:
    return pack_w8a16(weight.codes, weight.scales, weight.zeros, dtype)


def _pack_w8a8(weight: QuantizedWeight, dtype: torch.dtype) -> Any:
    return pack_w8a8(weight.codes, weight.scales, weight.zeros, dtype)


def _pack_fp8(weight: QuantizedWeight, dtype: torch.dtype) -> Any:
    return pack_fp8(weight.codes, weight.scales, dtype)


OPERATORS: dict[str, Operator] = {
    "w4a16": Operator(_pack_w4a16, lambda x, packed, bias, _: w4a16_linear(x, packed, bias)),
    "w8a16": Operator(_pack_w8a16, lambda x, packed, bias, _: w8a16_linear(x, packed, bias)),
    "w8a8": Operator(_pack_w8a8, w8a8_linear),
    "fp8_w8a16": Operator(_pack_fp8, lambda x, packed, bias, _: fp8_linear(x, packed, bias)),
    "fp8_w8a8": Operator(
        _pack_fp8,
        lambda x, packed, bias, scale: fp8_linear(x, packed, bias, "dynamic" if scale is None else "static", scale),
    ),
}
"""By `Scheme.name`."""


class QuantizedLinear(LinearLayer):
    """`x · weightᵀ + bias` of a quantized weight. x [T, in] and bias [out] of type `dtype`; returns [T, out] of it."""

    def __init__(self, weight: QuantizedWeight, bias: torch.Tensor | None, dtype: torch.dtype) -> None:
        operator = OPERATORS[weight.scheme.name]
        self.scheme = weight.scheme
        self.packed = operator.pack(weight, dtype)
        held = getattr(self.packed, "weight", None)
        self.units = held if isinstance(held, UnitWeight) else None
        self.dtype = dtype
        self.bias = bias
        self.order = weight.order
        self.outputs = weight.rows
        self.input_scale = weight.input_scale
        self.bytes = held_bytes(self.packed) + sum(part.nbytes for part in (bias, self.order) if part is not None)
        self._apply = operator.apply

    def __call__(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        y = self._apply(self._ordered(x), self.packed, self.bias, self.input_scale)
        return y if out is None else out.copy_(y)

    def silu_mul(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        if self.units is None:
            return super().silu_mul(x, out)
        from bladellm_kernels.unit_linear import unit_linear_silu_mul

        return unit_linear_silu_mul(self._ordered(x), self.units, self.bias, out=out)

    def fuses(self, rows: int, gated: bool = False) -> bool:
        # In float16 x · weight can be out of range before the division of the norm.
        if self.units is None or self.dtype == torch.float16:
            return False
        from bladellm_kernels.normed_unit_linear import unit_norm_schedule

        return unit_norm_schedule(rows, self.units, gated) is not None

    def shares_sms(self, rows: int) -> bool:
        if self.units is None:
            return True
        from bladellm_kernels.normed_unit_linear import takes_whole_sms

        return not takes_whole_sms(rows, self.units)

    def normed(self, norm: DelayedNorm, out: torch.Tensor | None = None) -> torch.Tensor:
        if self.units is None or not self.fuses(len(norm.weighted)):
            return super().normed(norm, out)
        from bladellm_kernels.normed_unit_linear import normed_unit_linear

        y = normed_unit_linear(self._ordered_norm(norm), self.units, self.bias)
        return y if out is None else out.copy_(y)

    def normed_silu_mul(self, norm: DelayedNorm) -> torch.Tensor:
        if self.units is None or not self.fuses(len(norm.weighted), gated=True):
            return super().normed_silu_mul(norm)
        from bladellm_kernels.normed_unit_linear import normed_unit_linear

        return normed_unit_linear(self._ordered_norm(norm), self.units, self.bias, gated=True)

    def add(
        self, x: torch.Tensor, residual: torch.Tensor, norm_weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, DelayedNorm]:
        if self.units is None or not self.fuses(len(x)):
            return super().add(x, residual, norm_weight, eps)
        from bladellm_kernels.normed_unit_linear import unit_linear_add

        return residual, unit_linear_add(self._ordered(x), self.units, residual, norm_weight, eps, self.bias)

    def _ordered(self, x: torch.Tensor) -> torch.Tensor:
        """x with its columns in the order of the codes."""
        return x if self.order is None else x.index_select(1, self.order)

    def _ordered_norm(self, norm: DelayedNorm) -> DelayedNorm:
        """The norm with its columns in the order of the codes."""
        return norm if self.order is None else replace(norm, weighted=self._ordered(norm.weighted))


def held_bytes(packed: Any) -> int:
    """Bytes of the tensors of a packed weight: a data class of tensors, data classes of them, and plain values."""
    values = [getattr(packed, field.name) for field in fields(packed)]
    tensors = {id(value): value.nbytes for value in values if isinstance(value, torch.Tensor)}
    return sum(tensors.values()) + sum(held_bytes(value) for value in values if is_dataclass(value))


def packed_bytes(scheme: Scheme, rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> int:
    """About what a packed weight takes for activations of `dtype`: its codes, and what each scale comes with."""
    scales = rows * scheme.groups(columns) * _scale_bytes(dtype, device)
    if scheme.kind == "fp8" and device.type == "cpu":  # a CPU holds these codes in a type it can multiply
        return rows * columns * (2 if dtype == torch.bfloat16 else 4) + scales
    return rows * columns * scheme.bits // 8 + scales


def _scale_bytes(dtype: torch.dtype, device: torch.device) -> int:
    """Kept for a scale and its zero point; layouts differ a little. Beside activations in float32 they may be there in
    bfloat16 as well, but not on a CPU without a kernel for 4 bits."""
    twice = dtype.itemsize == 4 and (device.type != "cpu" or has_int4_kernel())
    return 12 if twice else 8
