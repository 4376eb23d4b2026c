"""Sums over the ranks of a process group, and what follows them in a decoder layer: residual addition and RMS norm.

Between GPUs of one host few rows take one kernel, in which ranks write to each other's memory (`rank_exchange`): every
rank sends its rows to all others and adds what it gets (`rank_sums_triton`) or, where that is much to send, each adds
some rows for all (`rank_two_shots_triton`). A captured CUDA graph may hold such calls. Otherwise they take the group's
own collectives and the operators of one GPU. Sums of many rows can be started, and waited for when they are used: the
rows go by the copy engines of two GPUs (`rank_copies`), or by a collective that the current stream does not wait for.
"""

import logging
from dataclasses import dataclass

import torch
import torch.distributed as dist

from bladellm_kernels.delayed_norm import DelayedNorm, delayed_norm
from bladellm_kernels.multiprocessors import multiprocessors
from bladellm_kernels.pending_sums import CollectiveSum, PendingSum
from bladellm_kernels.rank_copies import RankCopies, open_copies
from bladellm_kernels.rank_exchange import (
    SUM_UNITS,
    WORD_BYTES,
    Exchange,
    NoExchangeError,
    TwoShots,
    gather_units,
    open_exchange,
)
from bladellm_kernels.rms_norm import add_rms_norm

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Bounds:
    """The most bytes that a rank sends in a call in one step, and in two; above, the group's collectives serve it.

    They also bound the memory, about three times as much for each. Two steps save nothing between two ranks.
    """

    one_step: int
    two_steps: int

    @classmethod
    def default(cls, ranks: int) -> "Bounds":
        return cls(4 << 20, 0) if ranks == 2 else cls(1 << 20, 16 << 20)

    def rows(self, row_bytes: int, ranks: int) -> tuple[int, int]:
        """The most rows in one step and in two."""
        others = max(1, ranks - 1)
        return self.one_step // (row_bytes * others), self.two_steps * ranks // (2 * row_bytes * others)


GATHER_BYTES = 64 << 20
"""Of the memory for one turn of `all_gather_last`, at most; calls of more rows take the group's own collective."""


class AllReduce:
    """What the ranks of a group compute together. All ranks make the same calls in the same order on one stream.

    group: with NCCL where the tensors are CUDA's. All ranks make the object with the same numbers. rows: the most in a
    call that is to be fast, as far as `bounds` go; hidden, dtype: of these rows. device: this rank's CUDA device, None
    where it has none; the ranks of a host need devices of different numbers. gather_rows: as `rows`, in
    `all_gather_last`; gather_columns: of each rank's part there, of type gather_dtype; 0 where that need not be fast.
    copied_rows: the most rows of a layer whose sums are started (`start_sum`) and go by copy engines, 0 for none.
    Calls with other shapes and types work too, by the group's collectives.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        *,
        rows: int,
        hidden: int,
        dtype: torch.dtype,
        device: torch.device | None = None,
        gather_rows: int = 0,
        gather_columns: int = 0,
        gather_dtype: torch.dtype = torch.float32,
        copied_rows: int = 0,
        bounds: Bounds | None = None,
    ) -> None:
        self._group, self._dtype, self._gather_dtype, self._device = group, dtype, gather_dtype, device
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self._one: Exchange | None = None
        self._two: TwoShots | None = None
        self._gathers: Exchange | None = None
        self._copies: RankCopies | None = None
        try:
            self._open_sums(rows, hidden * dtype.itemsize, bounds or Bounds.default(self.size))
            if gather_rows and gather_columns:
                self._gathers = self._open_gathers(gather_rows, gather_columns * gather_dtype.itemsize)
        except NoExchangeError as error:
            logger.info("ranks use the collectives of %s: %s", dist.get_backend(group), error)
        try:
            if copied_rows:
                words = _whole_words(hidden * dtype.itemsize)
                self._copies = open_copies(group, copied_rows, words, dtype, device)
        except NoExchangeError as error:
            logger.info("sums over ranks of many rows are not taken by copy engines: %s", error)

    @property
    def fast_rows(self) -> int:
        """The most rows of a sum that is one kernel; 0 where there is none."""
        return max(0 if way is None else way.rows for way in (self._one, self._two))

    @property
    def fast_gathered_rows(self) -> int:
        """The same of `all_gather_last`."""
        return 0 if self._gathers is None else self._gathers.rows

    @property
    def copied_rows(self) -> int:
        """The most rows of a layer that `start_sum` sends by copy engines; 0 where it does not."""
        return 0 if self._copies is None else self._copies.rows

    @property
    def bytes(self) -> int:
        """Of this rank's memory that others write to."""
        ways = (self._one, self._two, self._gathers, self._copies)
        return sum(way.bytes for way in ways if way is not None)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """x: [..., hidden], contiguous. Returns it with the sum over the ranks, the same to the bit on all of them."""
        rows = _rows_of(x)
        way = self._way(rows)
        if way is None:
            dist.all_reduce(x, group=self._group)
        else:
            _launch(way, rows, rows, _parts(way, rows))
        return x

    def add_norm(
        self, y: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add the sum of y over the ranks to the residual stream, and normalise it, as `add_rms_norm` does.

        y, residual: [T, hidden], contiguous; weight: [hidden]; of one type; residual and weight the same on all ranks.
        residual is overwritten, and y may be. Sums are taken in float32, in the order of the ranks, and rounded once;
        by the group's collectives as those do. Returns (normed, residual), the same to the bit on all ranks. Raises
        ValueError naming the argument that is wrong.
        """
        _check(y, residual, weight)
        way = self._way(y)
        if way is None:
            return add_rms_norm(self.all_reduce(y), residual, weight, eps, total=residual)
        out = torch.empty_like(y)
        _launch(way, y, residual, 1, residual, weight, eps, out)
        return out, residual

    def add_delayed_norm(
        self, y: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, DelayedNorm]:
        """The same, its norm left to the next linear layer, as `linear_add` leaves it. Returns (residual, norm)."""
        _check(y, residual, weight)
        way = self._way(y)
        if way is None:
            residual.add_(self.all_reduce(y))
            return residual, delayed_norm(residual, weight, eps)
        parts = _parts(way, y)
        weighted, squares = torch.empty_like(y), torch.empty(len(y), parts, dtype=torch.float32, device=y.device)
        _launch(way, y, residual, parts, residual, weight, eps, weighted, squares)
        return residual, DelayedNorm(weighted, squares, eps)

    def start_sum(self, y: torch.Tensor, first: int) -> PendingSum:
        """Start to add up y [T, N] over the ranks, contiguous, rows of a layer from its row `first` on, which is 0 for
        its first ones. The current stream goes on, and may not write to y.

        All that was started for a layer must be used before a next one's is, and before any other call. Not in a
        captured graph.
        """
        if self._copies is not None and self._copies.takes(y, first):
            return self._copies.start(y, first)
        return CollectiveSum(y, dist.all_reduce(y, group=self._group, async_op=True))

    def all_gather_last(self, x: torch.Tensor) -> torch.Tensor:
        """x: [..., N], contiguous. Returns [..., size · N], the ranks' parts side by side; -0.0 may become 0.0."""
        rows = _rows_of(x)
        out = x.new_empty(len(rows), self.size * rows.shape[1])
        if self._gathers is not None and _takes(self._gathers, rows, self._gather_dtype):
            from bladellm_kernels.rank_gather_triton import launch_gather_ranks

            launch_gather_ranks(self._gathers, rows, out)
        else:
            parts = x.new_empty(self.size, *rows.shape)
            _all_gather(parts.flatten(0, 1), rows, group=self._group)  # gloo takes no dimension of ranks
            out.view(len(rows), *parts.shape[::2]).copy_(parts.transpose(0, 1))
        return out.view(*x.shape[:-1], out.shape[1])

    def _way(self, rows: torch.Tensor) -> Exchange | TwoShots | None:
        """What sums of rows [T, N] go through; None for the group's collectives."""
        for way in (self._one, self._two):
            if way is not None and _takes(way, rows, self._dtype):
                return way
        return None

    def _open_sums(self, rows: int, row_bytes: int, bounds: Bounds) -> None:
        one, two = (min(rows, most) for most in bounds.rows(row_bytes, self.size))
        words = _whole_words(row_bytes)
        if one:
            self._one = open_exchange(self._group, one, words, SUM_UNITS, self._device)
        if two > one:
            parts = open_exchange(self._group, -(-two // self.size), words, 1, self._device)
            self._two = TwoShots(parts, open_exchange(self._group, two, words, 1, self._device, slots=1))

    def _open_gathers(self, rows: int, row_bytes: int) -> Exchange | None:
        words = _whole_words(row_bytes)
        rows = min(rows, GATHER_BYTES // (row_bytes * self.size))
        return open_exchange(self._group, rows, words, gather_units(words), self._device) if rows else None


def _whole_words(row_bytes: int) -> int:
    """Raises NoExchangeError where a row is no whole words."""
    if row_bytes % WORD_BYTES:
        raise NoExchangeError(f"rows of {row_bytes} bytes are no whole words of {WORD_BYTES}")
    return row_bytes // WORD_BYTES


def _takes(way: Exchange | TwoShots, rows: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether they are few enough, and such as it is for."""
    row_bytes = rows.shape[1] * rows.element_size()
    return len(rows) <= way.rows and rows.dtype == dtype and row_bytes == way.words * WORD_BYTES


def _parts(way: Exchange | TwoShots, rows: torch.Tensor) -> int:
    """How many programs share a row where no norm needs it whole."""
    if isinstance(way, TwoShots):
        return 1
    from bladellm_kernels.rank_sums_triton import parts_of

    return parts_of(len(rows), way.words, multiprocessors(rows.device))


def _launch(
    way: Exchange | TwoShots,
    y: torch.Tensor,
    total: torch.Tensor,
    parts: int,
    residual: torch.Tensor | None = None,
    weight: torch.Tensor | None = None,
    eps: float = 0.0,
    out: torch.Tensor | None = None,
    squares: torch.Tensor | None = None,
) -> None:
    if isinstance(way, TwoShots):
        from bladellm_kernels.rank_two_shots_triton import launch_sum_ranks_in_two

        launch_sum_ranks_in_two(way, y, total, residual, weight, eps, out, squares)
        return
    from bladellm_kernels.rank_sums_triton import launch_sum_ranks

    launch_sum_ranks(way, y, total, parts, residual, weight, eps, out, squares)


def _rows_of(x: torch.Tensor) -> torch.Tensor:
    """x [..., N] as [T, N]."""
    if not x.is_contiguous() or x.data_ptr() % WORD_BYTES:
        raise ValueError(f"x must be contiguous and begin at a whole word, got strides {x.stride()}")
    return x.view(-1, x.shape[-1])


def _check(y: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> None:
    for name, tensor, shape in (("y", y, y.shape), ("residual", residual, y.shape), ("weight", weight, y.shape[1:])):
        if y.ndim != 2 or tensor.shape != shape or tensor.dtype != y.dtype or tensor.device != y.device:
            raise ValueError(f"{name} must be {y.dtype} {list(shape)} of 2 dimensions on {y.device}")
        if not tensor.is_contiguous() or tensor.data_ptr() % WORD_BYTES:
            raise ValueError(f"{name} must be contiguous and begin at a whole word, got strides {tensor.stride()}")


def all_reduce_reference(parts: list[torch.Tensor]) -> torch.Tensor:
    """The sum over ranks in float32, in their order. parts: each rank's, of one shape. Returns float32."""
    total = torch.zeros(parts[0].shape, device=parts[0].device)
    for part in parts:
        total += part.float()
    return total


# Newer versions of torch have the same under a new name, and warn of the old one.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
