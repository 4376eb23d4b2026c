"""The gated MLP of Llama-like models."""

from bladellm_runtime.layers.linear import LinearLayer
from bladellm_runtime.layers.norm import RmsNorm
from bladellm_runtime.layers.residual import Stream


class GatedMlp:
    """`down(silu(gate(x)) · up(x))`; gate and up are one linear, the gate's rows first."""

    def __init__(self, gate_up: LinearLayer, down: LinearLayer) -> None:
        self.gate_up = gate_up
        self.down = down

    def __call__(self, stream: Stream, norm: RmsNorm) -> Stream:
        """Reads the stream's norm and adds to it. `norm`: of what reads it next."""
        return stream.add(self.down, stream.silu_mul(self.gate_up), norm)
