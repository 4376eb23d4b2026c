"""Linear layers on a Hopper by one kernel with what follows, SiLU · mul: of many rows, and of as few as a tile has."""

import torch

from bladellm_kernels.early_launch import early_launch
from bladellm_kernels.linear_hopper import described, fits, takes
from bladellm_kernels.linear_schedules import MANY_ROWS
from bladellm_kernels.many_rows_hopper import ROWS, STORED, ManyRowsTile, many_rows_kernel
from bladellm_kernels.multiprocessors import multiprocessors

COLUMNS, INPUTS = 256, 64
"""64 · 256 or 128 · 256 outputs a program: of the largest tiles that registers hold."""
RING_BYTES = 200 * 1024
BAND = 16
"""Tiles of rows: x of a band and as many bytes of the weight are what the programs of an H200 read at a time."""
LEAST_USED = 0.8
"""Of the multiprocessors, by a weight that passes once: fewer do not read it as fast as memory can."""


def many_rows_fits(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> bool:
    """Whether the kernel can read and write them: `linear_hopper.takes`, and rows of out at whole 16 bytes too."""
    return takes(x, weight) and fits(out)


def gate_columns(rows: int, outputs: int, device: torch.device) -> int | None:
    """Columns of a tile for a gate-up projection of so many rows and outputs; None where cuBLAS is faster. Few rows are
    bound by reading the weight: its tiles must be one to nearly every multiprocessor."""
    if rows >= MANY_ROWS:
        return COLUMNS
    most = multiprocessors(device)
    tiles = {columns: -(-outputs // (columns // 2)) for columns in (COLUMNS, COLUMNS // 2)}
    return next((columns for columns, count in tiles.items() if LEAST_USED * most <= count <= most), None)


def launch_many_rows(
    x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, parts: int, columns: int = COLUMNS, band: int = BAND
) -> None:
    """`out = x · weightᵀ`, or with parts = 2 silu(gate) · up of its two halves, summed in float32.

    x: [M, K]; weight: [parts · N, K]; out: [M, N]; half precision, of one type, `many_rows_fits`. columns: of a tile,
    of both halves; band: tiles of rows that are taken together.
    """
    rows, outputs = out.shape
    groups = 1 if rows <= ROWS.value else 2
    stages = RING_BYTES // (2 * INPUTS * (groups * ROWS.value + columns))
    tile = ManyRowsTile(groups, columns, INPUTS, stages, parts, band)
    tiles = -(-rows // (groups * ROWS.value)) * -(-outputs // (columns // parts))
    many_rows_kernel[(min(multiprocessors(x.device), tiles),)](
        described(x, ROWS.value, INPUTS),
        described(weight, columns // parts, INPUTS),
        described(out, ROWS.value, STORED.value),
        rows,
        outputs,
        x.shape[1],
        TILE=tile,
        num_warps=4,
        **early_launch(x.device),
    )
