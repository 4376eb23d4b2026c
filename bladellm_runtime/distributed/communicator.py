"""`Communicator`: what the ranks of a group do together, over gloo on CPUs and NCCL on GPUs.

Between GPUs of one host few rows go another way, in one kernel with the norm behind a sum (`AllReduce`). On GPUs the
operations on tensors are only enqueued, on the current stream, and can be captured in CUDA graphs. All ranks of a group
must call the same operations in the same order, on one stream. A group of one rank needs no communicator at all.
"""

import atexit
import errno
import logging
import os
import socket
import threading
from collections.abc import Sequence
from datetime import timedelta
from typing import Protocol
from urllib.parse import SplitResult, urlsplit

import psutil
import torch
import torch.distributed as dist
from bladellm_kernels.all_reduce import AllReduce
from bladellm_kernels.delayed_norm import DelayedNorm
from bladellm_kernels.pending_sums import PendingSum
from torch._C._distributed_c10d import FileStore, Store, TCPStore

from bladellm_runtime.errors import ConfigError

logger = logging.getLogger(__name__)

BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}
LOOPBACK_INTERFACE = "lo"
NCCL_SETTINGS = {
    # Ranks are watched elsewhere; NCCL's own watchdog would end the process before it could say why.
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    # It looks for other ranks' trouble in the meeting file every second, which is gone when ranks leave.
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    # Every link has a group of its own, which is what it asks for.
    "TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING": "false",
    # It listens on a port of the host, to anybody.
    "NCCL_RAS_ENABLE": "0",
}
"""Settings that there are no arguments for."""
OVERLAP_ROWS = 4096
"""Fewest rows of a sum that is taken in parts by default. Parts of 2,048 fill the multiprocessors as well as the whole,
and their layers take the GPU longer than the host takes to launch twice as much. Of fewer rows there is less to hide,
and steps of up to 2,048 tokens are captured."""
LEAVE_SECONDS = 6.0
"""What NCCL gets to give its memory back: two groups of two GPUs took it 1.4 s, the four of two stages 2.4 to 2.8, and
it waits for graphs that somebody may still hold. Until it has ended this process can meet no others."""
EXIT_SECONDS = 10.0
"""What it gets once more when the process ends: NCCL aborts a process whose driver it sees shut down."""


class MeetingError(ConfigError):
    """The ranks of a run cannot meet."""


class Communicator(Protocol):
    """Rank `rank` of a group of `size`, 2 or more."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Replace x, contiguous, by the sum of all ranks' x. Returns x; every rank gets the same bits."""

    def add_norm(
        self, y: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add the sum of all ranks' y to the residual stream, in place, and normalise it; y may be overwritten.

        y, residual [T, N], weight [N], contiguous, of one type; the latter two the same on all ranks. Returns
        (normed, residual); every rank gets the same bits.
        """

    def add_delayed_norm(
        self, y: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, DelayedNorm]:
        """The same, its norm left to the next linear layer. Returns (residual, norm)."""

    def overlaps(self, rows: int) -> bool:
        """Whether the sums of a layer of so many rows are to be taken in parts, each while the next one is computed.

        Not in a captured graph. The same on all ranks.
        """

    def start_sum(self, y: torch.Tensor, first: int) -> PendingSum:
        """Start to add up the rows y [T, N] of a layer, contiguous, from its row `first` on, which is 0 for its first.

        y may not be written to meanwhile. What was started is used before the next layer's, and before other calls.
        """

    def all_gather_last(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., N] of one shape on all ranks -> [..., size · N], the ranks' parts side by side."""

    def barrier(self) -> None:
        """Return when all ranks are here; on the CPU, whatever their devices."""

    def min_int(self, value: int) -> int:
        """The least of the ranks' values; on the CPU, whatever their devices."""


class GroupCommunicator:
    """A `torch.distributed` group. `rank` counts within the group."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._sums = AllReduce(group, rows=0, hidden=1, dtype=torch.float32)
        self._overlap_rows: int | None = 0
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)

    def overlap_sums(self, rows: int | None) -> None:
        """From now on sums of `rows` rows or more are taken in parts; 0: none. None: those of `OVERLAP_ROWS` or more
        that copy engines serve. All ranks give the same."""
        self._overlap_rows = rows

    def overlaps(self, rows: int) -> bool:
        if self._overlap_rows is not None:
            return 0 < self._overlap_rows <= rows
        return max(OVERLAP_ROWS, self._sums.fast_rows + 1) <= rows <= self._sums.copied_rows

    def start_sum(self, y: torch.Tensor, first: int) -> PendingSum:
        return self._sums.start_sum(y, first)

    def write_to_ranks(
        self, rows: int, hidden: int, gather_rows: int, columns: int, dtype: torch.dtype, device: torch.device
    ) -> int:
        """From now on ranks on GPUs of one host join few rows by writing to each other's memory, if they can.

        rows: how many at most, of `hidden` numbers, are added up; gather_rows: how many are gathered; columns: of a
        rank's part of such a row; all ranks give the same. No graph may be being captured. Where sums are to be taken
        in parts (`overlap_sums`), two ranks have copy engines send them. Returns the bytes of this rank's device that
        it takes.
        """
        copied = rows if self.size == 2 and self._overlap_rows != 0 else 0
        self._sums = AllReduce(
            self._group, rows=rows, hidden=hidden, dtype=dtype, device=device, gather_rows=gather_rows,
            gather_columns=columns, gather_dtype=dtype, copied_rows=copied,
        )  # fmt: skip
        return self._sums.bytes

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return self._sums.all_reduce(x)

    def add_norm(
        self, y: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self._sums.add_norm(y, residual, weight, eps)

    def add_delayed_norm(
        self, y: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, DelayedNorm]:
        return self._sums.add_delayed_norm(y, residual, weight, eps)

    def all_gather_last(self, x: torch.Tensor) -> torch.Tensor:
        return self._sums.all_gather_last(x.contiguous())

    def barrier(self) -> None:
        self.min_int(0)

    def min_int(self, value: int) -> int:
        number = torch.tensor(value, dtype=torch.int64)
        dist.all_reduce(number, dist.ReduceOp.MIN, group=self._group)
        return int(number)


def connect(address: str, rank: int, size: int, device: torch.device, timeout_s: float = 600.0) -> None:
    """Meet the other ranks of the whole run at `address`; returns when all `size` are there.

    address: `file:///path` of a file that is not there yet, in a folder that all ranks share, or `tcp://host:port`, an
    address of rank 0's host. All of them listen on the interface that leads there. timeout_s: how long an operation may
    wait for the others.
    Raises `MeetingError` when they cannot be met.
    """
    place, timeout = urlsplit(address), timedelta(seconds=timeout_s)
    interface = LOOPBACK_INTERFACE if place.hostname is None else interface_to(place.hostname)
    if interface is not None:
        # Their only setting for the interface to listen on; unset, it is that of the host's name.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", interface)
    for name, value in NCCL_SETTINGS.items():
        os.environ.setdefault(name, value)
    try:
        dist.init_process_group(
            BACKENDS[device.type],
            store=open_store(place, rank, size, timeout),
            rank=rank,
            world_size=size,
            timeout=timeout,
            device_id=device if device.type == "cuda" else None,
        )
    except (RuntimeError, ValueError, OSError) as error:
        reason = str(error).splitlines()[0]
        taken = isinstance(error, OSError) and error.errno == errno.EADDRINUSE
        advice = "; --dist_init_addr must be followed by two more free ports" if taken else ""
        raise MeetingError(f"rank {rank} cannot meet the other {size - 1} at {address} ({reason}){advice}") from error


def open_store(place: SplitResult, rank: int, size: int, timeout: timedelta) -> Store:
    """What the ranks find each other by: the file, or a server in rank 0's process on the address given alone."""
    if place.hostname is None:
        return FileStore(place.path, size)
    host, port = place.hostname, int(place.port or 0)
    if rank:
        return TCPStore(host, port, size, False, timeout)
    listener = socket.create_server((host, port), family=family_of(host))
    return TCPStore(host, port, size, True, timeout, wait_for_workers=False, master_listen_fd=listener.detach())


def interface_to(host: str) -> str | None:
    """The network interface of this machine from which a host is reached; None where it cannot be told."""
    try:
        with socket.socket(family_of(host), socket.SOCK_DGRAM) as probe:
            probe.connect((host, 9))  # sends nothing
            own = probe.getsockname()[0]
    except OSError:
        return None
    interfaces = psutil.net_if_addrs().items()
    return next((name for name, addresses in interfaces if any(own == one.address for one in addresses)), None)


def family_of(host: str) -> socket.AddressFamily:
    """Of a numeric address, or a name, which is looked up as one of version 4."""
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def make_communicator(groups: Sequence[Sequence[int]]) -> GroupCommunicator | None:
    """This rank's communicator, None where its group has no other rank.

    groups: ranks of the whole run, each in one group; all ranks give the same groups.
    """
    own = dist.get_rank()
    found: GroupCommunicator | None = None
    for ranks in groups:
        group = dist.new_group(list(ranks)) if len(ranks) > 1 else None
        if group is not None and own in ranks:
            found = GroupCommunicator(group)
    return found


def disconnect(ending: bool = False) -> None:
    """Leave the other ranks; what they have in flight with this one fails. Nothing where there are none.

    ending: the process is about to end, and NCCL is left to that, which takes a moment where it would take seconds.

    Between GPUs captured steps must be gone: until then NCCL does not end, and after `LEAVE_SECONDS` it is left alone
    until the process ends.
    """
    if not dist.is_initialized():
        return
    if "nccl" not in dist.get_backend():
        dist.destroy_process_group()
        return
    if ending:
        return
    # Not destroyed: that waits for the other ranks, whose processes may have ended.
    leaving = threading.Thread(target=abort, name="leave-ranks", daemon=True)
    leaving.start()
    leaving.join(LEAVE_SECONDS)
    if leaving.is_alive():
        logger.debug("NCCL did not end in %g s", LEAVE_SECONDS)
        atexit.register(leaving.join, EXIT_SECONDS)


def abort() -> None:
    """Make what this rank waits for of the others fail; from another thread than the one that waits."""
    if dist.is_initialized():
        try:
            dist.distributed_c10d._abort_process_group()
        except (RuntimeError, ValueError, NotImplementedError) as error:  # gloo notices by itself that others are gone
            logger.debug("the group could not be aborted: %s", error)
