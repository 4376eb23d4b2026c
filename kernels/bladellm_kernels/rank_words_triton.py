"""Parts of the kernels that send words to other ranks' memory and wait for theirs; `rank_exchange` has the protocol."""

import triton
import triton.language as tl

from bladellm_kernels import rank_exchange

EMPTY = tl.constexpr(rank_exchange.EMPTY)
TURNS = tl.constexpr(rank_exchange.TURNS)

MOST_POLLS = 400_000_000
"""A wait of some 200 s, 0.5 µs a poll, longer than ranks may take to start: a rank that is gone is the watchdog's
matter, long before this."""


@triton.jit  # type: ignore[untyped-decorator]
def send(
    words: tl.tensor, peers: tl.tuple, turn: tl.tensor, rank: tl.tensor, place: tl.tensor, mask: tl.tensor,
    TURN: tl.constexpr, SLOT: tl.constexpr,
) -> None:  # fmt: skip
    """Write words of this rank to all ranks, itself too. place: in a slot of SLOT words, a turn has TURN of them."""
    words = tl.where(words == EMPTY, 0, words)
    for peer in tl.static_range(len(peers)):
        tl.store(peers[peer] + turn * TURN + rank * SLOT + place, words, mask=mask)


@triton.jit  # type: ignore[untyped-decorator]
def empty_last(
    places: tl.tensor, turn: tl.tensor, place: tl.tensor, mask: tl.tensor, RANKS: tl.constexpr, TURN: tl.constexpr,
    SLOT: tl.constexpr,
) -> None:  # fmt: skip
    """Empty what the turn before this one has read."""
    last = places + ((turn + TURNS - 1) % TURNS) * TURN
    for source in tl.static_range(RANKS):
        tl.store(last + source * SLOT + place, tl.full(place.shape, EMPTY, tl.int32), mask=mask)


@triton.jit  # type: ignore[untyped-decorator]
def received(
    slots: tl.tensor, place: tl.tensor, mask: tl.tensor, RANKS: tl.constexpr, SLOT: tl.constexpr
) -> tuple[tl.tuple, tl.tensor]:
    """One look at what came from each rank: its words, and whether any are still missing, more than 0 where so."""
    words: tl.tuple = ()
    for source in tl.static_range(RANKS):
        # Volatile: from the L2 cache, in which other GPUs write, and every time.
        words += (tl.load(slots + source * SLOT + place, mask=mask, other=0, volatile=True),)
    missing = tl.zeros(place.shape, tl.int32)
    for source in tl.static_range(RANKS):
        missing |= (words[source] == EMPTY).to(tl.int32)
    return words, tl.max(missing)


@triton.jit  # type: ignore[untyped-decorator]
def end_wait(missing: tl.tensor) -> None:
    """Where words are missing after the longest wait, end the kernel with an error: nothing that follows may run."""
    if missing > 0:
        tl.inline_asm_elementwise("trap; mov.u32 $0, $1;", "=r,r", [missing], tl.int32, is_pure=False, pack=1)


@triton.jit  # type: ignore[untyped-decorator]
def unpacked(words: tl.tensor, KIND: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """Both numbers of each word as float32, the lower half first; a float32 word is one number, the other 0."""
    if KIND.primitive_bitwidth == 32:
        low = words.to(tl.float32, bitcast=True)
        high = tl.zeros(words.shape, tl.float32)
    else:
        low = words.to(tl.int16).to(KIND, bitcast=True).to(tl.float32)
        high = (words >> 16).to(tl.int16).to(KIND, bitcast=True).to(tl.float32)
    return low, high


@triton.jit  # type: ignore[untyped-decorator]
def packed(low: tl.tensor, high: tl.tensor, KIND: tl.constexpr) -> tl.tensor:
    """The words of numbers, rounded."""
    if KIND.primitive_bitwidth == 32:
        words = low.to(tl.int32, bitcast=True)
    else:
        lower = low.to(KIND).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
        words = lower | (high.to(KIND).to(tl.int16, bitcast=True).to(tl.int32) << 16)
    return words
