"""The queries of a segment for `ring_decode_hopper`: loaded as they lie, and made operands of its products."""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from bladellm_kernels.decode_queries_triton import LOG2E
from bladellm_kernels.decode_shape import DecodeShape


class Queries(NamedTuple):
    """Of a segment: parts [warps, units, rows] as right operands, their sums over the head and the factors of their
    scores [warps, rows]."""

    parts: gl.tuple
    sums: gl.tensor
    factor: gl.tensor


@gluon.constexpr_function  # type: ignore[untyped-decorator]
def product_layout(shape: DecodeShape) -> gl.NVMMADistributedLayout:
    """Of products, scores [warps, tokens, rows] and outputs [warps, units, rows]: each warp has its own."""
    return gl.NVMMADistributedLayout([2, 0], [shape.warps, 1, 1], [1, 16, 8])


@gluon.constexpr_function  # type: ignore[untyped-decorator]
def operand_layout(shape: DecodeShape, index: int) -> gl.DotOperandLayout:
    return gl.DotOperandLayout(index, product_layout(shape), 2)


@gluon.constexpr_function  # type: ignore[untyped-decorator]
def rows_layout(shape: DecodeShape) -> gl.SliceLayout:
    """Of a number of each warp and row."""
    return gl.SliceLayout(1, product_layout(shape))


@gluon.constexpr_function  # type: ignore[untyped-decorator]
def pairs_layout(shape: DecodeShape) -> gl.DistributedLinearLayout:
    """Of queries as they lie in memory, [warps, units / 2, rows, 4]: two numbers of each of two units, which a thread
    asks for together, units as `operand_layout` has them."""
    registers = [[0, 0, 0, 1], [0, 0, 0, 2]]
    registers += [[0, 1 << bit, 0, 0] for bit in range(2, shape.units.bit_length() - 2)]
    registers += [[0, 0, 1 << bit, 0] for bit in range(3, shape.rows.bit_length() - 1)]
    lanes = [[0, 1, 0, 0], [0, 2, 0, 0], [0, 0, 1, 0], [0, 0, 2, 0], [0, 0, 4, 0]]
    warps = [[1 << bit, 0, 0, 0] for bit in range(shape.warps.bit_length() - 1)]
    return gl.DistributedLinearLayout(registers, lanes, warps, [], [shape.warps, shape.units // 2, shape.rows, 4])


@gluon.jit  # type: ignore[untyped-decorator]
def load_parts(
    q: gl.tuple, plan: gl.tuple, sequence: gl.tensor, known: gl.tensor, head: gl.tensor, first: gl.tensor,
    SHAPE: gl.constexpr,
) -> gl.tuple:  # fmt: skip
    """The parts of a sequence's queries from row `first` on; zero where it is not known that there are any."""
    PARTS: gl.constexpr = SHAPE.parts
    parts: gl.tuple = ()
    if PARTS == 1:
        LAYOUT: gl.constexpr = operand_layout(SHAPE, 1)
        place, inside = _query_places(q, plan, sequence, known, head, first, LAYOUT, SHAPE)
        unit = gl.arange(0, SHAPE.units, layout=gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT)))
        parts += (gl.load(place + unit[None, :, None], mask=inside, other=0.0),)
    else:
        PAIRS: gl.constexpr = gl.SliceLayout(3, pairs_layout(SHAPE))
        place, inside = _query_places(q, plan, sequence, known, head, first, PAIRS, SHAPE)
        low = _load_pairs(place, inside, 0, SHAPE)
        if PARTS == 2:
            parts += low
        else:
            high = _load_pairs(place, inside, SHAPE.head_dim // 2, SHAPE)
            parts += (low[0], high[0], low[1], high[1])
    return parts


@gluon.jit  # type: ignore[untyped-decorator]
def _query_places(
    q: gl.tuple,
    plan: gl.tuple,
    sequence: gl.tensor,
    known: gl.tensor,
    head: gl.tensor,
    first: gl.tensor,
    LAYOUT: gl.constexpr,
    SHAPE: gl.constexpr,
) -> gl.tuple:
    """Where the queries of a sequence begin for each warp and row, and whether there are any: [warps, 1, rows]."""
    warp = gl.arange(0, SHAPE.warps, layout=gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT)))
    row = first + gl.arange(0, SHAPE.rows, layout=gl.SliceLayout(0, gl.SliceLayout(1, LAYOUT)))
    token = sequence.to(gl.int64) * SHAPE.query_len + row // SHAPE.group
    inside = (row < SHAPE.rows_used) & known
    if SHAPE.reads == "shared":
        token = gl.load(plan.shares + sequence * SHAPE.query_len + row // SHAPE.group, mask=inside, other=-1)
        inside &= token >= 0
    place = q.rows + token * q.token_stride + (head * SHAPE.group + row % SHAPE.group) * q.head_stride
    # Every warp has all of its head.
    HEAD_WARPS: gl.constexpr = SHAPE.head_warps
    place = place[None, None, :] + (warp // HEAD_WARPS * SHAPE.group * q.head_stride)[:, None, None]
    return place, inside[None, None, :]


@gluon.jit  # type: ignore[untyped-decorator]
def _load_pairs(place: gl.tensor, inside: gl.tensor, NUMBER: gl.constexpr, SHAPE: gl.constexpr) -> gl.tuple:
    """Of each unit the two numbers that lie beside each other from NUMBER on, in parts. place, inside: of
    `_query_places`."""
    LAYOUT: gl.constexpr = pairs_layout(SHAPE)
    OPERAND: gl.constexpr = operand_layout(SHAPE, 1)
    HALF: gl.constexpr = SHAPE.units // 2
    units = gl.arange(0, HALF, layout=gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, LAYOUT))))
    number = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT))))
    places = (place + (NUMBER + units * 4)[None, :, None])[:, :, :, None] + number[None, None, None, :]
    found = gl.load(places, mask=inside[:, :, :, None], other=0.0)
    apart = gl.permute(gl.reshape(found, (SHAPE.warps, HALF, SHAPE.rows, 2, 2)), (0, 1, 3, 2, 4))
    first_numbers, second_numbers = gl.split(gl.reshape(apart, (SHAPE.warps, SHAPE.units, SHAPE.rows, 2)))
    return (
        gl.convert_layout(first_numbers, OPERAND, assert_trivial=True),
        gl.convert_layout(second_numbers, OPERAND, assert_trivial=True),
    )


@gluon.jit  # type: ignore[untyped-decorator]
def turn_queries(parts: gl.tuple, scale: gl.tensor, SHAPE: gl.constexpr) -> Queries:
    """Queries against quantized memory become float16, with the largest of a row between 1 and 2, or stay bfloat16
    and are raised by `DecodeShape.queries_raised`."""
    PARTS: gl.constexpr = SHAPE.parts
    ROWS: gl.constexpr = rows_layout(SHAPE)
    factor = gl.full((SHAPE.warps, SHAPE.rows), 0.0, gl.float32, gl.SliceLayout(1, operand_layout(SHAPE, 1)))
    factor = factor + scale * LOG2E
    shrink = factor * 0.0 + 1.0
    if SHAPE.scaled:
        largest = gl.abs(parts[0].to(gl.float32))
        for part in gl.static_range(1, PARTS):
            largest = gl.maximum(largest, gl.abs(parts[part].to(gl.float32)))
        highest = gl.max(largest, 1)
        # 2^e with 2^e <= largest < 2^(e + 1), and 2^-e, from the exponent's bits.
        exponent = highest.to(gl.int32, bitcast=True) & 0x7F800000
        factor *= exponent.to(gl.float32, bitcast=True)
        shrink = (0x7F000000 - exponent).to(gl.float32, bitcast=True) * SHAPE.query_factor
    TYPE: gl.constexpr = parts[0].dtype if SHAPE.queries_raised > 0 else gl.float16
    turned: gl.tuple = ()
    total = parts[0].to(gl.float32) * 0.0
    for part in gl.static_range(PARTS):
        numbers = parts[part]
        if SHAPE.scaled:
            numbers = (numbers.to(gl.float32) * shrink[:, None, :]).to(TYPE)
        total += numbers.to(gl.float32)
        if SHAPE.nibbles and part % 2 == 0:
            # As upper nibbles count.
            numbers = (numbers.to(gl.float32) * 16).to(numbers.dtype)
        turned += (numbers,)
    return Queries(turned, gl.convert_layout(gl.sum(total, 1), ROWS), gl.convert_layout(factor, ROWS))
