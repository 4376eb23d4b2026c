"""Shares of tensors: read from an open safetensors file, taken out of a tensor in memory, and put together again."""

from collections.abc import Iterable
from typing import Any

import torch

from bladellm_runtime.distributed.cuts import TensorCut


def read_share(view: Any, cut: TensorCut) -> torch.Tensor:
    """A rank's share of a stored tensor; reads no more of it than that. view: what `get_slice` of safetensors gives."""
    if cut.dim is None:
        return _finish(view[...], cut)
    before = (slice(None),) * cut.dim
    parts = [view[(*before, slice(part.start, part.stop))] for part in cut.ranges]
    return _finish(parts[0] if len(parts) == 1 else torch.cat(parts, cut.dim), cut)


def take_share(tensor: torch.Tensor, cut: TensorCut) -> torch.Tensor:
    """A rank's share of a whole tensor, contiguous; a view where it can be one."""
    if cut.dim is not None:
        parts = [tensor.narrow(cut.dim, part.start, len(part)) for part in cut.ranges]
        tensor = parts[0] if len(parts) == 1 else torch.cat(parts, cut.dim)
    return _finish(tensor, cut).contiguous()


class Merge:
    """A whole tensor, put together from shares; what several ranks hold must be the same on all of them."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self.whole = torch.empty(shape, dtype=dtype)
        self._covered: list[range] = []
        self._dim: int | None = None

    def add(self, share: torch.Tensor, cut: TensorCut) -> bool:
        """Put a share in its place; false where it is not what another rank holds too, or of another shape."""
        if tuple(share.shape) != cut.shape(tuple(self.whole.shape)) or share.dtype != self.whole.dtype:
            return False
        share = _restore(share, cut)
        if cut.dim is None:
            return self._put(share, self.whole, range(1))
        self._dim, first = cut.dim, 0
        for part in cut.ranges:
            place = self.whole.narrow(cut.dim, part.start, len(part))
            if not self._put(share.narrow(cut.dim, first, len(part)), place, part):
                return False
            first += len(part)
        return True

    def is_complete(self) -> bool:
        """Whether every element has come from a share."""
        size = 1 if self._dim is None else self.whole.shape[self._dim]
        return _covers(self._covered, size)

    def _put(self, share: torch.Tensor, place: torch.Tensor, part: range) -> bool:
        for seen in self._covered:
            both = range(max(seen.start, part.start), min(seen.stop, part.stop))
            if both and not same_bytes(_rows(share, self._dim, part, both), _rows(place, self._dim, part, both)):
                return False
        place.copy_(share)
        self._covered.append(part)
        return True


def same_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors of one type are equal bit by bit; NaN equals itself, and 0 is not −0."""
    return one.shape == other.shape and torch.equal(as_bytes(one), as_bytes(other))


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor, uint8 [n]."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _rows(tensor: torch.Tensor, dim: int | None, own: range, part: range) -> torch.Tensor:
    return tensor if dim is None else tensor.narrow(dim, part.start - own.start, len(part))


def _covers(parts: Iterable[range], size: int) -> bool:
    end = 0
    for part in sorted(parts, key=lambda part: part.start):
        if part.start > end:
            return False
        end = max(end, part.stop)
    return end >= size


def _finish(tensor: torch.Tensor, cut: TensorCut) -> torch.Tensor:
    if cut.rebase:
        tensor = torch.where(tensor < 0, tensor, tensor - cut.rebase)
    if cut.rewrite is not None:
        tensor = tensor.clone()
        tensor[cut.rewrite[0]] = cut.rewrite[1]
    return tensor


def _restore(share: torch.Tensor, cut: TensorCut) -> torch.Tensor:
    if cut.rebase:
        share = torch.where(share < 0, share, share + cut.rebase)
    if cut.rewrite is not None:
        share = share.clone()
        share[cut.rewrite[0]] = cut.rewrite[2]
    return share
