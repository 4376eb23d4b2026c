"""What becomes of the sums of `stream_units_gluon`: warps' meet in shared memory, splits' in memory, and outputs are
written by `linear_outputs_hopper`."""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from bladellm_kernels.linear_outputs_hopper import (
    factors_of,
    leave_squares,
    norm_weight_at,
    residual_at,
    write_outputs,
)
from bladellm_kernels.unit_operands_gluon import scales_at


class StreamTile(NamedTuple):
    """What the kernel is compiled for. rows, tokens: of a tile of outputs; warps: of a program, each of which has so
    many steps of K; depth: tiles whose codes are asked for ahead.

    parts: 2 where an output is `silu` of a row's product times that of a row as far behind it as there are outputs,
    which are whole tiles then. splits: programs among which K is divided; turns: tiles whose splits are added up at a
    time, a power of two. squares: of a norm in front, most partial sums a row has, a power of two. raw: whether codes
    are multiplied as `128 + code`.
    """

    rows: int
    tokens: int
    warps: int
    steps: int
    depth: int
    parts: int
    splits: int
    turns: int
    squares: int
    raw: bool


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
def tile_layout(tile: StreamTile) -> gl.DistributedLinearLayout:
    """Of what they add up to, as a tile's sums [rows, tokens]."""
    rows, tokens, warp_bits = tile.rows, tile.tokens, tile.warps.bit_length() - 1
    outputs = rows * tokens
    places = [[(1 << bit) // tokens, (1 << bit) % tokens] for bit in range(outputs.bit_length() - 1)]
    across = places[3:]
    in_warps = (across + [[0, 0]] * warp_bits)[:warp_bits]
    lanes = [*places[:3], [0, 0], [0, 0]]
    return gl.DistributedLinearLayout(across[warp_bits:], lanes, in_warps, [], [rows, tokens])


@gluon.constexpr_function  # type: ignore[untyped-decorator]
def joined_layout(warps: int, tokens: int) -> gl.BlockedLayout:
    """Of sums [rows, tokens] on the way from memory, where they lie row by row."""
    lanes = min(32, tokens)
    return gl.BlockedLayout([1, 1], [32 // lanes, lanes], [warps, 1], [1, 0])


@gluon.jit  # type: ignore[untyped-decorator]
def new_exchanges(TILE: gl.constexpr) -> gl.tuple:
    """Shared memory for the sums of as many tiles as are under way: what one tile's readers still read, the next one
    does not write."""
    COUNT: gl.constexpr = TILE.depth * TILE.parts
    WARPS: gl.constexpr = TILE.warps
    OUTPUTS: gl.constexpr = TILE.rows * TILE.tokens
    exchanges: gl.tuple = ()
    for _tile in gl.static_range(COUNT):
        exchanges += (gl.allocate_shared_memory(gl.float32, [WARPS, OUTPUTS], exchange_layout()),)
    return exchanges


@gluon.jit  # type: ignore[untyped-decorator]
def add_warps(
    total: gl.tensor,
    exchange: gl.shared_memory_descriptor,
    TILE: gl.constexpr,
) -> gl.tensor:
    """The sums over all warps, [ROWS, TOKENS]."""
    WARPS: gl.constexpr = TILE.warps
    ROWS: gl.constexpr = TILE.rows
    TOKENS: gl.constexpr = TILE.tokens
    OUTPUTS: gl.constexpr = ROWS * TOKENS
    exchange.store(gl.reshape(total, [WARPS, OUTPUTS]))
    sums = gl.reshape(gl.sum(exchange.load(added_layout(WARPS, OUTPUTS)), 0), [ROWS, TOKENS])
    return gl.convert_layout(sums, tile_layout(TILE), assert_trivial=True)


@gluon.jit  # type: ignore[untyped-decorator]
def _numbers(ROWS: gl.constexpr, TOKENS: gl.constexpr, LAYOUT: gl.constexpr) -> gl.tuple:
    """Of rows and tokens."""
    row = gl.arange(0, ROWS, layout=gl.SliceLayout(1, LAYOUT))
    return row, gl.arange(0, TOKENS, layout=gl.SliceLayout(0, LAYOUT))


@gluon.jit  # type: ignore[untyped-decorator]
def token_factors(front: gl.tuple | None, inputs: gl.tuple, TILE: gl.constexpr) -> gl.tuple:
    """What a tile's sums of each token are multiplied by, or nothing where no norm is in front or splits are joined
    first."""
    OF_TOKENS: gl.constexpr = gl.SliceLayout(0, tile_layout(TILE))
    found: gl.tuple = ()
    if TILE.splits == 1:
        found = factors_of(front, inputs.tokens, inputs.columns, TILE.tokens, TILE.squares, TILE.warps, OF_TOKENS)
    return found


@gluon.jit  # type: ignore[untyped-decorator]
def ask_for_tile(
    outs: gl.tuple,
    weight: gl.tuple,
    tile: gl.tensor,
    SHAPE: gl.constexpr,
    TILE: gl.constexpr,
) -> gl.tuple:
    """Of a tile that no other program writes, or that is beyond the last one: the residual, weights of the norm behind
    and scales of each part where the weight has one group; nothing where another program joins the splits."""
    ROWS: gl.constexpr = TILE.rows
    found: gl.tuple = ()
    if TILE.splits == 1:
        row, token = _numbers(TILE.rows, TILE.tokens, tile_layout(TILE))
        output = tile * ROWS + row
        scales = scales_at(weight, output, outs.outputs, SHAPE, TILE.parts)
        found = (residual_at(outs, output, token), norm_weight_at(outs, output), scales)
    return found


@gluon.jit  # type: ignore[untyped-decorator]
def no_squares(outs: gl.tuple, TILE: gl.constexpr) -> gl.tuple:
    """The squares of no outputs, or nothing where no norm is behind."""
    ROWS: gl.constexpr = TILE.rows
    TOKENS: gl.constexpr = TILE.tokens
    found: gl.tuple = ()
    if outs.behind is not None:
        found += (gl.zeros([ROWS, TOKENS], gl.float32, tile_layout(TILE)),)
    return found


@gluon.jit  # type: ignore[untyped-decorator]
def finish_tile(
    sums: gl.tuple,
    factors: gl.tuple,
    asked: gl.tuple,
    squares: gl.tuple,
    outs: gl.tuple,
    tile: gl.tensor,
    TILE: gl.constexpr,
) -> gl.tuple:
    """Write a tile's outputs and return the squares with those of it. asked: of `ask_for_tile`."""
    row, token = _numbers(TILE.rows, TILE.tokens, tile_layout(TILE))
    residual, norm_weight, scales = asked
    more = write_outputs(_by_scales(sums, scales), factors, residual, norm_weight, outs, tile * TILE.rows + row, token)
    if len(squares) == 1:
        squares = (squares[0] + more,)
    return squares


@gluon.jit  # type: ignore[untyped-decorator]
def _by_scales(sums: gl.tuple, scales: gl.tuple) -> gl.tuple:
    """Each part's sums times the scales of its rows, where there are any."""
    PARTS: gl.constexpr = len(sums)
    found: gl.tuple = sums
    if len(scales) > 0:
        found = ()
        for part in gl.static_range(PARTS):
            found += (sums[part] * scales[part][:, None],)
    return found


@gluon.jit  # type: ignore[untyped-decorator]
def leave_program_squares(squares: gl.tuple, outs: gl.tuple, TILE: gl.constexpr) -> None:
    """The sums of a program's squares, as one part of all."""
    if len(squares) == 1:
        _, token = _numbers(TILE.rows, TILE.tokens, tile_layout(TILE))
        leave_squares(squares[0], outs, token, gl.program_id(0), gl.num_programs(0))


@gluon.jit  # type: ignore[untyped-decorator]
def leave_sums(
    sums: gl.tuple,
    outs: gl.tuple,
    tile: gl.tensor,
    tiles: gl.tensor,
    partial: gl.tensor,
    TILE: gl.constexpr,
) -> None:
    """Leave this split's sums of a tile where `join_splits` finds them."""
    ROWS: gl.constexpr = TILE.rows
    TOKENS: gl.constexpr = TILE.tokens
    PARTS: gl.constexpr = len(sums)
    row, token = _numbers(TILE.rows, TILE.tokens, tile_layout(TILE))
    place = row[:, None] * TOKENS + token[None, :]
    wanted = (token < outs.rows)[None, :] & (row < ROWS)[:, None] & (tile < tiles)
    for part in gl.static_range(PARTS):
        slot = (tile.to(gl.int64) * PARTS + part) * TILE.splits + gl.program_id(1)
        gl.store(partial + slot * (ROWS * TOKENS) + place, sums[part], mask=wanted)


@gluon.jit  # type: ignore[untyped-decorator]
def join_splits(
    outs: gl.tuple,
    weight: gl.tuple,
    front: gl.tuple | None,
    columns: gl.tensor,
    tiles: gl.tensor,
    partial: gl.tensor,
    arrived: gl.tensor,
    SHAPE: gl.constexpr,
    TILE: gl.constexpr,
) -> None:
    """The last program to come of those that share tiles adds up the sums of all of them, TURNS tiles at a time, writes
    the outputs and takes the counter back."""
    ROWS: gl.constexpr = TILE.rows
    TOKENS: gl.constexpr = TILE.tokens
    WARPS: gl.constexpr = TILE.warps
    PARTS: gl.constexpr = TILE.parts
    SPLITS: gl.constexpr = TILE.splits
    TURNS: gl.constexpr = TILE.turns
    LAYOUT: gl.constexpr = joined_layout(WARPS, TOKENS)
    stride = gl.num_programs(0)
    # Every thread's share is stored before one of them says so.
    gl.thread_barrier()
    counter = arrived + gl.program_id(2) * stride + gl.program_id(0)
    if gl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == SPLITS - 1:
        factors = factors_of(front, outs.rows, columns, TOKENS, TILE.squares, WARPS, gl.SliceLayout(0, LAYOUT))
        row, token = _numbers(TURNS * ROWS, TOKENS, LAYOUT)
        squares = gl.zeros([TURNS * ROWS, TOKENS], gl.float32, LAYOUT)
        for first in range(gl.program_id(0), tiles, TURNS * stride):
            tile = first + row // ROWS * stride
            # Rows of tiles beyond the last one have no outputs.
            output = gl.where(tile < tiles, tile * ROWS + row % ROWS, outs.outputs)
            residual, norm_weight = residual_at(outs, output, token), norm_weight_at(outs, output)
            scales = scales_at(weight, output, outs.outputs, SHAPE, PARTS)
            place = partial + (tile.to(gl.int64) * (PARTS * SPLITS * ROWS) + row % ROWS)[:, None] * TOKENS
            stored = (tile < tiles)[:, None] & (token < outs.rows)[None, :]
            sums = _added_splits(place + token[None, :], stored, ROWS * TOKENS, PARTS, SPLITS)
            squares += write_outputs(_by_scales(sums, scales), factors, residual, norm_weight, outs, output, token)
        if outs.behind is not None:
            leave_squares(squares, outs, token, gl.program_id(0), stride)
        gl.store(counter, 0)


@gluon.jit  # type: ignore[untyped-decorator]
def _added_splits(
    place: gl.tensor, stored: gl.tensor, SIZE: gl.constexpr, PARTS: gl.constexpr, SPLITS: gl.constexpr
) -> gl.tuple:
    """Of each part the sums of all splits, in their order; read past the L1 cache, which does not see what others
    write. SIZE: sums of a tile."""
    sums: gl.tuple = ()
    for part in gl.static_range(PARTS):
        whole = gl.load(place + part * SPLITS * SIZE, mask=stored, other=0.0, cache_modifier=".cg")
        for other in gl.static_range(1, SPLITS):
            slot = (part * SPLITS + other) * SIZE
            whole += gl.load(place + slot, mask=stored, other=0.0, cache_modifier=".cg")
        sums += (whole,)
    return sums
