"""How the kernels of `unit_linear` are launched: a table by the number of tokens.

The best of those that `kernels/benchmarks/unit_linear.py` timed on an H200 with layers of the Llama-3.1-8B shape,
4 bits in groups of 128.
"""

from dataclasses import dataclass
from typing import Literal, get_args

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

    programs_per_sm: K is split until there are about so many programs.
    """

    rows: int
    tokens: int
    warps: int
    stages: int
    programs_per_sm: int
    prefetch: int = 128


@dataclass(frozen=True, slots=True)
class Dense:
    """The weight dequantized to the activations' type, up to `rows` outputs at a time, and multiplied by cuBLAS."""

    rows: int = 1 << 14


@dataclass(frozen=True, slots=True)
class Ring:
    """`ring_units_kernel`: a program a multiprocessor, of wide · deep (2 to 4) groups of four warps. Tiles are of
    `outputs` (64 or 128; of the gate and again of what it multiplies) of each of `wide` groups, `steps` steps and
    `tokens`; `deep` groups take them by turns, and `stages`, a multiple of deep, are there or on their way.

    splits: most programs that share the K of a block of outputs, fewer where the GPU has not as many; 0: tiles are
    divided evenly among all multiprocessors, whatever blocks they belong to. fold: scales are multiplied into the codes
    and rounded to the activations' type: worth it where sums fill the registers. ahead: stages that are asked for
    before the inputs are ready, 0 for all: what a small kernel in front reads waits behind them.
    """

    outputs: int
    tokens: int
    wide: int
    stages: int
    steps: int = 2
    deep: int = 1
    splits: int = 0
    fold: bool = False
    ahead: int = 0


MOST_TOKENS_OF_WARPS = 8
"""Of a product of a warp."""


@dataclass(frozen=True, slots=True)
class WarpRings:
    """`warp_units`, of 4 bits and up to 8 tokens: CTAs of `warps` warps, each of which has a ring of `stages` stages of
    its own, and its own steps of K. Outputs are divided evenly among the multiprocessors.

    ahead: stages that are asked for before the inputs are ready, 0 for all. ctas_per_sm: for which registers are left.
    """

    stages: int
    warps: int = 16
    ahead: int = 0
    ctas_per_sm: int = 1

    def __post_init__(self) -> None:
        if self.stages < 2 or self.warps not in (8, 16, 32):
            raise ValueError(f"rings have 2 stages or more, of 8, 16 or 32 warps: {self}")

    @property
    def tokens(self) -> int:
        """Most of them."""
        return MOST_TOKENS_OF_WARPS


NormSchedule = Gemv | Streamed | Ring | WarpRings
"""Of kernels that have a residual and norms."""

Schedule = NormSchedule | ManyTokens | Dense

MIN_STEPS = 4
"""Fewest steps of K worth a program of its own."""

MOST_SUMS = 8192
"""Sums that a program of `stream_units_kernel` adds up at a time."""

Kind = Literal["small", "middle", "broad", "wide", "long"]

LONG_COLUMNS = 8192
SMALL_ROWS, MIDDLE_ROWS, BROAD_ROWS = 4096, 8192, 16384

_MANY_64 = ManyTokens(rows=128, tokens=64, warps=8, stages=4, programs_per_sm=2)
_MANY_64_WIDE = ManyTokens(rows=128, tokens=64, warps=4, stages=3, programs_per_sm=2)
_GEMV = Gemv(rows=16, warps=4, steps=4)
_STREAM = Streamed(rows=16, warps=16, steps=2, depth=2)
_STREAM_LONG = Streamed(rows=16, warps=8, steps=2, depth=2, programs_per_sm=2)
_RING_FEW = Ring(outputs=64, tokens=8, wide=1, stages=9, steps=1, deep=3, splits=2, ahead=3)
_RING_WIDE = {
    most: Ring(outputs=64, tokens=most, wide=4, stages=4, splits=1, ahead=ahead)
    for most, ahead in ((8, 1), (16, 0), (32, 0))
}
_RING = {
    most: Ring(outputs=64, tokens=most, wide=1, stages=9 if most <= 32 else 6, steps=1, deep=3, splits=4)
    for most in (16, 32, 64)
}
_RING_128 = Ring(outputs=64, tokens=128, wide=1, stages=4, steps=1, deep=2, splits=1, fold=True)
_RING_WIDE_128 = Ring(outputs=64, tokens=128, wide=2, stages=3, steps=1, splits=1, fold=True)


def _of_all(schedule: Schedule) -> dict[Kind, Schedule]:
    return dict.fromkeys(get_args(Kind), schedule)


SCHEDULES: dict[int, dict[Kind, Schedule]] = {
    4: {"small": _STREAM, "middle": _GEMV, "wide": _RING_WIDE[8], "broad": _STREAM, "long": _STREAM_LONG},
    8: {"small": _STREAM, "middle": _RING_FEW, "wide": _RING_WIDE[8], "broad": _STREAM, "long": _STREAM_LONG},
    16: _of_all(_RING[16]) | {"wide": _RING_WIDE[16]},
    32: _of_all(_RING[32]) | {"wide": _RING_WIDE[32]},
    64: _of_all(_RING[64]) | {"wide": _MANY_64_WIDE},
    96: _of_all(_MANY_64) | {"middle": _RING_128, "wide": _RING_WIDE_128},
    128: _of_all(_RING[64]) | {"middle": _RING_128, "wide": _RING_WIDE_128},
    192: _of_all(_MANY_64) | {"small": _RING[64], "wide": _RING_WIDE_128, "long": _RING[64]},
    256: _of_all(_MANY_64) | {"wide": _RING_WIDE_128},
}
"""By the largest number of tokens, and the kind of weight; beyond them `Dense`."""


GATED_SCHEDULES = {
    32: Ring(outputs=64, tokens=32, wide=2, stages=3, splits=1, ahead=1),
    64: Ring(outputs=64, tokens=64, wide=2, stages=3, steps=1, splits=1),
    256: _RING_WIDE_128,
}
"""The same of gate-up projections that apply the gate, without a norm."""

LEAST_GATED = 17
"""Fewest tokens of those: an operator apart is as fast of fewer."""

_WARPS = WarpRings(stages=3, warps=16)
_RING_GATED = Ring(outputs=64, tokens=16, wide=2, stages=4, splits=1)

NORM_SCHEDULES: dict[int, dict[Kind, NormSchedule]] = {
    8: {"small": _WARPS, "middle": _GEMV, "wide": _WARPS, "long": _WARPS},
    16: {"small": _RING[16], "middle": _RING[16], "wide": _RING_GATED, "long": _RING[16]},
}
"""The same of layers with norms, whatever their groups. Those with a gate are wide, other wide ones take what is for
middle ones."""


def norm_schedule(
    tokens: int, rows: int, columns: int, gated: bool, rings: bool = True, warps: bool = True
) -> NormSchedule | None:
    """The schedule of a layer with norms, None where apart they are faster or a gate's outputs are no whole tiles.

    rings, warps: whether there is the kernel of `Ring`, and that of `WarpRings`, for the device and the weight; without
    it there is no schedule in its place."""
    if gated and rows % (2 * TILE_ROWS):
        return None
    kind = weight_kind(rows, columns)
    if gated:
        kind = "wide"
    elif kind in ("wide", "broad"):
        kind = "middle"
    chosen = next((kinds[kind] for most, kinds in NORM_SCHEDULES.items() if tokens <= most), None)
    missing = (isinstance(chosen, Ring) and not rings) or (isinstance(chosen, WarpRings) and not warps)
    return None if missing else chosen


def gated_schedule(tokens: int, rows: int, fine: bool = False, rings: bool = True) -> Ring | None:
    """The schedule of a gate-up projection of `rows` outputs, None where the gate is better applied apart; arguments as
    in `unit_schedule`."""
    if not rings or fine or tokens < LEAST_GATED or rows % (2 * TILE_ROWS):
        return None
    return next((ring for most, ring in GATED_SCHEDULES.items() if tokens <= most), None)


def unit_schedule(tokens: int, rows: int, columns: int, fine: bool = False, rings: bool = True) -> Schedule:
    """The schedule for x of `tokens` rows and a weight [rows, columns]; fine: with several groups in a step; rings:
    whether the device has the kernel of `Ring`."""
    kind = weight_kind(rows, columns)
    kind = "broad" if kind == "wide" and (fine or not rings) else kind
    chosen = next((kinds[kind] for most, kinds in SCHEDULES.items() if tokens <= most), Dense())
    if isinstance(chosen, Ring) and not rings:
        return _GEMV if tokens <= _GEMV.tokens else _MANY_64
    return chosen


def weight_kind(rows: int, columns: int) -> Kind:
    """Of Llama-3-8B's layers: small is o, middle qkv, wide gate-up, broad what lies between these two, long down."""
    if rows > MIDDLE_ROWS:
        return "wide" if rows > BROAD_ROWS else "broad"
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


def ring_programs(schedule: Ring, blocks: int, length: int, processors: int) -> int:
    """Programs of `ring_units_kernel` for so many blocks of outputs, `length` tiles each: at most one a processor."""
    splits = min(schedule.splits, length, processors // blocks)
    return blocks * splits if splits else min(processors, blocks * length)


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
