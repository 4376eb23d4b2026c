"""How the kernels of `unit_linear` are launched: a table by the number of tokens.

The best of those that `kernels/benchmarks/unit_linear.py` timed on an H200 with layers of the Llama-3.1-8B shape,
4 bits in groups of 128.
"""

from dataclasses import dataclass


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
    """`stream_units_kernel`: programs that hold x of `warps` times `steps` steps of K for up to `tokens`, in registers,
    and go through tiles of `rows` outputs (16 or 32), codes of `depth` of them being asked for ahead."""

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


Schedule = Gemv | Streamed | ManyTokens | Dense

MIN_STEPS = 4
"""Fewest steps of K worth a program of its own."""

NARROW_ROWS = 8192
"""Up to so many outputs, small tiles are what fills the GPU."""

FEW_ROWS = 4096
LONG_COLUMNS = 8192
"""From so many inputs on, K is split or shared by more warps."""


def unit_schedule(tokens: int, rows: int, columns: int) -> Schedule:
    """The schedule for x of `tokens` rows and a weight [rows, columns]."""
    if tokens <= 8:
        return _gemv(rows, columns)
    if tokens <= 16:
        if rows <= NARROW_ROWS:
            return Gemv(rows=64, warps=4, steps=1, tokens=16, row_warps=2, programs_per_sm=2)
        return ManyTokens(rows=128, tokens=16, warps=4, stages=4, programs_per_sm=4)
    if tokens <= 32:
        if rows <= FEW_ROWS and columns < LONG_COLUMNS:
            return Gemv(rows=64, warps=4, steps=1, tokens=32, row_warps=2, programs_per_sm=1)
        return ManyTokens(rows=128, tokens=32, warps=8, stages=4, programs_per_sm=2)
    if tokens <= 64 and rows > NARROW_ROWS:
        return ManyTokens(rows=128, tokens=64, warps=4, stages=3, programs_per_sm=2)
    if tokens <= 128 or (tokens <= 256 and rows <= NARROW_ROWS):
        return ManyTokens(rows=128, tokens=64, warps=8, stages=4, programs_per_sm=2)
    if tokens <= 256:
        return ManyTokens(rows=256, tokens=128, warps=8, stages=3, programs_per_sm=1, fold=True)
    return Dense()


def _gemv(rows: int, columns: int) -> Gemv:
    """The schedule for up to 8 tokens."""
    if columns >= LONG_COLUMNS:
        return Gemv(rows=32, warps=8, steps=1, programs_per_sm=2)
    if rows <= FEW_ROWS:
        return Gemv(rows=16, warps=8, steps=4, registers=80)
    return Gemv(rows=16, warps=4, steps=4)


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


def stream_programs(schedule: Streamed, tiles: int, splits: int, processors: int) -> int:
    """Programs of `stream_units_kernel` that share `tiles` tiles in each of `splits` ranges of K: all run at once."""
    most = max(1, processors * schedule.programs_per_sm // splits)
    turns = -(-tiles // most)
    return -(-tiles // turns)
