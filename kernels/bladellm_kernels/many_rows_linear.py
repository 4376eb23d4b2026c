"""Linear layers of many rows on a Hopper by one kernel with what follows: SiLU · mul."""

import torch

from bladellm_kernels.early_launch import early_launch
from bladellm_kernels.linear_hopper import described, fits, takes
from bladellm_kernels.many_rows_hopper import GROUPS, ROWS, STORED, ManyRowsTile, many_rows_kernel
from bladellm_kernels.multiprocessors import multiprocessors

COLUMNS, INPUTS, STAGES = 256, 64, 4
"""128 · 256 outputs a program: of the largest tile that registers hold. The ring takes 192 KiB."""
BAND = 16
"""Tiles of rows: x of a band and as many bytes of the weight are what the programs of an H200 read at a time."""


def many_rows_fits(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> bool:
    """Whether the kernel can read and write them: `linear_hopper.takes`, and rows of out at whole 16 bytes too."""
    return takes(x, weight) and fits(out)


def launch_many_rows(
    x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, parts: int, band: int = BAND, stages: int = STAGES
) -> None:
    """`out = x · weightᵀ`, or with parts = 2 silu(gate) · up of its two halves, summed in float32.

    x: [M, K]; weight: [parts · N, K]; out: [M, N]; half precision, of one type, `many_rows_fits`.
    """
    tile = ManyRowsTile(COLUMNS, INPUTS, stages, parts, band)
    rows, outputs = out.shape
    tiles = -(-rows // (GROUPS.value * ROWS.value)) * -(-outputs // (COLUMNS // parts))
    many_rows_kernel[(min(multiprocessors(x.device), tiles),)](
        described(x, ROWS.value, INPUTS),
        described(weight, COLUMNS // parts, INPUTS),
        described(out, ROWS.value, STORED.value),
        rows,
        outputs,
        x.shape[1],
        TILE=tile,
        num_warps=4,
        **early_launch(x.device),
    )
