"""How the kernels of `unit_linear` are launched: a table by the number of tokens.

Chosen by registers, instructions a weight and bytes from the L2 cache; `kernels/benchmarks/unit_linear.py` measures
other schedules beside it.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class FewTokens:
    """`few_tokens_kernel`: programs of `rows` outputs (16, 32 or 64), their `warps` along K, for up to `tokens`.

    prefetch: lines of 128 bytes of the weight each program asks for before it waits for its inputs, a power of two.
    """

    rows: int
    warps: int
    stages: int
    prefetch: int = 256
    tokens: int = 8


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


Schedule = FewTokens | ManyTokens | Dense

MIN_STEPS = 4
"""Fewest steps of K worth a program of its own."""

NARROW_ROWS = 8192
"""Up to so many outputs, halving the rows of a program is what fills the GPU."""


def linear_schedule(tokens: int, rows: int) -> Schedule:
    """The schedule for x of `tokens` rows and a weight of `rows` outputs."""
    if tokens <= 4:
        return FewTokens(rows=16 if rows <= NARROW_ROWS else 32, warps=8, stages=4)
    if tokens <= 8:
        return ManyTokens(rows=64, tokens=8, warps=4, stages=5, programs_per_sm=4)
    if tokens <= 16:
        return ManyTokens(rows=128, tokens=16, warps=4, stages=4, programs_per_sm=3)
    if tokens <= 32:
        return ManyTokens(rows=128, tokens=32, warps=4, stages=4, programs_per_sm=3)
    if tokens <= 64:
        return ManyTokens(rows=128, tokens=64, warps=8, stages=4, programs_per_sm=2)
    if tokens <= 256:
        return ManyTokens(rows=128, tokens=128, warps=8, stages=3, programs_per_sm=1)
    return Dense()


def split_count(schedule: ManyTokens, tiles: int, steps: int, processors: int) -> int:
    """Programs that share the K of one of `tiles` tiles: as many as fit at once, of at least `MIN_STEPS` steps."""
    fitting = processors * schedule.programs_per_sm // tiles
    splits = max(1, min(fitting, steps // MIN_STEPS))
    # Every program has steps: shares are rounded up.
    return -(-steps // -(-steps // splits))
