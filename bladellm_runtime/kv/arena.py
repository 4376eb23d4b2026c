"""The arena interface: KV memory that grows per slot and stays contiguous in each slot's address range."""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

import numpy as np
import torch
from bladellm_kernels.kv_format import KvFormat
from bladellm_kernels.kv_layer import KvLayer
from numpy.typing import NDArray

from bladellm_runtime.kv.operations import Copy, MemoryPlan, Rows, SwapIn, SwapOut
from bladellm_runtime.kv.spec import KvSpec

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class KvShape:
    """What one token of one layer is: heads, numbers a head, and how they are stored (`dtype` is the model's)."""

    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    format: KvFormat

    @property
    def payload_bytes(self) -> int:
        """Bytes of one token's K and V in one layer, without scales."""
        return 2 * self.kv_heads * self.format.width(self.head_dim) * self.format.dtype(self.dtype).itemsize

    @property
    def scale_bytes(self) -> int:
        """Bytes of one token's scales and zeros in one layer."""
        return 2 * self.kv_heads * self.format.planes * torch.float16.itemsize


KEPT_DURATIONS = 4096
"""How many of the latest mapping calls `ArenaStats` remembers the durations of."""


class MemoryEvent(NamedTuple):
    """Something an arena did, from `start` to `end` in seconds of `time.perf_counter`: show, hide, split, join, or
    wait, which is a step waiting for the others."""

    start: float
    end: float
    kind: str


@dataclass(slots=True)
class ArenaStats:
    """Counted since the arena's start. `map_seconds`: the latest mapping calls, each of one granule or block in one
    layer group (or of a run of granules, where one call maps that); in no order. `wait_seconds`: how long steps had to
    wait for mappings. `splits` and `joins`: blocks whose memory was replaced to be taken otherwise than before.
    `events` stays empty until `trace`.
    """

    maps: int = 0
    unmaps: int = 0
    map_seconds: list[float] = field(default_factory=list)
    wait_seconds: float = 0.0
    relocated_granules: int = 0
    splits: int = 0
    joins: int = 0
    events: deque[MemoryEvent] = field(default_factory=lambda: deque(maxlen=0))
    _p99: float = 0.0
    _p99_maps: int = 0

    def map_p99(self) -> float:
        """The 99th percentile of `map_seconds`, taken anew once an eighth of them are others: a step asks for it."""
        if (self.maps - self._p99_maps) * 8 > len(self.map_seconds):
            recent = sorted(self.map_seconds)
            self._p99, self._p99_maps = recent[len(recent) * 99 // 100], self.maps
        return self._p99

    def mapped(self, seconds: float) -> None:
        """Count a mapping call."""
        if len(self.map_seconds) < KEPT_DURATIONS:
            self.map_seconds.append(seconds)
        else:
            self.map_seconds[self.maps % KEPT_DURATIONS] = seconds
        self.maps += 1

    def trace(self, limit: int) -> None:
        """Keep the latest `limit` events from now on; 0 ends it."""
        self.events = deque(maxlen=limit)


class KvArena(ABC):
    """Physical KV memory behind a `KvSpec`.

    A slot's token at position p is row `base_row(slot) + p` of every layer (`KvLayer.payload`), or what the table says
    in paged memory. Only rows inside granules the slot shows may be touched. Fresh memory is zero.

    For each plan, in order: `submit`, `wait`, `move`, then the step's kernels on the current stream.

    What a granule contains, it contains in every slot that shows it, until its block is taken otherwise than before:
    as a whole after single granules, or as single granules after a whole. Then its contents, and all views of it, are
    gone: slots that are to see the new granules must be shown them. A block may be taken otherwise, and a granule be
    shown anew, once no step in flight touches it, moves included. Contents of one granule are moved only while a slot
    shows it where `shares` is False.
    """

    shares: ClassVar[bool] = True
    """Whether several slots can show the same granule; where not, each granule is shown by at most one slot and
    slots must give up (`Hide`) what they do not use, since it is in the way of others."""

    sticky: ClassVar[bool] = False
    """Whether views that nobody needs any more may stay for ever, at no cost. Where not, slots should `Hide` them when
    their request ends: they are in the way of others, or use up the mappings a process may have."""

    background: ClassVar[bool] = False
    """Whether views are made beside the steps before, so that those that no step enters delay none."""

    def __init__(self, spec: KvSpec, shape: KvShape, device: torch.device) -> None:
        self.spec = spec
        self.shape = shape
        self.device = device
        self.stats = ArenaStats()

    @abstractmethod
    def submit(self, plan: MemoryPlan, rows: Rows | None = None) -> None:
        """Start a plan's views. Earlier plans' steps may still run: what they touch is left alone by the plan.

        `rows`: all that the step's kernels touch, besides the plan's moves. With None that may be everything that is
        shown, but for the plan's own views ahead.
        Raises `ValueError` for a plan that cannot be meant: numbers outside the arena, gaps, or contradictions.
        """

    def wait(self) -> None:
        """Return when all views that the step of the last submitted plan enters are in force, of whatever plan.

        Raises `MemoryError` if one of them failed; the slot then shows its granules before the failed position only,
        and the others are in force.
        """
        return

    def is_shown(self, slot: int, granules: int) -> bool:
        """Whether a step that enters a slot's first `granules` granules would not wait, of the plans submitted."""
        return True

    def hold(self) -> None:
        """Put off what no step waits for, so that the caller has Python's lock to itself, until `resume` or for a
        moment. Then come the views of the last plan, as the next step may enter them, and what is ahead."""
        return

    def resume(self) -> None:
        """End a `hold`."""
        return

    @abstractmethod
    def move(self, moves: Sequence[Copy | SwapOut | SwapIn]) -> None:
        """Queue the copies, in order, before what the current stream is given next; on CUDA those to the host run
        beside it, until a stream joins them."""

    @abstractmethod
    def join_moves(self, stream: torch.cuda.Stream) -> bool:
        """Let a CUDA stream wait for copies to the host that no stream has joined yet; False where there are none. A
        plan is carried out, and its granules may be written again, only after that."""

    @abstractmethod
    def base_row(self, slot: int) -> int:
        """Row of the slot's position 0 in every layer; may change with `submit` where `shares` is False."""

    def base_rows(self, slots: Ints) -> Ints:
        """`base_row` of many slots."""
        return np.array([self.base_row(slot) for slot in slots.tolist()], dtype=np.int64)

    @abstractmethod
    def granule_rows(self, slots: Ints, positions: Ints) -> Ints:
        """For single tokens that the slots show: the number of the granule · `granule_tokens` + the place in it."""

    @abstractmethod
    def granules(self, slot: int) -> Sequence[int]:
        """The granules a slot shows, first to last, by the plans submitted so far."""

    @abstractmethod
    def layer(self, index: int) -> KvLayer:
        """One layer; stable over the arena's life."""

    @abstractmethod
    def close(self) -> None:
        """Give the memory back; may be called again. Tensors of layers must not be used afterwards."""
