"""Schedules that `fused_layer.py` tries for linear layers with norms, and beside those of cuBLAS."""

from bladellm_kernels.linear_schedules import Entry, HopperSchedule, ScheduleTable, default_hopper_schedule
from bladellm_kernels.power_of_two import power_of_two
from fused_chain import Sizes

# block_n, of both halves where there is a gate, block_k, programs, stages, warps: by rows.
TILES = {
    8: [(128, 64, 1, 6, 4), (64, 128, 1, 6, 4), (128, 64, 0, 6, 4), (128, 128, 1, 3, 4)],
    16: [(128, 64, 1, 6, 4), (64, 128, 1, 5, 4), (128, 64, 0, 6, 4), (128, 128, 1, 3, 4)],
    32: [(128, 64, 1, 5, 4), (128, 64, 0, 5, 4), (256, 64, 1, 5, 8), (256, 32, 1, 5, 8)],
    64: [(128, 64, 1, 4, 4), (128, 64, 0, 4, 4), (256, 64, 1, 5, 8), (256, 32, 1, 5, 8)],
    128: [(128, 64, 1, 6, 8), (256, 64, 1, 4, 8)],
}


def norm_candidates(rows: int, gated: bool) -> list[HopperSchedule]:
    """What to try for x of `rows` rows. The two tiles of a gate-up projection are half as large each."""
    block_m = max(8, power_of_two(rows))
    return [
        HopperSchedule(block_m, block_n // (1 + gated), block_k, programs, stages, warps)
        for block_n, block_k, programs, stages, warps in TILES[block_m]
        # A warp multiplies by 16 outputs at least.
        if block_n // (1 + gated) >= 16 * warps
    ]


def one_layer_table(sizes: Sizes, name: str) -> ScheduleTable:
    """The layer of this name by the kernel for Hopper, up to 64 rows, all others by cuBLAS; a gate comes behind."""
    entries = {}
    for each, (outputs, inputs, gated) in sizes.shapes.items():
        schedules = [Entry(rows, default_hopper_schedule(rows)) for rows in (8, 16, 32, 64)]
        entries[(1 + gated) * outputs, inputs, False] = schedules if each == name else [Entry(64, None)]
    return ScheduleTable(entries)
