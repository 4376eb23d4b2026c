"""The CUDA kernel of sums over ranks, added to the residual stream and normalised, for rows that are few."""

import torch
import triton
import triton.language as tl

from bladellm_kernels.early_launch import early_launch, let_next_start, wait_for_inputs
from bladellm_kernels.multiprocessors import multiprocessors
from bladellm_kernels.rank_exchange import SUM_UNITS, TURNS, WORD_BYTES, Exchange
from bladellm_kernels.rank_words_triton import MOST_POLLS, empty_last, end_wait, packed, received, send, unpacked

KINDS = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
_TURNS = tl.constexpr(TURNS)
_LEAST_WORDS = 128
"""Of a program that shares its row: 16 bytes for each thread of a warp."""


# fmt: off
@triton.jit  # type: ignore[untyped-decorator]
def _sum(
    words: tl.tuple, KIND: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """In the order of the ranks, from 0 on, so that it does not matter which zero was sent."""
    low = tl.zeros(words[0].shape, tl.float32)
    high = tl.zeros(words[0].shape, tl.float32)
    for source in tl.static_range(len(words)):
        one, other = unpacked(words[source], KIND)
        low += one
        high += other
    return low, high


@triton.jit  # type: ignore[untyped-decorator]
def gathered_sum(
    slots: tl.tensor, place: tl.tensor, mask: tl.tensor, RANKS: tl.constexpr, SLOT: tl.constexpr, KIND: tl.constexpr,
    POLLS: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """The sums of all ranks' words, once they have come."""
    words, missing = received(slots, place, mask, RANKS, SLOT)
    low, high = _sum(words, KIND)
    polls = 0
    while (missing > 0) & (polls < POLLS):
        words, missing = received(slots, place, mask, RANKS, SLOT)
        low, high = _sum(words, KIND)
        polls += 1
    end_wait(missing)
    return low, high


@triton.jit  # type: ignore[untyped-decorator]
def weight_of(weight: tl.tensor, word: tl.tensor, inside: tl.tensor) -> tl.tensor:
    """Words of a norm's weight, zeros where there is none: loaded before the wait."""
    words = tl.zeros(word.shape, tl.int32)
    if weight is not None:
        words = tl.load(weight + word, mask=inside, other=0)
    return words


@triton.jit  # type: ignore[untyped-decorator]
def write_stream(
    words: tl.tensor, weight_words: tl.tensor, total: tl.tensor, out: tl.tensor, squares: tl.tensor, item: tl.tensor,
    place: tl.tensor, inside: tl.tensor, eps: tl.tensor, N: tl.constexpr, KIND: tl.constexpr,
) -> None:
    """Write words of the stream and, where out is not None, their norm or what it is made of; as in the kernels."""
    tl.store(total + place, words, mask=inside)
    if out is not None:
        low, high = unpacked(words, KIND)
        weight_low, weight_high = unpacked(weight_words, KIND)
        sum_of_squares = tl.sum(low * low + high * high, axis=0)
        if squares is not None:
            tl.store(squares + item, sum_of_squares)
        else:
            factor = tl.rsqrt(sum_of_squares / N + eps)
            low *= factor
            high *= factor
        tl.store(out + place, packed(low * weight_low, high * weight_high, KIND), mask=inside)


@triton.jit(do_not_specialize=["rank", "rows"])  # type: ignore[untyped-decorator]
def sum_ranks_kernel(
    y: tl.tensor, residual: tl.tensor, weight: tl.tensor, total: tl.tensor, out: tl.tensor, squares: tl.tensor,
    peers: tl.tuple, places: tl.tensor, turns: tl.tensor, rank: tl.tensor, rows: tl.tensor, eps: tl.tensor,
    N: tl.constexpr, WORDS: tl.constexpr, ROWS: tl.constexpr, UNITS: tl.constexpr, PARTS: tl.constexpr,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, KIND: tl.constexpr, POLLS: tl.constexpr, EARLY: tl.constexpr,
) -> None:
    """Each program takes parts of WIDTH words of rows of N numbers, PARTS a row; it sends all before it waits for any.

    residual, weight, out and squares are None where there are none. total gets the sum, rounded to KIND; out its norm,
    or, where there are squares, its product with weight.
    """
    let_next_start(EARLY)
    RANKS: tl.constexpr = len(peers)
    SLOT: tl.constexpr = ROWS * WORDS
    TURN: tl.constexpr = RANKS * SLOT
    column = tl.arange(0, BLOCK)
    wait_for_inputs(EARLY)
    for item in range(tl.program_id(0), rows * PARTS, tl.num_programs(0)):
        row, part = item // PARTS, item % PARTS
        word = part * WIDTH + column
        inside = (column < WIDTH) & (word < WORDS)
        turn = tl.load(turns + row * UNITS + part * (UNITS // PARTS))
        send(tl.load(y + row * WORDS + word, mask=inside, other=0), peers, turn, rank, row * WORDS + word, inside,
             TURN, SLOT)
        empty_last(places, turn, row * WORDS + word, inside, RANKS, TURN, SLOT)
    for item in range(tl.program_id(0), rows * PARTS, tl.num_programs(0)):
        row, part = item // PARTS, item % PARTS
        word = part * WIDTH + column
        inside = (column < WIDTH) & (word < WORDS)
        place = row * WORDS + word
        unit = row * UNITS + part * (UNITS // PARTS) + tl.arange(0, UNITS // PARTS)
        turn = tl.load(turns + row * UNITS + part * (UNITS // PARTS))
        if residual is not None:
            stream_low, stream_high = unpacked(tl.load(residual + place, mask=inside, other=0), KIND)
        weight_words = weight_of(weight, word, inside)
        low, high = gathered_sum(places + turn * TURN, place, inside, RANKS, SLOT, KIND, POLLS)
        if residual is not None:
            low += stream_low
            high += stream_high
        rounded = packed(low, high, KIND)
        write_stream(rounded, weight_words, total, out, squares, item, place, inside, eps, N, KIND)
        # Every thread has the turn by now: all took part in finding that nothing is missing.
        tl.store(turns + unit, tl.zeros([UNITS // PARTS], tl.int32) + (turn + 1) % _TURNS)
# fmt: on


def parts_of(rows: int, words: int, programs: int) -> int:
    """How many programs share a row of `words` words where no norm needs it whole: while all can run at once."""
    parts = SUM_UNITS
    while parts > 1 and (rows * parts > programs or words < parts * _LEAST_WORDS):
        parts //= 2
    return parts


def launch_sum_ranks(
    exchange: Exchange,
    y: torch.Tensor,
    total: torch.Tensor,
    parts: int,
    residual: torch.Tensor | None = None,
    weight: torch.Tensor | None = None,
    eps: float = 0.0,
    out: torch.Tensor | None = None,
    squares: torch.Tensor | None = None,
    polls: int = MOST_POLLS,
) -> None:
    """y, residual, total, out: [T, N], weight: [N], squares: float32 [T, parts]; all contiguous, at whole words."""
    rows, numbers = y.shape
    if rows == 0:
        return
    words = numbers * y.element_size() // WORD_BYTES
    width = exchange.unit_words * (exchange.units // parts)
    block = 1 << (min(width, words) - 1).bit_length()
    # One program on each multiprocessor at most: while one waits, all that it may wait for must run too.
    programs = min(rows * parts, multiprocessors(y.device))
    asked = [each if each is None else each.view(torch.int32) for each in (y, residual, weight, total, out)]
    sum_ranks_kernel[(programs,)](
        *asked, squares, exchange.peers, exchange.places, exchange.turns, exchange.rank, rows, eps, numbers, words,
        exchange.rows, exchange.units, parts, width, block, KINDS[y.dtype], polls,
        num_warps=max(1, min(16, block // _LEAST_WORDS)), **early_launch(y.device),
    )  # fmt: skip
