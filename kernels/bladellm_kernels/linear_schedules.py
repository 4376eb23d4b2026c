"""How linear layers of few rows are launched: by a table of measured schedules, or one rule for shapes not in it."""

import json
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from operator import attrgetter
from pathlib import Path

from bladellm_kernels.power_of_two import power_of_two

MAX_ROWS = 256
"""Most rows of x for kernels of our own, but for a gate of many rows: with more of them a linear layer is bound by
arithmetic, and left to cuBLAS, by its own choice or by an algorithm that was measured."""

MANY_ROWS = 1024
"""Rows of x from which on a gate-up projection and its SiLU · mul by `many_rows_linear` are faster than by cuBLAS and a
kernel behind it: 362 µs of 379 with 1,024 rows on an H200, 2,827 of 2,928 with 8,192 (Llama-3.1-8B)."""

GATE_ROWS = range(32, 129)
"""Rows of x for which they are faster, too, where the weight's tiles fill the multiprocessors once. On an H200 the norm
in front, gate-up, SiLU · mul and the layer behind take 92.1 µs of 93.3 with 32 rows, 93.4 of 98.9 with 64, 103.0 of
107.1 with 128; 96.1 instead of 94.6 with 24, 142.6 instead of 112.9 with 160."""

NORM_ROWS = (1, 16)
"""Fewest and most rows of x for which layers with norms are kernels, where nobody measured their shapes: for many rows
cuBLAS is faster."""

ALGORITHM_BYTES = 64
"""Of cublasLtMatmulAlgo_t."""

GEMV_ROWS = 4
"""Most rows of x for products without tensor cores: with more of them arithmetic is no longer hidden."""


def may_apply_gate(rows: int) -> bool:
    """Whether `many_rows_linear` may be faster than cuBLAS for a gate-up projection of so many rows."""
    return rows in GATE_ROWS or rows >= MANY_ROWS


@dataclass(frozen=True, slots=True)
class GemvSchedule:
    """Products in float32 without tensor cores; every program takes block_n outputs and the whole of K.

    block_n, block_k: a tile of the weight, powers of two; one is in registers while the next one is on its way.
    prefetch: bytes of the weight that a program asks into the L2 cache before its inputs are ready.
    """

    block_n: int
    block_k: int
    warps: int = 4
    prefetch: int = 0


@dataclass(frozen=True, slots=True)
class DotSchedule:
    """Tensor cores; the tiles of the weight, counted along K, are divided evenly among a fixed number of programs.

    block_m: columns of the product, at least the rows of x; block_n, block_k: a tile of the weight; powers of two.
    programs: per multiprocessor; 0 for one to every block of outputs, so that none is divided. stages: tiles on their
    way or in use. prefetch: as above.
    """

    block_m: int
    block_n: int
    block_k: int
    programs: int = 2
    stages: int = 4
    warps: int = 4
    prefetch: int = 0


@dataclass(frozen=True, slots=True)
class HopperSchedule:
    """Tensor cores of a Hopper, tiles by its copy engine; programs, block_m, block_n and block_k as above.

    block_n: a multiple of 64, of each half where there is a gate. stages: tiles in the ring, all of them on their way
    before the inputs are ready; where they take less than half of the shared memory the next layer's are, too. late:
    with how many tiles to go a program lets the next kernel start, 0 for at once. prefetch: as above, behind the ring.
    """

    block_m: int
    block_n: int
    block_k: int
    programs: int = 1
    stages: int = 6
    warps: int = 4
    late: int = 0
    prefetch: int = 0


@dataclass(frozen=True, slots=True)
class CublasLtSchedule:
    """An algorithm of cuBLASLt, for one version of it and one type of matrices; where either differs, plain cuBLAS.

    algorithm: the library's 64 bytes in hexadecimal. by_rows: the matrices are described to it as they lie in memory,
    not as their transposes, and no bias is added.
    """

    algorithm: str
    version: int
    dtype: str = "bfloat16"
    by_rows: bool = False

    def __post_init__(self) -> None:
        if len(bytes.fromhex(self.algorithm)) != ALGORITHM_BYTES:
            raise ValueError(f"algorithm must be {ALGORITHM_BYTES} bytes in hexadecimal, got {self.algorithm!r}")


@dataclass(frozen=True, slots=True)
class ClusterSchedule:
    """Tensor cores of a Hopper, inputs divided among a cluster of CTAs that add up in shared memory (`cluster_linear`).

    groups: consumer warpgroups, of 64 outputs each; cluster: CTAs to a tile of outputs; stages: tiles of 64 inputs on
    their way or in use. launch_at: when the next kernel may start: 0 at once, 1 after the last load, 2 after the last
    product. tokens: rows of x in a tile, a multiple of 8; None for no more than x has.
    """

    groups: int
    cluster: int
    stages: int
    launch_at: int = 1
    tokens: int | None = None


@dataclass(frozen=True, slots=True)
class WideSchedule:
    """Tensor cores of a Hopper, clusters that share rows of x and take tile after tile (`wide_linear`).

    tokens: rows of x in a tile, a multiple of 16; groups: consumer warpgroups, of 64 rows of the weight each; cluster:
    CTAs that share the rows of x, 1 or 2; band: tiles of rows that are taken together, so that their x stays in the L2
    cache; stages: of 64 inputs, on their way or in use, None for as many as fit. gated: SiLU · mul follows, and a group
    has 32 outputs of each half. stream_k: the tiles of the last two rounds are divided along their inputs, so that all
    clusters end at once.
    """

    tokens: int = 256
    groups: int = 2
    cluster: int = 2
    band: int = 16
    stages: int | None = None
    gated: bool = True
    stream_k: bool = False


_HALF_SHARED = 112 * 1024
"""Bytes of shared memory that programs of two kernels may take on an SM beside each other."""

Schedule = GemvSchedule | DotSchedule | HopperSchedule
"""Of kernels of our own."""

LinearSchedule = Schedule | CublasLtSchedule | ClusterSchedule | WideSchedule
KINDS: dict[str, type[Schedule]] = {"gemv": GemvSchedule, "dot": DotSchedule, "hopper": HopperSchedule}
_STORED: dict[str, type[LinearSchedule]] = {
    **KINDS,
    "cublaslt": CublasLtSchedule,
    "cluster": ClusterSchedule,
    "wide": WideSchedule,
}


@dataclass(frozen=True, slots=True)
class Entry:
    """The schedule of up to `rows` rows of x; None for cuBLAS."""

    rows: int
    schedule: LinearSchedule | None


_rows_of = attrgetter("rows")


@dataclass(frozen=True, slots=True)
class ScheduleTable:
    """entries: by outputs N, inputs K and whether SiLU · mul follows; ascending in rows. norm_rows: as `NORM_ROWS`."""

    entries: Mapping[tuple[int, int, bool], Sequence[Entry]] = field(default_factory=dict)
    norm_rows: tuple[int, int] = NORM_ROWS

    def choose(self, rows: int, outputs: int, inputs: int, gated: bool = False) -> LinearSchedule | None:
        """The schedule of x [rows, inputs] and a weight of `outputs` outputs, None for cuBLAS."""
        known = self.entries.get((outputs, inputs, gated))
        if not known:
            return default_schedule(rows, gated)
        place = bisect_left(known, rows, key=_rows_of)
        return known[place].schedule if place < len(known) else many_rows_schedule(rows, gated)

    def wide_schedules(self, outputs: int, inputs: int, gated: bool) -> set[WideSchedule]:
        """All that `choose` may take of a layer, whatever its rows."""
        found = {entry.schedule for entry in self.entries.get((outputs, inputs, gated), ())}
        found.add(many_rows_schedule(MANY_ROWS, gated))
        return {schedule for schedule in found if isinstance(schedule, WideSchedule)}

    def choose_with_norms(self, rows: int, outputs: int, inputs: int, gated: bool = False) -> HopperSchedule | None:
        """The same of a table for layers with norms, which kernels for Hopper alone have; None for other operators."""
        if (outputs, inputs, gated) not in self.entries:
            least, most = self.norm_rows
            return default_hopper_schedule(rows, gated) if least <= rows <= most else None
        schedule = self.choose(rows, outputs, inputs, gated)
        return schedule if isinstance(schedule, HopperSchedule) else None


def many_rows_schedule(rows: int, gated: bool) -> WideSchedule | None:
    """For more rows than anybody measured, None for cuBLAS, and what follows it."""
    return WideSchedule() if gated and rows >= MANY_ROWS else None


def default_schedule(rows: int, gated: bool = False) -> Schedule | WideSchedule | None:
    """For shapes nobody measured, None for cuBLAS: it was faster from 17 rows on with nearly all that were.

    About 48 KiB of weight must be under way in a multiprocessor for the bandwidth of its memory, and two programs of a
    schedule must fit its shared memory (227 KiB) beside each other.
    """
    if rows <= 2:
        return GemvSchedule(block_n=4 // (1 + gated), block_k=1024, prefetch=8192)
    if rows > 16:
        return many_rows_schedule(rows, gated)
    block_m = max(8, power_of_two(rows))
    return DotSchedule(block_m, block_n=64, block_k=128 // (1 + gated), stages=4, prefetch=32768)


def default_hopper_schedule(rows: int, gated: bool = False) -> HopperSchedule:
    """For shapes of layers with norms that nobody measured.

    One program an SM that takes just less than half of its shared memory: so each layer's programs fit beside those of
    the layer before, one everywhere. The more rows, the more outputs a tile of x is for.
    """
    block_m, parts = max(8, power_of_two(rows)), 1 + gated
    block_n, block_k = (64, 128) if block_m <= 16 else (128 // parts, 64)
    tile_bytes = 2 * block_k * (block_n * parts + block_m)
    return HopperSchedule(block_m, block_n, block_k, stages=_HALF_SHARED // tile_bytes)


def save_table(table: ScheduleTable, path: Path) -> None:
    """Write a table as JSON: a list of shapes with their entries."""
    shapes = [
        {"outputs": n, "inputs": k, "gated": gated, "entries": [_entry_fields(entry) for entry in entries]}
        for (n, k, gated), entries in table.entries.items()
    ]
    path.write_text(json.dumps(shapes, indent=1) + "\n")


def load_table(path: Path) -> ScheduleTable:
    """The table `save_table` wrote. Raises ValueError naming the shape where a field is wrong or rows do not ascend."""
    entries = {}
    for shape in json.loads(path.read_text()):
        key = (shape["outputs"], shape["inputs"], shape["gated"])
        try:
            entries[key] = tuple(_entry(fields) for fields in shape["entries"])
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path}, shape {key}: {error}") from error
        rows = [entry.rows for entry in entries[key]]
        if not rows or rows != sorted(set(rows)):
            raise ValueError(f"{path}, shape {key}: rows must ascend, got {rows}")
        if any(_gates(entry.schedule) not in (None, shape["gated"]) for entry in entries[key]):
            raise ValueError(f"{path}, shape {key}: a schedule applies a gate and the layer has none, or the reverse")
    return ScheduleTable(entries)


def _gates(schedule: LinearSchedule | None) -> bool | None:
    """Whether a schedule applies a gate; None where it is for both."""
    if isinstance(schedule, CublasLtSchedule | ClusterSchedule):
        return False
    return schedule.gated if isinstance(schedule, WideSchedule) else None


def _entry_fields(entry: Entry) -> dict[str, object]:
    kind = next((name for name, kind in _STORED.items() if isinstance(entry.schedule, kind)), "cublas")
    return {"rows": entry.rows, "kind": kind} | ({} if entry.schedule is None else asdict(entry.schedule))


def _entry(fields: dict[str, object]) -> Entry:
    values = dict(fields)
    rows, kind = values.pop("rows"), values.pop("kind")
    if not isinstance(rows, int):
        raise TypeError(f"rows must be a whole number, got {rows!r}")
    return Entry(rows, None if kind == "cublas" else _STORED[str(kind)](**values))  # type: ignore[arg-type]
