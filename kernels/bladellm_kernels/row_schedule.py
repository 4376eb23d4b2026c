"""How many threads an elementwise kernel gives to a row."""

from functools import cache

FEW_ROWS = 264
"""Two programs on each multiprocessor of an H200: up to here a row is spread over as many threads as it feeds."""

_FEW, _MANY = 16, 32
"""Bytes of an input that a thread reads: of few rows, which wait for memory once, and of many, which stream."""

_WARP = 32


@cache
def row_schedule(columns: int, itemsize: int, few: bool, most_warps: int = 16) -> tuple[int, int]:
    """(columns, warps) of a program that holds a whole row: a power of two from `columns` on, 1 to `most_warps`."""
    block = 1 << (columns - 1).bit_length()
    threads = block * itemsize // (_FEW if few else _MANY)
    return block, max(1, min(most_warps, threads // _WARP))
