"""A kernel that reads rows of memory and nothing else: how fast attention could be at best."""

import torch
import triton
import triton.language as tl

_WARPS = 4
_IMPOSSIBLE = tl.constexpr(0x5A5A5A5A)


@triton.jit  # type: ignore[untyped-decorator]
def read_rows_kernel(
    memory: tl.tensor,
    found: tl.tensor,
    rows: tl.tensor,
    row_words: tl.tensor,
    words: tl.tensor,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """Program (i, j) reads ROWS rows, COLUMNS words of 4 bytes of each."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (row < rows)[:, None] & (column < words)[None, :]
    numbers = tl.load(memory + row[:, None] * row_words * 4 + column[None, :], mask=inside, other=0)
    # Kept by a store that is as good as never made.
    mixed = tl.xor_sum(tl.xor_sum(numbers, 1), 0)
    if mixed == _IMPOSSIBLE:
        tl.store(found, mixed)


def read_rows(memory: torch.Tensor, tile: int) -> None:
    """Read memory, bytes [rows, width] at multiples of 16, by programs of `tile` bytes."""
    rows, width = memory.shape
    found = torch.empty(1, dtype=torch.int32, device=memory.device)
    columns = min(triton.next_power_of_2(width // 4), tile // 4)
    count = max(1, tile // 4 // columns)
    grid = (triton.cdiv(rows, count), triton.cdiv(width // 4, columns))
    words = memory.view(torch.int32)
    read_rows_kernel[grid](
        words, found, rows, words.stride(0) // 4, width // 4, ROWS=count, COLUMNS=columns, num_warps=_WARPS
    )
