"""Layers of a tensor-parallel rank: what each computes is joined with the other ranks' parts.

Column-parallel layers (qkv, gate and up) need nothing: their outputs stay on the rank, for a row-parallel one.
"""

from collections.abc import Sequence

import torch
from bladellm_kernels.delayed_norm import DelayedNorm
from bladellm_kernels.embedding import embedding

from bladellm_runtime.distributed.communicator import Communicator
from bladellm_runtime.layers.embedding import Embedding
from bladellm_runtime.layers.linear import LinearLayer
from bladellm_runtime.layers.norm import RmsNorm
from bladellm_runtime.layers.parts import NormedPart, row_parts


class RowParallelLinear(LinearLayer):
    """The sum over the ranks of a layer that has the rank's inputs; a bias is one rank's alone."""

    def __init__(self, layer: LinearLayer, communicator: Communicator) -> None:
        self.layer = layer
        self.bytes = layer.bytes
        self.outputs = layer.outputs
        self._communicator = communicator

    def prepare(self) -> None:
        self.layer.prepare()

    def __call__(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        return self._communicator.all_reduce(self.layer(x, out))

    def add_normed(self, x: torch.Tensor, residual: torch.Tensor, norm: RmsNorm) -> tuple[torch.Tensor, torch.Tensor]:
        y, stream = self.layer(x), residual
        if norm.rows is not None:
            # The stream ends here: of the others nobody needs the sum.
            y, stream = y.index_select(0, norm.rows), residual.index_select(0, norm.rows)
        normed, _ = self._communicator.add_norm(y, stream, norm.weight, norm.eps)
        return normed, residual

    def start_normed(self, x: torch.Tensor, norm: RmsNorm) -> Sequence[NormedPart] | None:
        if norm.rows is not None or not self.layer.takes_parts or not self._overlaps(x):
            return None
        y = x.new_empty(len(x), self.outputs)
        parts = []
        for rows in row_parts(len(x)):
            part = self.layer(x[rows], y[rows])
            parts.append(NormedPart(rows, self._communicator.start_sum(part, rows.start), norm))
        return parts

    def _overlaps(self, x: torch.Tensor) -> bool:
        captured = x.is_cuda and torch.cuda.is_current_stream_capturing()
        return not captured and self._communicator.overlaps(len(x))

    def fuses(self, rows: int, gated: bool = False) -> bool:
        # The sum comes between this layer and the norm behind it either way: the others decide.
        return True

    @property
    def fills_sms(self) -> bool:
        return self.layer.fills_sms

    def shares_sms(self, rows: int) -> bool:
        return self.layer.shares_sms(rows)

    def add(
        self, x: torch.Tensor, residual: torch.Tensor, norm_weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, DelayedNorm]:
        return self._communicator.add_delayed_norm(self.layer.between_norms(x), residual, norm_weight, eps)


class VocabParallelEmbedding(Embedding):
    """An embedding of which each rank has as many rows, one after the other; weight [rows, hidden]."""

    def __init__(self, weight: torch.Tensor, communicator: Communicator) -> None:
        super().__init__(weight)
        self._communicator = communicator
        self._first = communicator.rank * len(weight)

    def __call__(
        self, input_ids: torch.Tensor, slots: torch.Tensor | None = None, padded: bool = False
    ) -> torch.Tensor:
        """As an embedding; padding is zeros anyway, since no rank has its row."""
        return self._communicator.all_reduce(embedding(input_ids, self.weight, slots, first=self._first))


class VocabParallelHead(LinearLayer):
    """A head whose layer gives the logits of the rank's rows of the vocabulary; returns those of all, [T, vocab]."""

    def __init__(self, layer: LinearLayer, communicator: Communicator, vocab_size: int) -> None:
        self.layer = layer
        self.bytes = layer.bytes
        self.outputs = vocab_size
        self._communicator = communicator
        self._vocab_size = vocab_size

    def __call__(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        return self._join(self.layer(x), out)

    def fuses(self, rows: int, gated: bool = False) -> bool:
        return self.layer.fuses(rows, gated)

    def normed(self, norm: DelayedNorm, out: torch.Tensor | None = None) -> torch.Tensor:
        return self._join(self.layer.normed(norm), out)

    def _join(self, part: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
        logits = self._communicator.all_gather_last(part)[:, : self._vocab_size]
        return logits if out is None else out.copy_(logits)
