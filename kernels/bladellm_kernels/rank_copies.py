"""Sums over two GPUs of one host that take no multiprocessor until they are there: copy engines send the rows.

A collective's kernel cannot run beside a matrix product whose programs hold every multiprocessor until its last tile:
it comes behind it, or takes places from the next one. A copy engine needs none. Each rank sends its rows to the other
one on a stream of its own, then the number of sends so far, which a stream writes behind a system-wide fence
(`cuStreamWriteValue32`); the other waits for that number, on its main stream, where the rows are read: one kernel adds
both ranks' rows and the residual, and normalises. Between two ranks that is as much to send as an all-reduce has.

There are TURNS places for the rows of a layer, used in turn. A rank sends the rows of layer t when it has read the
other one's of t - 1, which that one sent when it had read what was sent for t - 2: nobody writes where somebody reads.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist

from bladellm_kernels.rank_exchange import TURNS, Exchange, agree, open_exchange


@dataclass(frozen=True, slots=True)
class CopiedSum:
    """Rows that are on their way. order: [T, hidden], those of rank 0 and those of rank 1, of which one's are a place
    where they will be. count: int32 [1], sends of the other rank that have come; number: that of these rows. sent: when
    the other rank has this one's rows."""

    order: tuple[torch.Tensor, torch.Tensor]
    count: torch.Tensor
    number: int
    sent: torch.cuda.Event

    def add_norm(self, residual: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor) -> None:
        """As `PendingSum.add_norm`; sums are taken in float32 and rounded once."""
        from bladellm_kernels.rank_copies_triton import launch_add_both_norm, launch_wait_for_rows

        # What follows may take the memory of this rank's rows.
        torch.cuda.current_stream(residual.device).wait_event(self.sent)
        launch_wait_for_rows(self.count, self.number)
        launch_add_both_norm(*self.order, residual, weight, eps, out)


class RankCopies:
    """Places for rows of the other one of two ranks, of `hidden` numbers of `dtype`; `rows` of a layer at most."""

    def __init__(self, exchange: Exchange, dtype: torch.dtype) -> None:
        """exchange: with one slot, and a row more, whose first word counts."""
        device = exchange.places.device
        self._exchange, self._dtype = exchange, dtype
        self._counts = [peer[0, 0, -1, :1] for peer in exchange.peers]
        self._stream = torch.cuda.Stream(device)
        self._layers = self._sends = 0
        self.rows = exchange.rows - 1
        self.bytes = exchange.bytes

    def check(self, group: dist.ProcessGroup) -> None:
        """See that counts reach the other rank; all ranks call it, first. Raises NoExchangeError on all or none."""
        mine, device = self._exchange.rank, self._exchange.places.device
        trouble = ""
        try:
            write_count(self._counts[1 - mine], 2**32 - 1)
        except (RuntimeError, ImportError, AttributeError) as error:
            trouble = str(error).strip().split("\n")[0] or repr(error)
        agree(group, device, trouble)
        agree(group, device, "" if int(self._counts[mine]) == -1 else "a rank's count did not arrive")
        self._counts[mine].zero_()
        agree(group, device, "")

    def takes(self, y: torch.Tensor, first: int) -> bool:
        """Whether there is a place for these rows [T, hidden], of a layer whose row `first` is the first of them."""
        row_bytes = y.shape[1] * y.element_size()
        fits = first + len(y) <= self.rows and row_bytes == self._exchange.words * 4
        return fits and y.dtype == self._dtype and y.is_contiguous()

    def start(self, y: torch.Tensor, first: int) -> CopiedSum:
        """Send y [T, hidden] behind what the current stream has to do. A layer begins where `first` is 0."""
        mine, device = self._exchange.rank, y.device
        self._layers += first == 0
        self._sends += 1
        place = (self._layers % TURNS, 0, slice(first, first + len(y)))
        self._stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(self._stream):
            self._exchange.peers[1 - mine][place].copy_(y.view(torch.int32))
            write_count(self._counts[1 - mine], self._sends)
            sent = self._stream.record_event()
        others = self._exchange.places[place].view(self._dtype)
        order = (y, others) if mine == 0 else (others, y)
        return CopiedSum(order, self._counts[mine], signed(self._sends), sent)


def open_copies(
    group: dist.ProcessGroup, rows: int, words: int, dtype: torch.dtype, device: torch.device | None
) -> RankCopies:
    """All ranks of the group call it, with the same numbers. Raises NoExchangeError on all of them or on none.

    rows: of a layer at most; words: of a row. device: this rank's CUDA device, None where it has none.
    """
    agree(group, device, "copies go between two ranks only" if dist.get_world_size(group) != 2 else "")
    copies = RankCopies(open_exchange(group, rows + 1, words, 1, device, slots=1), dtype)
    copies.check(group)
    return copies


def write_count(count: torch.Tensor, sends: int) -> None:
    """Let the current stream write a number of sends to count, int32 [1], of either rank, behind all before it."""
    from torch._C._distributed_c10d import _SymmetricMemory

    _SymmetricMemory.stream_write_value32(count.view(torch.uint32), 0, sends % 2**32)


def signed(sends: int) -> int:
    """The same 32 bits as a number with a sign."""
    return (sends + 2**31) % 2**32 - 2**31
