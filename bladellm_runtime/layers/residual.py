"""The residual stream between linear layers: normalised by kernels of its own, or by the linear layers around it."""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, Self, TypeVar

import torch
from bladellm_kernels.delayed_norm import DelayedNorm, delayed_norm

from bladellm_runtime.layers.linear import LinearLayer
from bladellm_runtime.layers.norm import RmsNorm
from bladellm_runtime.layers.parts import NormedPart


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


class NormedStream:
    """Operators apart, for any number of tokens.

    What a layer adds may be under way in parts: then the next one is computed part by part, each when it is there, and
    whoever reads the stream or its norm waits for all.
    """

    def __init__(self, normed: torch.Tensor, total: torch.Tensor, parts: Sequence[NormedPart] = ()) -> None:
        """normed, total: [T, hidden]; of `parts`, all T tokens or none, normed may be anything yet."""
        self._normed, self._total, self._parts = normed, total, deque(parts)

    @classmethod
    def start(cls, x: torch.Tensor, norm: RmsNorm) -> Self:
        return cls(*norm.add(x, None))

    @property
    def normed(self) -> torch.Tensor:
        """The norm, [T, hidden]."""
        deque(self._finished(), maxlen=0)
        return self._normed

    @property
    def total(self) -> torch.Tensor:
        """The stream itself, [T, hidden]."""
        deque(self._finished(), maxlen=0)
        return self._total

    def linear(self, layer: LinearLayer) -> torch.Tensor:
        if not self._parts:
            return layer(self._normed)
        y = self._normed.new_empty(len(self._normed), layer.outputs)
        for rows in self._finished():
            layer(self._normed[rows], y[rows])
        return y

    def silu_mul(self, gate_up: LinearLayer) -> torch.Tensor:
        if not self._parts:
            return gate_up.silu_mul(self._normed)
        y = self._normed.new_empty(len(self._normed), gate_up.outputs // 2)
        for rows in self._finished():
            gate_up.silu_mul(self._normed[rows], y[rows])
        return y

    def add(self, layer: LinearLayer, y: torch.Tensor, norm: RmsNorm) -> Self:
        total = self.total
        parts = layer.start_normed(y, norm)
        if parts is None:
            return type(self)(*layer.add_normed(y, total, norm))
        return type(self)(torch.empty_like(total), total, parts)

    def select(self, tokens: torch.Tensor) -> Self:
        """A new stream of these tokens alone, int64 [R]."""
        return type(self)(self.normed.index_select(0, tokens), self.total.index_select(0, tokens))

    def _finished(self) -> Iterator[slice]:
        """The rows of the parts, each once they are added and normalised."""
        while self._parts:
            part = self._parts.popleft()
            part.finish(self._total, self._normed)
            yield part.rows


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
