"""The gated MLP of Llama-like models."""

import torch
from bladellm_kernels.silu_mul import silu_mul

from bladellm_runtime.layers.linear import LinearLayer, added


class GatedMlp:
    """`down(silu(gate(x)) · up(x))`; gate and up are one linear, the gate's rows first."""

    def __init__(self, gate_up: LinearLayer, down: LinearLayer) -> None:
        self.gate_up = gate_up
        self.down = down

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, hidden] -> [T, hidden]."""
        return self.down(silu_mul(self.gate_up(x)))

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor | None:
        """The same, or None where it was added to residual [T, hidden]."""
        return added(self.down, silu_mul(self.gate_up(x)), residual)
