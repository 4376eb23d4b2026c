"""Schedules that `linear.py` tries: a short list for every number of rows, after what fits a Hopper multiprocessor."""

from collections.abc import Collection
from dataclasses import replace

from bladellm_kernels.linear_schedules import (
    GEMV_ROWS,
    KINDS,
    DotSchedule,
    GemvSchedule,
    HopperSchedule,
    Schedule,
)
from bladellm_kernels.power_of_two import power_of_two

KIB = 1024
GATED_ROWS = 128
"""Of more rows registers do not hold the sums of two tiles."""

GEMV = [
    GemvSchedule(4, 1024, 4, 8 * KIB),
    GemvSchedule(4, 512, 2, 8 * KIB),
    GemvSchedule(2, 1024, 4, 8 * KIB),
    GemvSchedule(8, 512, 4, 8 * KIB),
]

# block_n, block_k, programs, stages, warps: by rows.
TILES = {
    8: [(16, 256, 0, 4, 1), (32, 256, 0, 4, 2), (64, 128, 2, 4, 4), (64, 256, 2, 3, 4)],
    16: [(32, 128, 0, 6, 2), (32, 256, 0, 4, 2), (64, 128, 0, 4, 4), (64, 128, 2, 4, 4)],
    32: [(64, 128, 0, 4, 4), (64, 128, 2, 4, 4), (64, 64, 0, 5, 4)],
    64: [(64, 128, 2, 3, 4), (128, 128, 1, 4, 8), (128, 64, 0, 4, 8)],
    128: [(64, 64, 2, 4, 4), (128, 64, 1, 6, 8), (128, 128, 1, 3, 8), (128, 64, 1, 4, 8)],
    256: [(128, 64, 1, 4, 8), (128, 64, 1, 3, 8), (64, 64, 1, 5, 4), (128, 32, 1, 6, 8)],
}

# The same of kernels for Hopper; in half of the shared memory but for the last ones of 64 and 128 rows.
HOPPER_TILES = {
    8: [(128, 64, 1, 6, 4), (64, 128, 1, 6, 4), (128, 64, 0, 6, 4), (128, 128, 1, 3, 4)],
    16: [(128, 64, 1, 6, 4), (64, 128, 1, 5, 4), (128, 64, 0, 6, 4)],
    32: [(128, 64, 1, 5, 4), (64, 64, 1, 9, 4), (128, 64, 0, 5, 4)],
    64: [(128, 64, 1, 4, 4), (64, 64, 1, 6, 4), (128, 64, 0, 4, 4), (256, 64, 1, 5, 8)],
    128: [(64, 64, 1, 4, 4), (128, 64, 1, 6, 8)],
}


def candidates(rows: int, gated: bool, kinds: Collection[str] = tuple(KINDS)) -> list[Schedule]:
    """What to try for x of `rows` rows. Two tiles of a gate-up projection are half as large each."""
    block_m = max(8, power_of_two(rows))
    if gated and block_m > GATED_ROWS:
        return []
    found: list[Schedule] = list(GEMV) if rows <= GEMV_ROWS else []
    found += [
        DotSchedule(block_m, block_n, block_k, programs, stages, warps, prefetch=32 * KIB)
        for block_n, block_k, programs, stages, warps in TILES.get(block_m, [])
    ]
    found += [HopperSchedule(block_m, *tile) for tile in HOPPER_TILES.get(block_m, [])]
    found = [schedule for schedule in found if isinstance(schedule, tuple(KINDS[kind] for kind in kinds))]
    return list(dict.fromkeys(_halved(schedule) for schedule in found)) if gated else found


def _halved(schedule: Schedule) -> Schedule:
    if isinstance(schedule, GemvSchedule):
        return replace(schedule, block_n=schedule.block_n // 2)
    # A warp multiplies by 16 outputs at least.
    if schedule.block_n // 2 >= 16 * schedule.warps:
        return replace(schedule, block_n=schedule.block_n // 2)
    return replace(schedule, block_k=schedule.block_k // 2)
