"""The CUDA kernel of the same sums as `rank_sums_triton` in two steps, for more rows and ranks.

Each rank adds some rows and sends what it finds: a row leaves a rank twice rather than once for every other rank.

Row r is added by rank r % ranks. The words are sent as `rank_exchange` says, with the turns of a row counted once for
both steps: a rank sends the sums of a turn after it has read all parts of it, and parts of the next after the sums. The
results are those of one step, to the bit: the rank that adds a row adds the residual too, which all ranks have.
"""

import torch
import triton
import triton.language as tl

from bladellm_kernels.early_launch import early_launch, let_next_start, wait_for_inputs
from bladellm_kernels.multiprocessors import multiprocessors
from bladellm_kernels.rank_exchange import EMPTY, TURNS, WORD_BYTES, TwoShots
from bladellm_kernels.rank_sums_triton import KINDS, gathered_sum, weight_of, write_stream
from bladellm_kernels.rank_words_triton import MOST_POLLS, empty_last, end_wait, packed, received, unpacked

_TURNS = tl.constexpr(TURNS)
_EMPTY = tl.constexpr(EMPTY)


# fmt: off
@triton.jit  # type: ignore[untyped-decorator]
def _send_part(
    y: tl.tensor, peers: tl.tuple, turn: tl.tensor, rank: tl.tensor, row: tl.tensor, column: tl.tensor,
    inside: tl.tensor, WORDS: tl.constexpr, PART_ROWS: tl.constexpr,
) -> None:
    """Send a row of this rank to the one that adds it."""
    words = tl.load(y + row * WORDS + column, mask=inside, other=0)
    words = tl.where(words == _EMPTY, 0, words)
    place = ((turn * len(peers) + rank) * PART_ROWS + row // len(peers)) * WORDS + column
    for peer in tl.static_range(len(peers)):
        tl.store(peers[peer] + place, words, mask=inside & (row % len(peers) == peer))


@triton.jit  # type: ignore[untyped-decorator]
def _wait_for_sum(
    slots: tl.tensor, place: tl.tensor, inside: tl.tensor, SLOT: tl.constexpr, POLLS: tl.constexpr
) -> tl.tensor:
    """Its words, once they have come."""
    words, missing = received(slots, place, inside, 1, SLOT)
    polls = 0
    while (missing > 0) & (polls < POLLS):
        words, missing = received(slots, place, inside, 1, SLOT)
        polls += 1
    end_wait(missing)
    return words[0]


@triton.jit(do_not_specialize=["rank", "rows"])  # type: ignore[untyped-decorator]
def sum_ranks_in_two_kernel(
    y: tl.tensor, residual: tl.tensor, weight: tl.tensor, total: tl.tensor, out: tl.tensor, squares: tl.tensor,
    part_peers: tl.tuple, parts: tl.tensor, sum_peers: tl.tuple, sums: tl.tensor, turns: tl.tensor, rank: tl.tensor,
    rows: tl.tensor, eps: tl.tensor,
    N: tl.constexpr, WORDS: tl.constexpr, PART_ROWS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    KIND: tl.constexpr, POLLS: tl.constexpr, EARLY: tl.constexpr,
) -> None:
    """Each program sends rows, then adds rows and sends the sums, then takes the sums of the rows it sent."""
    let_next_start(EARLY)
    RANKS: tl.constexpr = len(part_peers)
    PART_SLOT: tl.constexpr = PART_ROWS * WORDS
    SLOT: tl.constexpr = ROWS * WORDS
    column = tl.arange(0, BLOCK)
    inside = column < WORDS
    wait_for_inputs(EARLY)
    for row in range(tl.program_id(0), rows, tl.num_programs(0)):
        turn = tl.load(turns + row)
        _send_part(y, part_peers, turn, rank, row, column, inside, WORDS, PART_ROWS)
        empty_last(sums, turn, row * WORDS + column, inside, 1, SLOT, SLOT)
    for row in range(tl.program_id(0) * RANKS + rank, rows, tl.num_programs(0) * RANKS):
        turn = tl.load(turns + row)
        part = row // RANKS * WORDS + column
        empty_last(parts, turn, part, inside, RANKS, RANKS * PART_SLOT, PART_SLOT)
        low, high = gathered_sum(parts + turn * (RANKS * PART_SLOT), part, inside, RANKS, PART_SLOT, KIND, POLLS)
        if residual is not None:
            stream_low, stream_high = unpacked(tl.load(residual + row * WORDS + column, mask=inside, other=0), KIND)
            low += stream_low
            high += stream_high
        words = packed(low, high, KIND)
        words = tl.where(words == _EMPTY, 0, words)
        for peer in tl.static_range(RANKS):
            tl.store(sum_peers[peer] + turn * SLOT + row * WORDS + column, words, mask=inside)
    for row in range(tl.program_id(0), rows, tl.num_programs(0)):
        turn = tl.load(turns + row)
        place = row * WORDS + column
        weight_words = weight_of(weight, column, inside)
        words = _wait_for_sum(sums + turn * SLOT, place, inside, SLOT, POLLS)
        write_stream(words, weight_words, total, out, squares, row, place, inside, eps, N, KIND)
        # Every thread has the turn by now, and so has the program that added this row, whose sum has come.
        tl.store(turns + row, (turn + 1) % _TURNS)
# fmt: on


def launch_sum_ranks_in_two(
    exchanges: TwoShots,
    y: torch.Tensor,
    total: torch.Tensor,
    residual: torch.Tensor | None = None,
    weight: torch.Tensor | None = None,
    eps: float = 0.0,
    out: torch.Tensor | None = None,
    squares: torch.Tensor | None = None,
    polls: int = MOST_POLLS,
) -> None:
    """As `launch_sum_ranks`, with one part of squares a row."""
    rows, numbers = y.shape
    if rows == 0:
        return
    words, parts, sums = numbers * y.element_size() // WORD_BYTES, exchanges.parts, exchanges.sums
    block = 1 << (words - 1).bit_length()
    asked = [each if each is None else each.view(torch.int32) for each in (y, residual, weight, total, out)]
    sum_ranks_in_two_kernel[(min(rows, multiprocessors(y.device)),)](
        *asked, squares, parts.peers, parts.places, sums.peers, sums.places, sums.turns, parts.rank, rows, eps,
        numbers, words, parts.rows, sums.rows, block, KINDS[y.dtype], polls,
        num_warps=max(1, min(16, block // 128)), **early_launch(y.device),
    )  # fmt: skip
