"""The copy engine of a Hopper (TMA) and its barriers for `gluon_support`, copies as late or as early as they may be."""

import types
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from tests.kernels.gluon_partitions import Partitions


@dataclass
class Described:
    """A tensor as the engine reads it in tiles, zero outside."""

    data: torch.Tensor

    @property
    def dtype(self) -> torch.dtype:
        return self.data.dtype

    def tile(self, first: list[int], shape: torch.Size) -> torch.Tensor:
        assert min(first) >= 0
        tile = torch.zeros(shape, dtype=self.data.dtype)
        inside = self.data[tuple(slice(at, at + size) for at, size in zip(first, shape, strict=True))]
        tile[tuple(map(slice, inside.shape))] = inside
        return tile

    def write(self, first: list[int], tile: torch.Tensor) -> None:
        """A tile, but for what is outside."""
        inside = self.data[tuple(slice(at, at + size) for at, size in zip(first, tile.shape, strict=True))]
        inside.copy_(tile[tuple(map(slice, inside.shape))])


@dataclass
class Barrier:
    """A phase ends after `count` arrivals, and when all the bytes are here that it was told to expect."""

    count: int
    phase: int = 0
    arrived: int = 0
    missing: int = 0
    late: list[Callable[[], None]] = field(default_factory=list)

    def end_phase(self) -> None:
        if self.arrived == self.count and self.missing == 0:
            self.phase, self.arrived = self.phase + 1, 0

    def arrive(self, size: int = 0) -> None:
        """One arrival that expects as many bytes."""
        assert self.arrived < self.count, "more arrivals than a phase has"
        self.arrived += 1
        self.missing += size
        self.end_phase()

    def complete(self, size: int) -> None:
        self.missing -= size
        self.end_phase()


class CopyEngine:
    """The names `tma` and `mbarrier` of one program."""

    def __init__(self, late: bool) -> None:
        self.late = late
        self.barriers: dict[int, Barrier] = {}
        self.named: dict[str, Barrier] = {}
        self.partitions: Partitions | None = None

    def init(self, place, count: int) -> None:
        self.barriers[place.data.data_ptr()] = Barrier(count)

    def expect(self, place, size: int, pred=True) -> None:
        if pred:
            self.barriers[place.data.data_ptr()].arrive(size)
            self.progress()

    def arrive(self, place, count: int = 1, pred=True) -> None:
        for _ in range(count if pred else 0):
            self.expect(place, 0)

    def progress(self) -> None:
        if self.partitions is not None:
            self.partitions.progress()

    def copy(self, described: Described, first, place, buffer, pred=True) -> None:
        if not pred:
            return
        barrier = self.barriers[place.data.data_ptr()]
        corner = [int(each) for each in first]

        def work() -> None:
            buffer.data.copy_(described.tile(corner, buffer.data.shape))
            barrier.complete(buffer.data.numel() * buffer.data.element_size())
            self.progress()

        self.add(place, work)

    def add(self, place, work: Callable[[], None]) -> None:
        """Work that a barrier waits for."""
        if self.late:
            self.barriers[place.data.data_ptr()].late.append(work)
            self.progress()
        else:
            work()

    def wait(self, place, parity, pred=True) -> None:
        if not pred:
            return
        barrier = self.barriers[place.data.data_ptr()]

        def ended() -> bool:
            while barrier.late:
                barrier.late.pop(0)()
            return barrier.phase % 2 != int(parity)

        if self.partitions is not None:
            self.partitions.wait_until(ended)
        assert ended(), "the phase never ends"

    def meet(self, instruction: str, name: str, threads: str) -> None:
        """`bar.sync` or `bar.arrive` of a partition of four warps at a barrier of so many threads."""
        barrier = self.named.setdefault(name, Barrier(int(threads) // 128))
        phase = barrier.phase
        barrier.arrive()
        self.progress()
        if instruction == "bar.sync":
            self.partitions.wait_until(lambda: barrier.phase > phase)

    def names(self) -> dict[str, object]:
        return {
            "tma": types.SimpleNamespace(
                async_copy_global_to_shared=self.copy, tensor_descriptor=None, make_tensor_descriptor=described
            ),
            "mbarrier": types.SimpleNamespace(
                init=self.init, expect=self.expect, arrive=self.arrive, wait=self.wait, MBarrierLayout=lambda: None
            ),
        }


def described(base, shape: list, strides: list, block: list[int], layout: None) -> Described:
    """A tensor that a kernel describes: `base` is a `Pointer`."""
    first = base.data.storage_offset() + int(base.offset)
    return Described(base.data.as_strided([int(each) for each in shape], [int(each) for each in strides], first))
