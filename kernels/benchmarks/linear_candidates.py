"""Schedules that `linear.py` tries: a short list for every number of rows, after what fits a Hopper multiprocessor."""

from dataclasses import replace

from bladellm_kernels.linear_schedules import GEMV_ROWS, DotSchedule, GemvSchedule, Schedule, power_of_two

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
WHOLE_BLOCKS = [(16, 256, 0, 4, 1), (32, 128, 0, 6, 2), (32, 256, 0, 4, 2), (64, 128, 0, 4, 4)]
TILES = {
    8: [*WHOLE_BLOCKS, (64, 128, 2, 4, 4), (64, 128, 3, 4, 4), (64, 256, 2, 3, 4), (128, 128, 2, 3, 8)],
    16: [*WHOLE_BLOCKS[1:], (64, 128, 2, 4, 4), (64, 128, 3, 3, 4), (64, 64, 3, 6, 4), (128, 64, 2, 5, 8)],
    32: [
        *((64, 128, 0, 4, 4), (64, 128, 2, 4, 4), (64, 64, 3, 5, 4), (128, 64, 2, 5, 8), (128, 128, 1, 5, 8)),
        *((64, 64, 0, 5, 4), (256, 64, 1, 5, 8)),
    ],
    64: [
        *((64, 64, 0, 4, 4), (64, 128, 2, 3, 4), (64, 64, 3, 4, 4), (128, 64, 2, 4, 8), (128, 128, 1, 4, 8)),
        *((128, 64, 0, 4, 8), (256, 64, 1, 4, 8)),
    ],
    128: [(64, 64, 2, 4, 4), (128, 64, 1, 6, 8), (128, 128, 1, 3, 8), (256, 64, 1, 4, 8), (128, 64, 1, 4, 8)],
    256: [(128, 64, 1, 4, 8), (128, 64, 1, 3, 8), (64, 64, 1, 5, 4), (128, 32, 1, 6, 8)],
}


def candidates(rows: int, gated: bool) -> list[Schedule]:
    """What to try for x of `rows` rows. Two tiles of a gate-up projection are half as large each."""
    block_m = max(8, power_of_two(rows))
    if gated and block_m > GATED_ROWS:
        return []
    found: list[Schedule] = list(GEMV) if rows <= GEMV_ROWS else []
    found += [
        DotSchedule(block_m, block_n, block_k, programs, stages, warps, prefetch=32 * KIB)
        for block_n, block_k, programs, stages, warps in TILES.get(block_m, [])
    ]
    return list(dict.fromkeys(_halved(schedule) for schedule in found)) if gated else found


def _halved(schedule: Schedule) -> Schedule:
    if isinstance(schedule, GemvSchedule) or schedule.block_n >= 64 * schedule.warps // 2:
        return replace(schedule, block_n=schedule.block_n // 2)
    return replace(schedule, block_k=schedule.block_k // 2)
