"""What `ring_decode_hopper` does with a block of keys and values that is there, and with the blocks of a segment."""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from bladellm_kernels.decode_queries_triton import LOG2E
from bladellm_kernels.decode_ring_hopper import scale_planes, token_of_row
from bladellm_kernels.decode_shape import DecodeShape
from bladellm_kernels.kv_codes_triton import separate_values, unit_numbers
from bladellm_kernels.merge_attention_triton import LOWEST


class Queries(NamedTuple):
    """Of a segment: parts [warps, units, rows] as right operands, their sums over the head and the factors of their
    scores [warps, rows]."""

    parts: gl.tuple
    sums: gl.tensor
    factor: gl.tensor


class State(NamedTuple):
    """Of each warp and row, after some blocks. outputs: by part, [warps, units, rows]; total, shift: by lane, see
    `_sum_by_lane`; excess: [warps, 16, rows]."""

    maximum: gl.tensor
    total: gl.tensor
    shift: gl.tensor
    outputs: gl.tuple
    excess: gl.tensor


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
def lanes_layout(shape: DecodeShape) -> gl.DistributedLinearLayout:
    """Of what lanes sum up by themselves, [warps, 8, rows]: as eight of the tokens of scores lie."""
    registers = [[0, 0, 1], *([0, 0, 1 << bit] for bit in range(3, shape.rows.bit_length() - 1))]
    lanes = [[0, 0, 2], [0, 0, 4], [0, 1, 0], [0, 2, 0], [0, 4, 0]]
    warps = [[1 << bit, 0, 0] for bit in range(shape.warps.bit_length() - 1)]
    return gl.DistributedLinearLayout(registers, lanes, warps, [], [shape.warps, 8, shape.rows])


@gluon.constexpr_function  # type: ignore[untyped-decorator]
def words_layout(shape: DecodeShape) -> gl.DistributedLinearLayout:
    """Of words of two scales, [warps, tokens / 2], beside scores: a thread has those of its rows of every 16."""
    words = shape.tokens // 2
    registers = [[0, 1 << bit] for bit in range(3, words.bit_length() - 1)]
    lanes = [[0, 0], [0, 0], [0, 1], [0, 2], [0, 4]]
    warps = [[1 << bit, 0] for bit in range(shape.warps.bit_length() - 1)]
    return gl.DistributedLinearLayout(registers, lanes, warps, [], [shape.warps, words])


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
        low = _load_pairs(q, plan, sequence, known, head, first, 0, SHAPE)
        if PARTS == 2:
            parts += low
        else:
            high = _load_pairs(q, plan, sequence, known, head, first, SHAPE.head_dim // 2, SHAPE)
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
def _load_pairs(
    q: gl.tuple,
    plan: gl.tuple,
    sequence: gl.tensor,
    known: gl.tensor,
    head: gl.tensor,
    first: gl.tensor,
    NUMBER: gl.constexpr,
    SHAPE: gl.constexpr,
) -> gl.tuple:
    """Of each unit the two numbers that lie beside each other from NUMBER on, in parts."""
    LAYOUT: gl.constexpr = pairs_layout(SHAPE)
    OPERAND: gl.constexpr = operand_layout(SHAPE, 1)
    HALF: gl.constexpr = SHAPE.units // 2
    place, inside = _query_places(q, plan, sequence, known, head, first, gl.SliceLayout(3, LAYOUT), SHAPE)
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
    """Queries against quantized memory become float16, with the largest of a row between 1 and 2."""
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
        shrink = (0x7F000000 - exponent).to(gl.float32, bitcast=True)
    turned: gl.tuple = ()
    total = parts[0].to(gl.float32) * 0.0
    for part in gl.static_range(PARTS):
        numbers = parts[part]
        if SHAPE.scaled:
            numbers = (numbers.to(gl.float32) * shrink[:, None, :]).to(gl.float16)
        total += numbers.to(gl.float32)
        if PARTS == 4 and part % 2 == 0:
            # As upper nibbles count.
            numbers = (numbers.to(gl.float32) * 16).to(numbers.dtype)
        turned += (numbers,)
    return Queries(turned, gl.convert_layout(gl.sum(total, 1), ROWS), gl.convert_layout(factor, ROWS))


@gluon.jit  # type: ignore[untyped-decorator]
def new_state(SHAPE: gl.constexpr) -> State:
    """After no block."""
    LAYOUT: gl.constexpr = product_layout(SHAPE)
    PARTS: gl.constexpr = SHAPE.parts
    maximum = gl.full((SHAPE.warps, SHAPE.rows), LOWEST, gl.float32, rows_layout(SHAPE))
    total = _sum_by_lane(gl.full((SHAPE.warps, SHAPE.tokens, SHAPE.rows), 0.0, gl.float32, LAYOUT), SHAPE)
    outputs: gl.tuple = ()
    for _part in gl.static_range(PARTS):
        outputs += (gl.full((SHAPE.warps, SHAPE.units, SHAPE.rows), 0.0, gl.float32, LAYOUT),)
    excess = gl.full((SHAPE.warps, 16, SHAPE.rows), 0.0, gl.float32, LAYOUT)
    return State(maximum, total, total, outputs, excess)


@gluon.jit  # type: ignore[untyped-decorator]
def add_block(
    state: gl.tuple,
    ring: gl.tuple,
    step: gl.tensor,
    queries: gl.tuple,
    span: gl.tuple,
    position: gl.tensor,
    first_row: gl.tensor,
    window: gl.tensor,
    SHAPE: gl.constexpr,
    STAGES: gl.constexpr,
) -> State:
    """A state with the block at `position`, the program's `step`-th; gives its stage back once registers have it."""
    stage = step % STAGES
    mbarrier.wait(ring.full.index(stage), step // STAGES & 1)
    keys = ring.units.index(2 * stage).load(operand_layout(SHAPE, 0))
    values = ring.units.index(2 * stage + 1).permute((0, 2, 1)).load(operand_layout(SHAPE, 0))
    factors: gl.tuple = ()
    if SHAPE.scaled:
        factors = _load_factors(ring.words[0], stage, SHAPE)
    mbarrier.arrive(ring.empty.index(stage))
    scores = _scores(keys, queries, factors, SHAPE)
    scores, factors = _mask(scores, factors, span, position, first_row, window, SHAPE)
    highest = gl.maximum(state.maximum, gl.max(scores, 1) - SHAPE.raised)
    p = gl.exp2(scores - highest[:, None, :])
    decay = gl.exp2(state.maximum - highest)
    lane_decay = gl.convert_layout(decay, gl.SliceLayout(1, lanes_layout(SHAPE)))[:, None, :]
    total = state.total * lane_decay + _sum_by_lane(p, SHAPE)
    shift = state.shift
    if SHAPE.affine:
        shift = shift * lane_decay + _sum_by_lane(p * factors[3][:, :, None], SHAPE)
    if SHAPE.scaled:
        p = p * factors[SHAPE.affine + 1][:, :, None]
    outputs, excess = _add_values(state, decay, values, p, queries.parts[0].dtype, SHAPE)
    return State(highest, total, shift, outputs, excess)


@gluon.jit  # type: ignore[untyped-decorator]
def _load_factors(words: gl.shared_memory_descriptor, stage: gl.tensor, SHAPE: gl.constexpr) -> gl.tuple:
    """Scales, and zeros, of keys and then of values, float32 [warps, tokens] beside scores."""
    PLANES: gl.constexpr = scale_planes(SHAPE)
    found: gl.tuple = ()
    for plane in gl.static_range(PLANES):
        found += (_halves(words.index(stage * PLANES + plane).load(words_layout(SHAPE)), SHAPE),)
    return found


@gluon.jit  # type: ignore[untyped-decorator]
def _halves(words: gl.tensor, SHAPE: gl.constexpr) -> gl.tensor:
    """Words [warps, tokens / 2] of two float16 -> float32 [warps, tokens], in the order of `token_of_row`."""
    LAYOUT: gl.constexpr = gl.SliceLayout(2, product_layout(SHAPE))
    pairs = gl.join(_lower_half(words), _lower_half(words >> 16))
    tiles = gl.permute(gl.reshape(pairs, (SHAPE.warps, SHAPE.tokens // 16, 8, 2)), (0, 1, 3, 2))
    return gl.convert_layout(gl.reshape(tiles, (SHAPE.warps, SHAPE.tokens)), LAYOUT, assert_trivial=True)


@gluon.jit  # type: ignore[untyped-decorator]
def _lower_half(words: gl.tensor) -> gl.tensor:
    """The lower 16 bits, taken for a float16."""
    return words.to(gl.int16).to(gl.float16, bitcast=True).to(gl.float32)


@gluon.jit  # type: ignore[untyped-decorator]
def _scores(keys: gl.tensor, queries: gl.tuple, factors: gl.tuple, SHAPE: gl.constexpr) -> gl.tensor:
    """Scores in powers of two, float32 [warps, tokens, rows]."""
    PARTS: gl.constexpr = SHAPE.parts
    STEP: gl.constexpr = SHAPE.code_step * 16 if PARTS == 4 else SHAPE.code_step
    FORMAT: gl.constexpr = SHAPE.format
    PLAIN: gl.constexpr = SHAPE.plain
    parts = unit_numbers(keys, queries.parts[0].dtype, False, FORMAT, PLAIN)
    nothing = gl.full((SHAPE.warps, SHAPE.tokens, SHAPE.rows), 0.0, gl.float32, product_layout(SHAPE))
    first = nothing
    if SHAPE.offset != 0:
        first = nothing + (queries.sums * (-SHAPE.offset * STEP))[:, None, :]
    # Sums of their own do not wait for one another.
    scores = mma_v2(parts[0], queries.parts[0], first)
    for part in gl.static_range(1, PARTS):
        scores += mma_v2(parts[part], queries.parts[part], nothing)
    if SHAPE.scaled:
        scores *= factors[0][:, :, None] * (queries.factor * (1.0 / STEP))[:, None, :]
        if SHAPE.affine:
            scores += factors[1][:, :, None] * (queries.sums * queries.factor)[:, None, :]
    else:
        scores *= queries.factor[:, None, :]
    return scores


@gluon.jit  # type: ignore[untyped-decorator]
def _mask(
    scores: gl.tensor,
    factors: gl.tuple,
    span: gl.tuple,
    position: gl.tensor,
    first_row: gl.tensor,
    window: gl.tensor,
    SHAPE: gl.constexpr,
) -> gl.tuple:
    """Scores -inf where a row does not see a position, scale and zero of values 0 outside the span, in blocks that have
    such positions."""
    LAYOUT: gl.constexpr = product_layout(SHAPE)
    PLANES: gl.constexpr = len(factors) // 2
    masked: gl.tuple = ()
    for plane in gl.static_range(PLANES):
        masked += (factors[PLANES + plane],)
    if (position + SHAPE.block_kv > span.kv_len - SHAPE.causal_len + 1) | (
        position < span.lowest + SHAPE.causal_len - 1
    ):
        warp = gl.arange(0, SHAPE.warps, layout=gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT)))
        tile_row = gl.arange(0, SHAPE.tokens, layout=gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT)))
        row = first_row + gl.arange(0, SHAPE.rows, layout=gl.SliceLayout(0, gl.SliceLayout(1, LAYOUT)))
        HEAD_WARPS: gl.constexpr = SHAPE.head_warps
        token = (warp % HEAD_WARPS * SHAPE.tokens)[:, None] + token_of_row(tile_row, SHAPE)[None, :]
        newest = span.kv_len - SHAPE.causal_len + row * 0
        if SHAPE.causal_len > 1:
            newest += row // SHAPE.group
        visible = (position + token)[:, :, None] <= newest[None, None, :]
        if SHAPE.windowed:
            visible &= (position + token)[:, :, None] > (newest - window)[None, None, :]
        scores = gl.where(visible, scores, float("-inf"))
        inside = token < span.kv_len - position
        if SHAPE.windowed:
            inside &= token >= span.lowest - position
        shown: gl.tuple = ()
        for plane in gl.static_range(PLANES):
            shown += (gl.where(inside, masked[plane], 0.0),)
        masked = shown
    return scores, factors[:PLANES] + masked


@gluon.jit  # type: ignore[untyped-decorator]
def _sum_by_lane(numbers: gl.tensor, SHAPE: gl.constexpr) -> gl.tensor:
    """Sums over every eighth position, [warps, 8, rows]: those that a lane holds itself."""
    sums = gl.sum(gl.reshape(numbers, (SHAPE.warps, SHAPE.tokens // 8, 8, SHAPE.rows)), 1)
    return gl.convert_layout(sums, lanes_layout(SHAPE))


@gluon.jit  # type: ignore[untyped-decorator]
def _add_values(
    state: gl.tuple, decay: gl.tensor, values: gl.tensor, p: gl.tensor, dtype: gl.constexpr, SHAPE: gl.constexpr
) -> gl.tuple:
    """Outputs by part, and in each row of `excess` the sum of p, rounded as it is: what a part of ones would get."""
    PARTS: gl.constexpr = SHAPE.parts
    rounded = gl.convert_layout(p.to(dtype), operand_layout(SHAPE, 1))
    FORMAT: gl.constexpr = SHAPE.format
    PLAIN: gl.constexpr = SHAPE.plain
    parts = unit_numbers(values, dtype, True, FORMAT, PLAIN)
    outputs: gl.tuple = ()
    for part in gl.static_range(PARTS):
        outputs += (mma_v2(parts[part], rounded, state.outputs[part] * decay[:, None, :]),)
    excess = state.excess
    if SHAPE.offset != 0:
        ones = gl.full((SHAPE.warps, 16, SHAPE.tokens), 1.0, dtype, operand_layout(SHAPE, 0))
        excess = mma_v2(ones, rounded, excess * decay[:, None, :])
    return outputs, excess


@gluon.jit  # type: ignore[untyped-decorator]
def end_segment(state: gl.tuple, SHAPE: gl.constexpr) -> gl.tuple:
    """Outputs by part of each warp, its maximum and its sum of exponentials, [warps, rows] both."""
    PARTS: gl.constexpr = SHAPE.parts
    ROWS: gl.constexpr = rows_layout(SHAPE)
    total = gl.convert_layout(gl.sum(state.total, 1), ROWS)
    outputs = state.outputs
    if SHAPE.integer:
        CODE_STEP: gl.constexpr = SHAPE.code_step
        outputs = separate_values(outputs, CODE_STEP)
    ended: gl.tuple = outputs
    if SHAPE.affine or SHAPE.offset != 0:
        shift = total * 0.0
        if SHAPE.affine:
            shift = gl.convert_layout(gl.sum(state.shift, 1), ROWS)
        if SHAPE.offset != 0:
            shift -= gl.sum(state.excess, 1) * (SHAPE.offset / 16)
        ended = ()
        for part in gl.static_range(PARTS):
            ended += (outputs[part] + shift[:, None, :],)
    return ended, state.maximum, total
