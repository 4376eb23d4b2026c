"""Rotary frequencies of every kind the families use: what a position turns by, as transformers computes it."""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from bladellm_kernels.rotary import rotary_tables

RopeType = Literal["default", "linear", "dynamic", "llama3", "yarn"]


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """How positions become angles. Fields a type does not use keep their defaults.

    `original_positions` is the context length the model was trained for before scaling (dynamic, llama3, yarn).
    `attention_factor` multiplies cosines and sines (yarn). `dimensions` is the head dimension, all of which turns.
    """

    dimensions: int
    type: RopeType = "default"
    theta: float = 10_000.0
    factor: float = 1.0
    original_positions: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0
    truncate: bool = True


class RotaryEmbedding:
    """Makes the tables that turn the queries and keys of a step."""

    def __init__(self, spec: RopeSpec, device: torch.device) -> None:
        self.spec = spec
        self.inverse_frequencies = inverse_frequencies(spec).to(device)

    def __call__(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """positions int64 [T] -> (cos, sin) for `bladellm_kernels.rotary`, float32 [T, 1, D]."""
        frequencies = self.inverse_frequencies
        if self.spec.type == "dynamic":
            frequencies = dynamic_inverse_frequencies(self.spec, positions)
        return rotary_tables(positions, frequencies, self.spec.attention_factor)


def inverse_frequencies(spec: RopeSpec) -> torch.Tensor:
    """The turn of one position in each pair of dimensions, radians, float32 [D/2]."""
    plain = 1.0 / spec.theta ** _exponents(spec, torch.device("cpu"))
    if spec.type == "linear":
        return plain / spec.factor
    if spec.type == "llama3":
        return _llama3(spec, plain)
    if spec.type == "yarn":
        return _yarn(spec, plain)
    return plain


def dynamic_inverse_frequencies(spec: RopeSpec, positions: torch.Tensor) -> torch.Tensor:
    """NTK-aware scaling whose base grows with the sequence, float32 [T, D/2].

    Each token takes the base of the length at which it ends the sequence, so that neither chunking nor a recomputed
    prefill changes a result. Up to `original_positions` that is the default rotation; beyond, it is what transformers
    does for generated tokens (it turns a longer prompt by the length of the whole prompt).
    """
    lengths = (positions + 1).clamp(min=spec.original_positions).double()
    growth = spec.factor * lengths / spec.original_positions - (spec.factor - 1)
    base = spec.theta * growth ** (spec.dimensions / (spec.dimensions - 2))
    return 1.0 / base.float().unsqueeze(-1) ** _exponents(spec, positions.device)


def yarn_attention_factor(factor: float, mscale: float | None, mscale_all_dim: float | None) -> float:
    """YaRN's attention temperature as a factor of cosines and sines (Peng et al. 2023, arXiv:2309.00071)."""
    if mscale and mscale_all_dim:
        return _mscale(factor, mscale) / _mscale(factor, mscale_all_dim)
    return _mscale(factor, 1.0)


def _mscale(factor: float, weight: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def _exponents(spec: RopeSpec, device: torch.device) -> torch.Tensor:
    return torch.arange(0, spec.dimensions, 2, dtype=torch.float32, device=device) / spec.dimensions


def _llama3(spec: RopeSpec, plain: torch.Tensor) -> torch.Tensor:
    """Llama 3.1: slow pairs are scaled, fast ones kept, those between blended."""
    turns = spec.original_positions * plain / (2 * math.pi)
    blend = (turns - spec.low_freq_factor) / (spec.high_freq_factor - spec.low_freq_factor)
    blend = blend.clamp(0, 1)
    return (1 - blend) * plain / spec.factor + blend * plain


def _yarn(spec: RopeSpec, plain: torch.Tensor) -> torch.Tensor:
    """YaRN: interpolate the pairs that turn less than `beta_slow` times, keep those over `beta_fast`, ramp between."""
    low, high = _yarn_dimension(spec, spec.beta_fast), _yarn_dimension(spec, spec.beta_slow)
    if spec.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, spec.dimensions - 1)
    width = high - low if high != low else 0.001
    ramp = ((torch.arange(spec.dimensions // 2, dtype=torch.float32) - low) / width).clamp(0, 1)
    return plain / spec.factor * ramp + plain * (1 - ramp)


def _yarn_dimension(spec: RopeSpec, turns: float) -> float:
    """The (fractional) pair that turns `turns` times over the original context."""
    scaled = spec.original_positions / (turns * 2 * math.pi)
    return spec.dimensions * math.log(scaled) / (2 * math.log(spec.theta))
