"""Schedules that `fused_layer.py` tries for linear layers with norms."""

from bladellm_kernels.linear_schedules import HopperSchedule
from bladellm_kernels.power_of_two import power_of_two

# block_n, of both halves where there is a gate, block_k, programs, stages, warps: by rows.
TILES = {
    8: [(128, 64, 1, 6, 4), (64, 128, 1, 6, 4), (128, 64, 0, 6, 4), (128, 128, 1, 3, 4)],
    16: [(128, 64, 1, 6, 4), (64, 128, 1, 5, 4), (128, 64, 0, 6, 4), (128, 128, 1, 3, 4)],
    32: [(128, 64, 1, 5, 4), (128, 64, 0, 5, 4), (256, 64, 1, 5, 8), (128, 128, 1, 5, 4)],
    64: [(128, 64, 1, 4, 4), (128, 64, 0, 4, 4), (256, 64, 1, 5, 8), (128, 128, 1, 4, 4)],
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
