"""The residual stream between linear layers: normalised by kernels of its own, or by the linear layers around it."""

from dataclasses import dataclass
from typing import Protocol, Self, TypeVar

import torch
from bladellm_kernels.delayed_norm import DelayedNorm, delayed_norm

from bladellm_runtime.layers.linear import LinearLayer
from bladellm_runtime.layers.norm import RmsNorm


class ResidualStream(Protocol):
    """The stream of T tokens, and its norm, which the next linear layer reads."""

    @classmethod
    def start(cls, x: torch.Tensor, norm: RmsNorm) -> Self:
        """The stream x [T, hidden], normalised by `norm`."""

    def linear(self, layer: LinearLayer) -> torch.Tensor:
        """layer(norm), [T, out]."""

    def silu_mul(self, gate_up: LinearLayer) -> torch.Tensor:
        """`silu(gate) · up` of gate_up(norm), [T, out / 2]; the gate's outputs first."""

    def add(self, layer: LinearLayer, y: torch.Tensor, norm: RmsNorm) -> Self:
        """The stream with layer(y), y [T, in], added in place, normalised by `norm`. This one is used up."""


Stream = TypeVar("Stream", bound=ResidualStream)


@dataclass(frozen=True, slots=True)
class NormedStream:
    """Operators apart, for any number of tokens. total, normed: [T, hidden]."""

    normed: torch.Tensor
    total: torch.Tensor

    @classmethod
    def start(cls, x: torch.Tensor, norm: RmsNorm) -> Self:
        return cls(*norm.add(x, None))

    def linear(self, layer: LinearLayer) -> torch.Tensor:
        return layer(self.normed)

    def silu_mul(self, gate_up: LinearLayer) -> torch.Tensor:
        return gate_up.silu_mul(self.normed)

    def add(self, layer: LinearLayer, y: torch.Tensor, norm: RmsNorm) -> Self:
        return type(self)(*layer.add_normed(y, self.total, norm))

    def select(self, tokens: torch.Tensor) -> Self:
        """A new stream of these tokens alone, int64 [R]."""
        return type(self)(self.normed.index_select(0, tokens), self.total.index_select(0, tokens))


@dataclass(frozen=True, slots=True)
class FusedStream:
    """Every linear layer one kernel with the operators around it, for few tokens. total: [T, hidden]."""

    total: torch.Tensor
    norm: DelayedNorm

    @classmethod
    def start(cls, x: torch.Tensor, norm: RmsNorm) -> Self:
        return cls(x, delayed_norm(x, norm.weight, norm.eps))

    def linear(self, layer: LinearLayer) -> torch.Tensor:
        return layer.normed(self.norm)

    def silu_mul(self, gate_up: LinearLayer) -> torch.Tensor:
        return gate_up.normed_silu_mul(self.norm)

    def add(self, layer: LinearLayer, y: torch.Tensor, norm: RmsNorm) -> Self:
        return type(self)(*layer.add(y, self.total, norm.weight, norm.eps))
