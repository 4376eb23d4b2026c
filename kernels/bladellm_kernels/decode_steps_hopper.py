"""What `ring_decode_hopper` does with a block of keys and values that is there, and with the blocks of a segment."""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from bladellm_kernels.decode_queries_hopper import operand_layout, product_layout, rows_layout
from bladellm_kernels.decode_ring_hopper import scale_planes, token_of_row
from bladellm_kernels.decode_shape import DecodeShape
from bladellm_kernels.kv_codes_triton import separate_values, unit_numbers
from bladellm_kernels.merge_attention_triton import LOWEST

SLACK = gl.constexpr(8.0)
"""Powers of two by which exponentials may exceed 1 before what was summed up is scaled down."""


class State(NamedTuple):
    """Of each warp and row, after some blocks. outputs: by part, [warps, units, rows]; total, shift: by lane, see
    `_sum_by_lane`; excess: [warps, 16, rows]."""

    maximum: gl.tensor
    total: gl.tensor
    shift: gl.tensor
    outputs: gl.tuple
    excess: gl.tensor


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
def decay_text(count: int) -> str:
    """PTX that multiplies a thread's `count` outputs of rows 2i and 2i + 1, side by side, where any decay is not 1."""
    products = "".join(f"mul.f32 ${each}, ${each}, ${2 * count + each};" for each in range(count))
    first, second = 2 * count, 2 * count + 1
    return (
        f"{{ .reg .pred p; setp.neu.f32 p, ${first}, 0f3F800000; setp.neu.or.f32 p, ${second}, 0f3F800000, p;"
        f"vote.sync.any.pred p, p, 0xffffffff; @!p bra DONE; {products} DONE: }}"
    )


@gluon.constexpr_function  # type: ignore[untyped-decorator]
def decay_constraints(count: int) -> str:
    """Outputs in place, and decays."""
    return ",".join(["=f"] * count + [str(each) for each in range(count)] + ["f"] * count)


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
    stage: gl.tensor,
    phase: gl.tensor,
    queries: gl.tuple,
    span: gl.tuple,
    position: gl.tensor,
    first_row: gl.tensor,
    window: gl.tensor,
    SHAPE: gl.constexpr,
) -> State:
    """A state with the block at `position`, which comes to a stage with `phase`; gives that back once registers have
    it."""
    mbarrier.wait(ring.full.index(stage), phase)
    keys, values = _load_keys(ring, 2 * stage, SHAPE), _load_values(ring, 2 * stage + 1, SHAPE)
    factors: gl.tuple = ()
    if SHAPE.scaled:
        factors = _load_factors(ring.scales[0], stage, SHAPE)
    mbarrier.arrive(ring.empty.index(stage))
    scores = _scores(keys, queries, factors, SHAPE)
    scores, factors = _mask(scores, factors, span, position, first_row, window, SHAPE)
    highest = gl.maximum(state.maximum, gl.max(scores, 1) - SHAPE.raised)
    if not SHAPE.scaled:
        highest = gl.where(highest > state.maximum + SLACK, highest, state.maximum)
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
def _load_keys(ring: gl.tuple, place: gl.tensor, SHAPE: gl.constexpr) -> gl.tuple:
    """The words of a block's units as left operands, [warps, tokens, units]."""
    OPERAND: gl.constexpr = operand_layout(SHAPE, 0)
    words: gl.tuple = (ring.units[0].index(place).load(OPERAND),)
    if SHAPE.words == 3:
        apart = gl.reshape(words[0], (SHAPE.warps, SHAPE.tokens, 2, SHAPE.units))
        words = _three_words(gl.permute(apart, (0, 1, 3, 2)), ring.units[1].index(place).load(OPERAND), SHAPE)
    return words


@gluon.jit  # type: ignore[untyped-decorator]
def _load_values(ring: gl.tuple, place: gl.tensor, SHAPE: gl.constexpr) -> gl.tuple:
    """The same, [warps, units, tokens]."""
    OPERAND: gl.constexpr = operand_layout(SHAPE, 0)
    words: gl.tuple = (ring.units[0].index(place).permute((0, 2, 1)).load(OPERAND),)
    if SHAPE.words == 3:
        apart = gl.reshape(words[0], (SHAPE.warps, 2, SHAPE.units, SHAPE.tokens))
        upper = ring.units[1].index(place).permute((0, 2, 1)).load(OPERAND)
        words = _three_words(gl.permute(apart, (0, 2, 3, 1)), upper, SHAPE)
    return words


@gluon.jit  # type: ignore[untyped-decorator]
def _three_words(both: gl.tensor, upper: gl.tensor, SHAPE: gl.constexpr) -> gl.tuple:
    """Words that one buffer has, [..., 2], apart as they lie in registers, and those of the other buffer."""
    OPERAND: gl.constexpr = operand_layout(SHAPE, 0)
    first, second = gl.split(both)
    return (
        gl.convert_layout(first, OPERAND, assert_trivial=True),
        gl.convert_layout(second, OPERAND, assert_trivial=True),
        upper,
    )


@gluon.jit  # type: ignore[untyped-decorator]
def _load_factors(scales: gl.shared_memory_descriptor, stage: gl.tensor, SHAPE: gl.constexpr) -> gl.tuple:
    """Scales, and zeros, of keys and then of values, float32 [warps, tokens] beside scores."""
    PLANES: gl.constexpr = scale_planes(SHAPE)
    found: gl.tuple = ()
    for plane in gl.static_range(PLANES):
        place = scales.index(stage * PLANES + plane)
        if SHAPE.boxed:
            found += (place.load(gl.SliceLayout(2, product_layout(SHAPE))).to(gl.float32),)
        else:
            found += (_halves(place.load(words_layout(SHAPE)), SHAPE),)
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
def _scores(keys: gl.tuple, queries: gl.tuple, factors: gl.tuple, SHAPE: gl.constexpr) -> gl.tensor:
    """Scores in powers of two, float32 [warps, tokens, rows]."""
    PARTS: gl.constexpr = SHAPE.parts
    STEP: gl.constexpr = SHAPE.score_step
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
    state: gl.tuple, decay: gl.tensor, values: gl.tuple, p: gl.tensor, dtype: gl.constexpr, SHAPE: gl.constexpr
) -> gl.tuple:
    """Outputs by part, and in each row of `excess` the sum of p, rounded as it is: what a part of ones would get."""
    PARTS: gl.constexpr = SHAPE.parts
    rounded = gl.convert_layout(p.to(dtype), operand_layout(SHAPE, 1))
    FORMAT: gl.constexpr = SHAPE.format
    PLAIN: gl.constexpr = SHAPE.plain
    parts = unit_numbers(values, dtype, True, FORMAT, PLAIN)
    outputs: gl.tuple = ()
    for part in gl.static_range(PARTS):
        outputs += (mma_v2(parts[part], rounded, _decayed(state.outputs[part], decay, SHAPE)),)
    excess = state.excess
    if SHAPE.offset != 0:
        ones = gl.full((SHAPE.warps, 16, SHAPE.tokens), 1.0, dtype, operand_layout(SHAPE, 0))
        excess = mma_v2(ones, rounded, excess * decay[:, None, :])
    return outputs, excess


@gluon.jit  # type: ignore[untyped-decorator]
def _decayed(outputs: gl.tensor, decay: gl.tensor, SHAPE: gl.constexpr) -> gl.tensor:
    """Outputs [warps, units, rows] times decay [warps, rows]: not touched where that is 1 for all rows of a warp."""
    each = decay[:, None, :]
    COUNT: gl.constexpr = SHAPE.units // 4
    if SHAPE.rows == 8 and COUNT >= 16 and not SHAPE.plain:
        text: gl.constexpr = decay_text(COUNT)
        outputs = gl.inline_asm_elementwise(
            text, decay_constraints(COUNT), [outputs, each], dtype=gl.float32, is_pure=True, pack=COUNT
        )
    else:
        outputs = outputs * each
    return outputs


@gluon.jit  # type: ignore[untyped-decorator]
def end_segment(state: gl.tuple, SHAPE: gl.constexpr) -> gl.tuple:
    """Outputs by part of each warp, its maximum and its sum of exponentials, [warps, rows] both."""
    PARTS: gl.constexpr = SHAPE.parts
    ROWS: gl.constexpr = rows_layout(SHAPE)
    total = gl.convert_layout(gl.sum(state.total, 1), ROWS)
    outputs = state.outputs
    if SHAPE.code_step != 1.0 or SHAPE.nibbles:
        outputs = separate_values(outputs, SHAPE)
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
