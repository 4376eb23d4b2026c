"""The CUDA kernel that puts the columns of all ranks side by side, for rows that are few."""

import torch
import triton
import triton.language as tl

from bladellm_kernels.early_launch import early_launch, let_next_start, wait_for_inputs
from bladellm_kernels.multiprocessors import multiprocessors
from bladellm_kernels.rank_exchange import TURNS, Exchange
from bladellm_kernels.rank_words_triton import MOST_POLLS, empty_last, end_wait, received, send

_TURNS = tl.constexpr(TURNS)


# fmt: off
@triton.jit(do_not_specialize=["rank", "rows"])  # type: ignore[untyped-decorator]
def gather_ranks_kernel(
    x: tl.tensor, out: tl.tensor, peers: tl.tuple, places: tl.tensor, turns: tl.tensor, rank: tl.tensor,
    rows: tl.tensor,
    WORDS: tl.constexpr, ROWS: tl.constexpr, UNITS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
    POLLS: tl.constexpr, EARLY: tl.constexpr,
) -> None:
    """Each program takes units of WIDTH words of rows of WORDS, UNITS a row; it sends all before it waits for any."""
    let_next_start(EARLY)
    RANKS: tl.constexpr = len(peers)
    SLOT: tl.constexpr = ROWS * WORDS
    TURN: tl.constexpr = RANKS * SLOT
    column = tl.arange(0, BLOCK)
    wait_for_inputs(EARLY)
    for item in range(tl.program_id(0), rows * UNITS, tl.num_programs(0)):
        word = item % UNITS * WIDTH + column
        inside = (column < WIDTH) & (word < WORDS)
        place = item // UNITS * WORDS + word
        turn = tl.load(turns + item)
        send(tl.load(x + place, mask=inside, other=0), peers, turn, rank, place, inside, TURN, SLOT)
        empty_last(places, turn, place, inside, RANKS, TURN, SLOT)
    for item in range(tl.program_id(0), rows * UNITS, tl.num_programs(0)):
        row = item // UNITS
        word = item % UNITS * WIDTH + column
        inside = (column < WIDTH) & (word < WORDS)
        turn = tl.load(turns + item)
        slots, place = places + turn * TURN, row * WORDS + word
        words, missing = received(slots, place, inside, RANKS, SLOT)
        polls = 0
        while (missing > 0) & (polls < POLLS):
            words, missing = received(slots, place, inside, RANKS, SLOT)
            polls += 1
        end_wait(missing)
        for source in tl.static_range(RANKS):
            target = (row * RANKS + source).to(tl.int64) * WORDS
            tl.store(out + target + word, words[source], mask=inside)
        tl.store(turns + item, (turn + 1) % _TURNS)
# fmt: on


def launch_gather_ranks(exchange: Exchange, x: torch.Tensor, out: torch.Tensor, polls: int = MOST_POLLS) -> None:
    """x: [T, N]; out: [T, ranks · N] of x's type; both contiguous, a row of x is the exchange's words."""
    if len(x) == 0:
        return
    width = exchange.unit_words
    block = 1 << (width - 1).bit_length()
    programs = min(len(x) * exchange.units, multiprocessors(x.device))
    gather_ranks_kernel[(programs,)](
        x.view(torch.int32), out.view(torch.int32), exchange.peers, exchange.places, exchange.turns, exchange.rank,
        len(x), exchange.words, exchange.rows, exchange.units, width, block, polls,
        num_warps=max(1, min(8, block // 128)), **early_launch(x.device),
    )  # fmt: skip
