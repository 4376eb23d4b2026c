"""Sums over the ranks of a group that have been started, to be waited for where they are used."""

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist

from bladellm_kernels.rms_norm import add_rms_norm


class PendingSum(Protocol):
    """A sum over ranks that is under way."""

    def add_norm(self, residual: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor) -> None:
        """Let the current stream wait for the sum, add it to residual [T, N], in place, and write its norm to out,
        [T, N]; all contiguous and of one type. To be called once."""


@dataclass(frozen=True, slots=True)
class CollectiveSum:
    """By the group's own collective, into y [T, N], which has to be kept until the end of `work`."""

    y: torch.Tensor
    work: dist.Work

    def add_norm(self, residual: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor) -> None:
        self.work.wait()
        add_rms_norm(self.y, residual, weight, eps, out=out, total=residual)
