"""Powers of two that move between the inputs of a linear layer and its weight, so that fewer bits change in products.

At its power limit a GPU multiplies as fast as the energy of it allows, and part of that are bits that differ between
numbers that follow each other on the same wires (https://arxiv.org/abs/2409.18324). From an exponent of 127 to one of
128 all eight bits change. `2**s · x` times `2**-s · weight` is the same product, bit for bit, in bfloat16, whose
exponents are far from their ends. What is in front of x takes the power: a norm's weight, or the rows of up.
"""

from collections.abc import Iterator
from typing import TypeGuard

import torch
import torch.nn.functional as F

from bladellm_runtime.layers.linear import Linear, LinearLayer
from bladellm_runtime.models.decoder import Weights

EXPONENTS, EXPONENT_BITS, MANTISSA_BITS = 256, 8, 7
"""Of bfloat16."""
SHIFTS = range(-8, 9)
"""Of exponents."""
INPUT_SHARE = 2.0
"""What a changed bit of the inputs costs, of one of the weight: on an H200 1.4 to 1.7 and 0.7 to 0.8 % of the time of
products of 1,280 and 2,048 rows (docs/decode_step.md)."""
SAMPLE_ROWS = 64
"""Rows of inputs, and of a weight, whose exponents are counted."""


def align_exponents(weights: Weights) -> None:
    """Scale norms, q, k, v, gate, up and down in place, of layers whose weights are plain ones of bfloat16.

    What a layer gets is taken to be a norm of normal numbers, whose exponents the norm's own weight decides. Results
    stay the same bit for bit, but for what numbers below 2**-110 add.
    """
    for layer in _layers(weights):
        qkv, gate_up, down = (weights.linears[f"{layer}.{name}"] for name in ("qkv", "gate_up", "down"))
        input_norm, mlp_norm = (weights.tensors[f"{layer}.{name}.weight"] for name in ("input_norm", "mlp_norm"))
        if _is_plain(qkv):
            _move_power(_normal_numbers(input_norm) * input_norm, input_norm, qkv.weight)
        if _is_plain(gate_up):
            _move_power(_normal_numbers(mlp_norm) * mlp_norm, mlp_norm, gate_up.weight)
        if _is_plain(gate_up) and gate_up.bias is None and _is_plain(down):
            gate, up = F.linear(_normal_numbers(mlp_norm) * mlp_norm, gate_up.weight).chunk(2, dim=1)
            _move_power(F.silu(gate) * up, gate_up.weight.chunk(2)[1], down.weight)


def best_shift(x: torch.Tensor, weight: torch.Tensor) -> int:
    """The s in `SHIFTS` with which `2**s · x` and `2**-s · weight` have the fewest changing bits, 0 if it is one.

    x: [T, in], and weight, [out, in], are bfloat16; of the weight `SAMPLE_ROWS` rows are looked at.
    """
    rows = weight[:: max(1, len(weight) // SAMPLE_ROWS)]
    costs = INPUT_SHARE * changing_bits(exponent_shares(x)) + changing_bits(exponent_shares(rows)).flip(0)
    return min(SHIFTS, key=lambda shift: (round(costs[shift - SHIFTS.start].item(), 6), abs(shift)))


def exponent_shares(numbers: torch.Tensor) -> torch.Tensor:
    """How often bfloat16 numbers have each exponent, float64 [256] on the CPU."""
    exponents = (numbers.contiguous().view(torch.int16).flatten().int() >> MANTISSA_BITS) & (EXPONENTS - 1)
    return torch.bincount(exponents, minlength=EXPONENTS).cpu().double() / exponents.numel()


def changing_bits(shares: torch.Tensor) -> torch.Tensor:
    """How many bits differ, in the mean, between the exponents of two numbers times `2**s`, for each s in `SHIFTS`.

    shares: as `exponent_shares` gives them. Signs and mantissas stay what they are.
    """
    exponents, shifts = torch.arange(EXPONENTS), torch.tensor(SHIFTS).unsqueeze(1)
    # Zeros stay zeros.
    moved = torch.where(exponents == 0, 0, (exponents + shifts).clamp(1, EXPONENTS - 2))
    ones = torch.stack([((moved >> place) & 1).double() @ shares for place in range(EXPONENT_BITS)])
    return (2 * ones * (1 - ones)).sum(0)


def _move_power(x: torch.Tensor, in_front: torch.Tensor, weight: torch.Tensor) -> None:
    """Scale what x is proportional to, and the weight that it is multiplied by."""
    shift = best_shift(x, weight)
    in_front.mul_(2.0**shift)
    weight.mul_(2.0**-shift)


def _layers(weights: Weights) -> Iterator[str]:
    """Names of the decoder's layers."""
    for name in weights.linears:
        layer, _, last = name.rpartition(".")
        if last == "gate_up":
            yield layer


def _is_plain(linear: LinearLayer) -> TypeGuard[Linear]:
    return type(linear) is Linear and linear.weight.dtype == torch.bfloat16


def _normal_numbers(norm: torch.Tensor) -> torch.Tensor:
    """The same ones every time, so that restarts choose the same powers."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(SAMPLE_ROWS, len(norm), generator=generator).to(norm)
