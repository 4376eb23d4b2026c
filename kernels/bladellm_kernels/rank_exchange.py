"""Memory of the GPUs of one host in which the ranks of a process group leave each other what they computed.

A rank writes what it has to say into the memory of every rank; nobody reads another rank's memory. The words themselves
say that they have come: a place holds EMPTY until then, a value nobody sends. There are TURNS sets of places, used in
turn, and in each turn a rank empties the places of the turn before:

- What a rank reads in turn t was written in turn t: the places were emptied in its turn t - 2, which had ended when it
  wrote in turn t - 1, and nobody writes in turn t before having read that.
- Nobody empties what still comes: the next to write there does so in turn t + 2, after it has read this rank's words of
  turn t + 1, which follow the end of turn t, in which they were emptied.

So no call waits for anything but what it needs, a rank may be a call ahead of another, and there is nothing to reset
between replays of a CUDA graph: the number of the turn lies on the device, one for each unit of a row. With two turns a
rank would empty places while another writes its next words there. All calls of a rank that use the same memory must
follow one another on one stream, and all ranks must make the same calls in the same order. Words are 32 bits, which a
GPU writes and reads whole.
"""

import math
import os
import socket
import zlib
from dataclasses import dataclass

import torch
import torch.distributed as dist

from bladellm_kernels.has_triton import has_triton

TURNS = 3
EMPTY = -(2**31)
"""A word that nobody sends: -0.0 in float32, and in the 16-bit types 0.0 and -0.0, in whose place 0 is sent."""

WORD_BYTES = 4
MOST_RANKS = 8
SUM_UNITS = 8
"""Of a row to add: the most programs that share it."""

GATHER_WORDS = 2048
"""Of a row to gather: a unit."""

_RENDEZVOUS: list[str] = []
"""The groups of those that this process took part in, in order."""

MOST_WORDS = 2**31 - 1
"""In the places of a rank, which kernels number with 32 bits."""


class NoExchangeError(RuntimeError):
    """Why the ranks of a group cannot write to each other's memory."""


@dataclass(frozen=True, slots=True)
class Exchange:
    """peers: of each rank, its places as this rank reaches them, int32 [TURNS, slots, rows, words]: a slot for
    what each rank sends, or one for all.

    turns: int32 [rows, units], on this rank alone; the turn of each unit of a row, next to come. The words of a row are
    divided into units of `unit_words`, the last ones perhaps shorter or empty. rank: this rank's number among peers.
    held: what keeps the memory of peers, which their tensors do not own, in this process.
    """

    peers: tuple[torch.Tensor, ...]
    turns: torch.Tensor
    rank: int
    held: tuple[object, ...] = ()

    @property
    def places(self) -> torch.Tensor:
        return self.peers[self.rank]

    @property
    def ranks(self) -> int:
        return len(self.peers)

    @property
    def rows(self) -> int:
        return self.places.shape[2]

    @property
    def words(self) -> int:
        return self.places.shape[3]

    @property
    def units(self) -> int:
        return self.turns.shape[1]

    @property
    def bytes(self) -> int:
        """Of this rank's memory."""
        return self.places.nbytes + self.turns.nbytes

    @property
    def unit_words(self) -> int:
        """A multiple of 4, so that units begin where 16 bytes do."""
        return -(-self.words // (4 * self.units)) * 4


@dataclass(frozen=True, slots=True)
class TwoShots:
    """For sums in two steps. parts: an exchange of ceil(rows / ranks) rows, those that a rank adds; sums: of all rows,
    with one slot. The turns are those of the latter, of one unit a row.
    """

    parts: Exchange
    sums: Exchange

    @property
    def rows(self) -> int:
        return self.sums.rows

    @property
    def words(self) -> int:
        return self.sums.words

    @property
    def bytes(self) -> int:
        """Of this rank's memory."""
        return self.parts.bytes + self.sums.bytes


def gather_units(words: int) -> int:
    """Into how many units a row to gather is divided."""
    return -(-words // GATHER_WORDS)


def open_exchange(
    group: dist.ProcessGroup, rows: int, words: int, units: int, device: torch.device | None, slots: int | None = None
) -> Exchange:
    """All ranks of the group call it, with the same numbers. Raises NoExchangeError on all of them or on none.

    slots: one for each rank by default. device: this rank's CUDA device, None where it has none.
    """
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    slots = slots or ranks
    if TURNS * slots * rows * words > MOST_WORDS:
        raise NoExchangeError(f"{slots} times {rows} rows of {words} words are too many")
    agree(group, device, _obstacle(ranks, device))
    host = zlib.crc32(socket.gethostname().encode())
    agree(group, device, "" if same_everywhere(group, device, host) else "the ranks are on several hosts")
    # PyTorch numbers what a process exchanges at each, over all its groups, and waits for the same number of others.
    same = same_everywhere(group, device, len(_RENDEZVOUS))
    agree(group, device, "" if same else "a rank's process has been in another group before")
    assert device is not None
    _RENDEZVOUS.append(group.group_name)
    try:
        exchange, trouble = _rendezvous(group, (TURNS, slots, rows, words), units, device), ""
    except (RuntimeError, ImportError, AttributeError) as error:
        exchange, trouble = None, str(error).strip().split("\n")[0] or repr(error)
    agree(group, device, trouble)
    assert exchange is not None
    for peer in exchange.peers:
        peer.view(-1)[rank] = rank
    agree(group, device, "")
    heard = exchange.places.view(-1)[:ranks].tolist()
    agree(group, device, "" if heard == list(range(ranks)) else "a rank's words did not arrive")
    exchange.places.fill_(EMPTY)
    agree(group, device, "")
    return exchange


def _obstacle(ranks: int, device: torch.device | None) -> str:
    """Why this rank cannot, empty where it can."""
    if device is None or device.type != "cuda":
        return "it is between CUDA devices only"
    if torch.version.hip is not None or not has_triton():
        return "its kernels need triton and an NVIDIA GPU"
    if ranks > MOST_RANKS:
        return f"it is for at most {MOST_RANKS} ranks, got {ranks}"
    return ""


def same_everywhere(group: dist.ProcessGroup, device: torch.device | None, value: int) -> bool:
    """Whether all ranks of the group give the same value."""
    most = torch.tensor([value, -value], dtype=torch.int64, device=device)
    dist.all_reduce(most, dist.ReduceOp.MAX, group)
    return int(most[0]) == -int(most[1])


def agree(group: dist.ProcessGroup, device: torch.device | None, trouble: str) -> None:
    """Wait for all ranks and what they enqueued. Raises NoExchangeError on all where one has trouble."""
    if device is not None and device.type == "cuda":
        torch.cuda.synchronize(device)
    ranks_in_trouble = torch.tensor([int(bool(trouble))], dtype=torch.int32, device=device)
    dist.all_reduce(ranks_in_trouble, dist.ReduceOp.SUM, group)
    if int(ranks_in_trouble):
        raise NoExchangeError(trouble or "another rank cannot")


def _rendezvous(
    group: dist.ProcessGroup, shape: tuple[int, int, int, int], units: int, device: torch.device
) -> Exchange:
    """The memory of all ranks, mapped into this process, with anything in it."""
    # No multicast object is made for memory to which one rank writes at a time.
    os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"
    from torch._C._distributed_c10d import _SymmetricMemory
    from torch.distributed import _symmetric_memory

    with torch.cuda.device(device):
        device = torch.device("cuda", torch.cuda.current_device())
        own = _SymmetricMemory.empty_strided_p2p((math.prod(shape),), (1,), torch.int32, device)
        handle = _symmetric_memory.rendezvous(own, group.group_name)
    peers = tuple(handle.get_buffer(rank, shape, torch.int32) for rank in range(dist.get_world_size(group)))
    turns = torch.zeros(shape[2], units, dtype=torch.int32, device=device)
    return Exchange(peers, turns, dist.get_rank(group), (own, handle))
