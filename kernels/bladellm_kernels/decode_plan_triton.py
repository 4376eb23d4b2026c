"""The kernel that splits a decode step over programs; `decode_work.py` says how."""

import torch
import triton
import triton.language as tl

from bladellm_kernels.decode_work import power_of_two

_COMPARED = 8192
"""Pairs of a program and a sequence compared at once."""


@triton.jit(do_not_specialize=["batch", "count", "window"])  # type: ignore[untyped-decorator]
def decode_plan_kernel(
    kv_lens: tl.tensor,
    programs: tl.tensor,
    sequences: tl.tensor,
    batch: tl.tensor,
    count: tl.tensor,
    window: tl.tensor,
    WINDOWED: tl.constexpr,
    QUERY_LEN: tl.constexpr,
    BLOCK_KV: tl.constexpr,
    BATCH: tl.constexpr,
    PROGRAMS: tl.constexpr,
    CHUNK: tl.constexpr,
) -> None:
    """One program. count: programs of a KV head; those that get no block have an empty range."""
    sequence = tl.arange(0, BATCH)
    kv_len = tl.load(kv_lens + sequence, mask=sequence < batch, other=0)
    skipped = tl.zeros((BATCH,), tl.int64)
    if WINDOWED:
        skipped = tl.maximum(kv_len - QUERY_LEN + 1 - window, 0) // BLOCK_KV
    blocks = tl.where(kv_len > 0, (kv_len + BLOCK_KV - 1) // BLOCK_KV - skipped, 0)
    ends = tl.cumsum(blocks)
    total = tl.sum(blocks)
    shares = tl.minimum(total, count).to(tl.int64)
    # Program c holds block b where c · total // shares ≤ b < (c + 1) · total // shares.
    some = tl.maximum(total, 1)
    first = ((ends - blocks + 1) * shares - 1) // some
    last = (ends * shares - 1) // some
    row = sequences + sequence * 5
    inside = sequence < batch
    tl.store(row, (ends - blocks).to(tl.int32), mask=inside)
    tl.store(row + 1, ends.to(tl.int32), mask=inside)
    tl.store(row + 2, skipped.to(tl.int32), mask=inside)
    tl.store(row + 3, (first + sequence).to(tl.int32), mask=inside)
    tl.store(row + 4, tl.where(blocks > 0, last - first + 1, 0).to(tl.int32), mask=inside)
    for chunk in range(0, PROGRAMS, CHUNK):
        program = (chunk + tl.arange(0, CHUNK)).to(tl.int64)
        busy = program < shares
        begin = tl.where(busy, program * total // tl.maximum(shares, 1), 0)
        end = tl.where(busy, (program + 1) * total // tl.maximum(shares, 1), 0)
        passed = (ends[None, :] <= begin[:, None]) & inside[None, :]
        place = programs + program * 3
        tl.store(place, begin.to(tl.int32), mask=program < count)
        tl.store(place + 1, end.to(tl.int32), mask=program < count)
        tl.store(place + 2, tl.sum(passed.to(tl.int32), 1), mask=program < count)


def launch(
    kv_lens: torch.Tensor,
    window: int | None,
    query_len: int,
    block_kv: int,
    programs: torch.Tensor,
    sequences: torch.Tensor,
) -> None:
    """Fill `programs` and `sequences` (see `DecodeWork`) for sequences of kv_lens."""
    batch, count = len(sequences), len(programs)
    if batch == 0:
        programs.zero_()
        return
    padded, most = power_of_two(batch), power_of_two(count)
    decode_plan_kernel[(1,)](
        kv_lens, programs, sequences, batch, count, window or 0,
        WINDOWED=window is not None,
        QUERY_LEN=query_len,
        BLOCK_KV=block_kv,
        BATCH=padded,
        PROGRAMS=most,
        CHUNK=min(most, max(_COMPARED // padded, 1)),
        num_warps=8,
    )  # fmt: skip
