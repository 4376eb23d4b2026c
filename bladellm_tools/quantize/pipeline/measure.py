"""The output error of a rounded linear layer, as a share of its outputs' mean square."""

import torch

from bladellm_runtime.quantization.scheme import Scheme
from bladellm_runtime.quantization.weight import QuantizedWeight
from bladellm_tools.quantize.algorithms.grid import FP8_MAX
from bladellm_tools.quantize.algorithms.precision import matmul_precision
from bladellm_tools.quantize.algorithms.statistics import InputStatistics

INT8_MAX = 127.0


def output_error(statistics: InputStatistics, weight: torch.Tensor, rounded: torch.Tensor) -> float:
    """Of rounded weights, over all calibration inputs; weight, rounded: float32 [N, K].

    CUDA multiplies as TF32: a figure to compare layers by needs no more digits, and 70B shapes save a minute.
    """
    with matmul_precision("high" if weight.is_cuda else "highest"):
        return statistics.output_error(weight, rounded)


def rounded_inputs_error(x: torch.Tensor, weight: torch.Tensor, rounded: QuantizedWeight) -> float:
    """Of rounded weights and rounded inputs; x: a sample of inputs, [tokens, K]; weight: float32 [N, K]."""
    x = x.float()
    with matmul_precision("high" if weight.is_cuda else "highest"):
        exact = x @ weight.t()
        difference = round_inputs(x, rounded.scheme, rounded.input_scale) @ rounded.dequantize().t() - exact
    power = exact.square().sum()
    return float(difference.square().sum() / power) if power > 0 else 0.0


def round_inputs(x: torch.Tensor, scheme: Scheme, input_scale: float | None) -> torch.Tensor:
    """x, float32 [tokens, K], as the operators of a scheme see it: rounded with `input_scale`, or one scale a row."""
    largest = FP8_MAX if scheme.kind == "fp8" else INT8_MAX
    scale: torch.Tensor | float = x.abs().amax(1, keepdim=True).clamp(min=1e-30) / largest
    if input_scale is not None:
        scale = input_scale
    steps = (x / scale).clamp(-largest, largest)
    steps = steps.to(torch.float8_e4m3fn).float() if scheme.kind == "fp8" else steps.round()
    return steps * scale
