"""The copy engine of a Hopper (TMA) and its barriers for `gluon_support`, copies as late or as early as they may be."""

import types
from collections.abc import Callable
from dataclasses import dataclass, field

import torch


@dataclass
class Described:
    """A tensor as the engine reads it in tiles, zero outside."""

    data: torch.Tensor

    def tile(self, first: list[int], shape: torch.Size) -> torch.Tensor:
        assert min(first) >= 0
        tile = torch.zeros(shape, dtype=self.data.dtype)
        inside = self.data[tuple(slice(at, at + size) for at, size in zip(first, shape, strict=True))]
        tile[tuple(map(slice, inside.shape))] = inside
        return tile


@dataclass
class Barrier:
    """Of one arrival a phase, which ends when all the bytes are here that it was told to expect."""

    phase: int = 0
    arrived: bool = False
    missing: int = 0
    late: list[Callable[[], None]] = field(default_factory=list)

    def end_phase(self) -> None:
        if self.arrived and self.missing == 0:
            self.phase, self.arrived = self.phase + 1, False

    def expect(self, size: int) -> None:
        assert not self.arrived, "one arrival a phase"
        self.arrived = True
        self.missing += size
        self.end_phase()

    def arrive(self, size: int) -> None:
        self.missing -= size
        self.end_phase()


class CopyEngine:
    """The names `tma` and `mbarrier` of one program."""

    def __init__(self, late: bool) -> None:
        self.late = late
        self.barriers: dict[int, Barrier] = {}

    def init(self, place, count: int) -> None:
        assert count == 1
        self.barriers[place.data.data_ptr()] = Barrier()

    def expect(self, place, size: int, pred=True) -> None:
        if pred:
            self.barriers[place.data.data_ptr()].expect(size)

    def copy(self, described: Described, first, place, buffer, pred=True) -> None:
        if not pred:
            return
        barrier = self.barriers[place.data.data_ptr()]
        corner = [int(each) for each in first]

        def work() -> None:
            buffer.data.copy_(described.tile(corner, buffer.data.shape))
            barrier.arrive(buffer.data.numel() * buffer.data.element_size())

        if self.late:
            barrier.late.append(work)
        else:
            work()

    def wait(self, place, parity) -> None:
        barrier = self.barriers[place.data.data_ptr()]
        while barrier.late:
            barrier.late.pop(0)()
        assert barrier.phase % 2 != int(parity), "the phase never ends"

    def names(self) -> dict[str, object]:
        return {
            "tma": types.SimpleNamespace(async_copy_global_to_shared=self.copy, tensor_descriptor=None),
            "mbarrier": types.SimpleNamespace(
                init=self.init, expect=self.expect, wait=self.wait, MBarrierLayout=lambda: None
            ),
        }
