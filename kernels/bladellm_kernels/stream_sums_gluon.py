"""What becomes of the sums of `stream_units_gluon`: warps' meet in shared memory, splits' in memory, and outputs are
written."""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


class Outputs(NamedTuple):
    """Where outputs go. y: [tokens, rows], of `tiles` tiles; scales: used where the weight has one group."""

    scales: gl.tensor
    bias: gl.tensor
    y: gl.tensor
    stride: gl.tensor
    tokens: gl.tensor
    rows: gl.tensor
    tiles: gl.tensor


@gluon.constexpr_function  # type: ignore[untyped-decorator]
def exchange_layout() -> gl.SwizzledSharedLayout:
    """Of sums [warps, outputs] in shared memory: four warps' sums of the same output lie in different banks."""
    return gl.SwizzledSharedLayout(8, 1, 4, [1, 0])


@gluon.constexpr_function  # type: ignore[untyped-decorator]
def added_layout(warps: int, outputs: int) -> gl.DistributedLinearLayout:
    """Of the same on the way from there: a thread adds up every fourth warp's sums."""
    across = [[0, 8 << bit] for bit in range(outputs.bit_length() - 4)]
    warp_bits = warps.bit_length() - 1
    in_warps = (across + [[0, 0]] * warp_bits)[:warp_bits]
    deep = [[4 << bit, 0] for bit in range(warp_bits - 2)]
    lanes = [[0, 1], [0, 2], [0, 4], [1, 0], [2, 0]]
    return gl.DistributedLinearLayout(deep + across[warp_bits:], lanes, in_warps, [], [warps, outputs])


@gluon.constexpr_function  # type: ignore[untyped-decorator]
def flat_layout(warps: int) -> gl.BlockedLayout:
    return gl.BlockedLayout([1], [32], [warps], [0])


@gluon.jit  # type: ignore[untyped-decorator]
def new_exchanges(DEPTH: gl.constexpr, WARPS: gl.constexpr, OUTPUTS: gl.constexpr) -> gl.tuple:
    """Shared memory for the sums of DEPTH tiles: what one tile's readers still read, the next one does not write."""
    exchanges: gl.tuple = ()
    for _tile in gl.static_range(DEPTH):
        exchanges += (gl.allocate_shared_memory(gl.float32, [WARPS, OUTPUTS], exchange_layout()),)
    return exchanges


@gluon.jit  # type: ignore[untyped-decorator]
def add_warps(
    total: gl.tensor, exchange: gl.shared_memory_descriptor, WARPS: gl.constexpr, OUTPUTS: gl.constexpr
) -> gl.tensor:
    """The sums over all warps, [OUTPUTS]."""
    exchange.store(gl.reshape(total, [WARPS, OUTPUTS]))
    return gl.sum(exchange.load(added_layout(WARPS, OUTPUTS)), 0)


@gluon.jit  # type: ignore[untyped-decorator]
def write_sums(
    sums: gl.tensor,
    place: gl.tensor,
    tile: gl.tensor,
    outputs: gl.tuple,
    partial: gl.tensor,
    SHAPE: gl.constexpr,
    ROWS: gl.constexpr,
    TOKENS: gl.constexpr,
    SPLITS: gl.constexpr,
    HAS_BIAS: gl.constexpr,
) -> None:
    """Write a tile's outputs or, where K is split, leave this split's sums where `join_splits` finds them."""
    if SPLITS == 1:
        _finish(sums, place, tile, outputs, SHAPE, ROWS, TOKENS, HAS_BIAS)
    else:
        wanted = (place % TOKENS < outputs.tokens) & (tile < outputs.tiles)
        slot = tile.to(gl.int64) * SPLITS + gl.program_id(1)
        gl.store(partial + slot * (ROWS * TOKENS) + place, sums, mask=wanted)


@gluon.jit  # type: ignore[untyped-decorator]
def join_splits(
    outputs: gl.tuple,
    partial: gl.tensor,
    arrived: gl.tensor,
    SHAPE: gl.constexpr,
    ROWS: gl.constexpr,
    TOKENS: gl.constexpr,
    WARPS: gl.constexpr,
    SPLITS: gl.constexpr,
    TURNS: gl.constexpr,
    HAS_BIAS: gl.constexpr,
) -> None:
    """The last program to come of those that share tiles adds up the sums of all of them, TURNS tiles at a time, writes
    the outputs and takes the counter back."""
    OUTPUTS: gl.constexpr = ROWS * TOKENS
    stride = gl.num_programs(0)
    # Every thread's share is stored before one of them says so.
    gl.thread_barrier()
    counter = arrived + gl.program_id(2) * stride + gl.program_id(0)
    if gl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == SPLITS - 1:
        places = gl.arange(0, TURNS * OUTPUTS, layout=flat_layout(WARPS))
        for first in range(gl.program_id(0), outputs.tiles, TURNS * stride):
            tile = first + places // OUTPUTS * stride
            stored = (places % TOKENS < outputs.tokens) & (tile < outputs.tiles)
            parts = partial + tile.to(gl.int64) * (SPLITS * OUTPUTS) + places % OUTPUTS
            whole = gl.load(parts, mask=stored, other=0.0, cache_modifier=".cg")
            for other in gl.static_range(1, SPLITS):
                whole += gl.load(parts + other * OUTPUTS, mask=stored, other=0.0, cache_modifier=".cg")
            _finish(whole, places % OUTPUTS, tile, outputs, SHAPE, ROWS, TOKENS, HAS_BIAS)
        gl.store(counter, 0)


@gluon.jit  # type: ignore[untyped-decorator]
def _finish(
    sums: gl.tensor,
    place: gl.tensor,
    tile: gl.tensor,
    outputs: gl.tuple,
    SHAPE: gl.constexpr,
    ROWS: gl.constexpr,
    TOKENS: gl.constexpr,
    HAS_BIAS: gl.constexpr,
) -> None:
    """Write outputs `place`, in [ROWS, TOKENS], of a tile."""
    number = tile * ROWS + place // TOKENS
    token = place % TOKENS
    wanted = (token < outputs.tokens) & (number < outputs.rows) & (tile < outputs.tiles)
    if SHAPE.group_steps == 0:
        # One group: scales lie in the order of the rows.
        sums *= gl.load(outputs.scales + number, mask=wanted, other=0.0).to(gl.float32)
    if HAS_BIAS:
        sums += gl.load(outputs.bias + number, mask=wanted, other=0.0).to(gl.float32)
    to = outputs.y + token.to(gl.int64) * outputs.stride + number
    gl.store(to, sums.to(outputs.y.dtype.element_ty), mask=wanted)
