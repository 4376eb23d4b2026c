"""How the kernels of `unit_linear` are launched: a table by the number of tokens.

The best of those that `kernels/benchmarks/unit_linear.py` timed on an H200 with layers of the Llama-3.1-8B shape,
4 bits in groups of 128.
"""

from dataclasses import dataclass
from typing import Literal

from bladellm_kernels.weight_units import TILE_ROWS


@dataclass(frozen=True, slots=True)
class Gemv:
    """`gemv_units_kernel`: programs of `rows` outputs (16 to 128) for up to `tokens`, their `warps` along K, each
    `steps` steps a round, times `row_warps` along the outputs.

    programs_per_sm: K is split until there are about so many programs; 0 for not at all. registers: most of a thread,
    so that enough programs fit an SM; None leaves it to the compiler.
    """

    rows: int
    warps: int
    steps: int
    tokens: int = 8
    row_warps: int = 1
    programs_per_sm: int = 0
    registers: int | None = None

    @property
    def round(self) -> int:
        """Steps of a program."""
        return self.warps * self.steps


@dataclass(frozen=True, slots=True)
class Streamed:
    """`stream_units_kernel`: programs that hold x of `warps` times `steps` steps of K for `tokens`, in registers, and
    go through tiles of `rows` outputs (16 or 32), codes of `depth` of them being asked for ahead. Of more tokens, up to
    4 times as many, each tile has its own programs."""

    rows: int
    warps: int
    steps: int
    depth: int
    tokens: int = 8
    programs_per_sm: int = 1

    @property
    def round(self) -> int:
        """Steps of a program."""
        return self.warps * self.steps

    @property
    def raw(self) -> bool:
        """Whether codes are multiplied as `128 + code`: there must be registers left for the sums of x."""
        return self.steps * self.tokens <= 16


@dataclass(frozen=True, slots=True)
class ManyTokens:
    """`many_tokens_kernel`: tiles of `rows` outputs (64, 128 or 256) and `tokens` tokens.

    programs_per_sm: K is split until there are about so many programs. fold: scales are multiplied into the codes and
    rounded to the activations' type: worth it where sums fill the registers.
    """

    rows: int
    tokens: int
    warps: int
    stages: int
    programs_per_sm: int
    prefetch: int = 128
    fold: bool = False


@dataclass(frozen=True, slots=True)
class Dense:
    """The weight dequantized to the activations' type, up to `rows` outputs at a time, and multiplied by cuBLAS."""

    rows: int = 1 << 14


@dataclass(frozen=True, slots=True)
class Ring:
    """`ring_units_kernel`: tiles of `outputs` (64, 128 or 256, at least 16 · warps; of the gate and again of what it
    multiplies), `steps` steps and `tokens`, of which `stages` are on their way, divided evenly among programs_per_sm
    programs a multiprocessor.

    warps: 4 or 8. late: with how many tiles to go a program lets the next kernel start, 0 for at once. fold: as above.
    """

    outputs: int
    tokens: int
    warps: int
    stages: int
    steps: int = 2
    programs_per_sm: int = 1
    late: int = 0
    fold: bool = False


NormSchedule = Gemv | Streamed | Ring
"""Of kernels that have a residual and norms."""

Schedule = NormSchedule | ManyTokens | Dense

MIN_STEPS = 4
"""Fewest steps of K worth a program of its own."""

MOST_SUMS = 8192
"""Sums that a program of `stream_units_kernel` adds up at a time."""

Kind = Literal["small", "middle", "wide", "long"]

LONG_COLUMNS = 8192
SMALL_ROWS, MIDDLE_ROWS = 4096, 8192

_MANY_16 = ManyTokens(rows=128, tokens=16, warps=4, stages=4, programs_per_sm=4)
_MANY_64 = ManyTokens(rows=128, tokens=64, warps=8, stages=4, programs_per_sm=2)
_MANY_64_WIDE = ManyTokens(rows=128, tokens=64, warps=4, stages=3, programs_per_sm=2)
_MANY_128 = ManyTokens(rows=256, tokens=128, warps=8, stages=3, programs_per_sm=1, fold=True)
_GEMV = Gemv(rows=16, warps=4, steps=4)
_STREAM = Streamed(rows=16, warps=16, steps=2, depth=1)
_STREAM_WIDE = Streamed(rows=16, warps=16, steps=2, depth=2)
_STREAM_LONG = Streamed(rows=16, warps=8, steps=2, depth=2, programs_per_sm=2)
_STREAM_16 = Streamed(rows=16, warps=16, steps=2, depth=1, tokens=16)
_GEMV_16 = Gemv(rows=64, warps=4, steps=1, tokens=16, row_warps=2, programs_per_sm=2)
_GEMV_32 = Gemv(rows=64, warps=4, steps=1, tokens=32, row_warps=2, programs_per_sm=1)
_RING_32 = Ring(outputs=64, tokens=32, warps=4, stages=4, programs_per_sm=2)
_RING_32_WIDE = Ring(outputs=128, tokens=32, warps=4, stages=3, programs_per_sm=2)

SCHEDULES: dict[int, dict[Kind, Schedule]] = {
    8: {"small": _STREAM, "middle": _GEMV, "wide": _STREAM_WIDE, "long": _STREAM_LONG},
    16: {"small": _STREAM_16, "middle": _STREAM_16, "wide": _MANY_16, "long": _GEMV_16},
    32: {"small": _GEMV_32, "middle": _RING_32, "wide": _RING_32_WIDE, "long": _RING_32},
    64: {"small": _MANY_64, "middle": _MANY_64, "wide": _MANY_64_WIDE, "long": _MANY_64},
    128: {"small": _MANY_64, "middle": _MANY_64, "wide": _MANY_64, "long": _MANY_64},
    256: {"small": _MANY_64, "middle": _MANY_64, "wide": _MANY_128, "long": _MANY_64},
}
"""By the largest number of tokens, and the kind of weight; beyond them `Dense`."""


_RING_16_GATED = Ring(outputs=64, tokens=16, warps=4, stages=4, programs_per_sm=2)
_RING_32_GATED = Ring(outputs=64, tokens=32, warps=4, stages=3, programs_per_sm=2)
_STREAM_GATED = Streamed(rows=16, warps=16, steps=2, depth=1)

NORM_SCHEDULES: dict[int, dict[Kind, NormSchedule]] = {
    8: {"small": _STREAM, "middle": _GEMV, "wide": _STREAM_GATED, "long": _STREAM_LONG},
    16: {"small": _STREAM_16, "middle": _STREAM_16, "wide": _RING_16_GATED, "long": _GEMV_16},
    32: {"small": _GEMV_32, "middle": _RING_32, "wide": _RING_32_GATED, "long": _RING_32},
}
"""The same of layers with norms. Those with a gate are wide, other wide ones take what is for middle ones."""


def norm_schedule(tokens: int, rows: int, columns: int, gated: bool) -> NormSchedule | None:
    """The schedule of a layer with norms, None where apart they are faster or a gate's outputs are no whole tiles."""
    if gated and rows % (2 * TILE_ROWS):
        return None
    kind = weight_kind(rows, columns)
    if gated != (kind == "wide"):
        kind = "wide" if gated else "middle"
    return next((kinds[kind] for most, kinds in NORM_SCHEDULES.items() if tokens <= most), None)


def unit_schedule(tokens: int, rows: int, columns: int) -> Schedule:
    """The schedule for x of `tokens` rows and a weight [rows, columns]."""
    kind = weight_kind(rows, columns)
    return next((kinds[kind] for most, kinds in SCHEDULES.items() if tokens <= most), Dense())


def weight_kind(rows: int, columns: int) -> Kind:
    """Of Llama-3-8B's layers: small is o, middle qkv, wide gate-up, long down."""
    if rows > MIDDLE_ROWS:
        return "wide"
    if columns >= LONG_COLUMNS:
        return "long"
    return "small" if rows <= SMALL_ROWS else "middle"


def split_count(schedule: ManyTokens, tiles: int, steps: int, processors: int) -> int:
    """Programs that share the K of one of `tiles` tiles: as many as fit at once, of at least `MIN_STEPS` steps."""
    fitting = processors * schedule.programs_per_sm // tiles
    splits = max(1, min(fitting, steps // MIN_STEPS))
    # Every program has steps: shares are rounded up.
    return -(-steps // -(-steps // splits))


def round_share(schedule: Gemv, tiles: int, steps: int, processors: int) -> int:
    """Steps of a program of `gemv_units_kernel`, whole rounds, where `tiles` tiles are to fill the GPU."""
    rounds = -(-steps // schedule.round)
    splits = max(1, min(processors * schedule.programs_per_sm // tiles, rounds))
    return -(-rounds // splits) * schedule.round


def stream_programs(schedule: Streamed, tiles: int, splits: int, token_tiles: int, processors: int) -> int:
    """Programs of `stream_units_kernel` that share `tiles` tiles in each of `splits` ranges of K and each tile of
    tokens: all run at once, and there are not more counters than tiles."""
    most = min(processors * schedule.programs_per_sm // splits, tiles) // token_tiles
    turns = -(-tiles // max(1, most))
    return -(-tiles // turns)


def stream_turns(schedule: Streamed, tiles: int, programs: int) -> int:
    """Tiles of one of `programs` programs whose splits are added up at a time: what the registers hold."""
    tiles_each = -(-tiles // programs)
    return min(1 << (tiles_each - 1).bit_length(), MOST_SUMS // (schedule.rows * schedule.tokens))
