"""The ring of `ring_decode_hopper` in shared memory, and the producer warps, which fill it with keys and values."""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from bladellm_kernels.decode_kv_triton import block_granule
from bladellm_kernels.decode_queries_triton import first_granule, load_sequence
from bladellm_kernels.decode_shape import DecodeShape
from bladellm_kernels.early_launch import wait_for_inputs

PRODUCER_WARPS = gl.constexpr(4)
"""Registers are dealt out by groups of four, and one warp alone does not find the addresses of all copies in time: on
an H200 64 µs, not 74, at 64 sequences of 1,024 tokens."""
PRODUCER_REGISTERS = gl.constexpr(56)
"""Of a thread of these."""


class Ring(NamedTuple):
    """Of every stage a block, [2, warps, tokens, units], as which its keys and values are fetched together; the same as
    `boxes`, [warps * tokens, units] of keys and then of values, where the copy engine fetches them; the same as
    `units`, [warps, tokens, units] of keys and then of values; one of each for every buffer (`buffers`). `planes`: the
    words of their scales and zeros as they are fetched, [`scale_planes`, warps, tokens / 2]; the same as `scale_boxes`,
    where the copy engine fetches them; the same as `scales`, one plane each, of words or, where boxed, of scales. And
    barriers that say that all is here (`full`) or has been read (`empty`)."""

    blocks: gl.tuple
    boxes: gl.tuple
    units: gl.tuple
    planes: gl.tuple
    scale_boxes: gl.tuple
    scales: gl.tuple
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor


class Range(NamedTuple):
    """Blocks [block, end) of a program, the first of them of `sequence`, for a KV head."""

    block: gl.tensor
    end: gl.tensor
    sequence: gl.tensor
    head: gl.tensor


@gluon.constexpr_function  # type: ignore[untyped-decorator]
def units_layout(units: int, rank: int) -> gl.SwizzledSharedLayout:
    """Of rows of units of 16 bits, of which a matrix takes 8 without two in one bank."""
    rows_a_line = max(1, 64 // units)
    return gl.SwizzledSharedLayout(8, rows_a_line, max(1, 8 // rows_a_line), list(reversed(range(rank))))


@gluon.constexpr_function  # type: ignore[untyped-decorator]
def buffers(shape: DecodeShape) -> int:
    """Of a stage: of 12 bits one has lower bytes, the words of parts 0 and 2 and then of 1 and 3, and one nibbles."""
    return 2 if shape.words == 3 else 1


@gluon.constexpr_function  # type: ignore[untyped-decorator]
def buffer_units(shape: DecodeShape, buffer: int) -> int:
    """Of a token's key, or value: 16 bits each."""
    return shape.units if shape.words == 1 or buffer == 1 else 2 * shape.units


@gluon.constexpr_function  # type: ignore[untyped-decorator]
def boxes_layout(shape: DecodeShape, width: int, rank: int) -> gl.SharedLinearLayout:
    """Of a box [warps, tokens, width], or of two of them, [2, warps, tokens, width]: lines of 64 units, 128 bytes, or
    of 32, the first ones of all tokens first; the parts of a line, 16 bytes each, change places by the bits of a token
    that tell lines of 128 bytes apart."""
    line = min(width, 64).bit_length() - 1
    first = 6 - line
    swaps = {first + bit: 8 << bit for bit in range(line - 3)}
    units = [[0, 0, 0, 1 << bit] for bit in range(line)]
    tokens = [[0, 0, 1 << bit, swaps.get(bit, 0)] for bit in range(shape.tokens.bit_length() - 1)]
    warps = [[0, 1 << bit, 0, 0] for bit in range(shape.warps.bit_length() - 1)]
    lines = [[0, 0, 0, 1 << bit] for bit in range(line, width.bit_length() - 1)]
    values = [[1, 0, 0, 0]] if rank == 4 else []
    bases = [*units, *tokens, *warps, *lines, *values]
    return gl.SharedLinearLayout([basis[-rank:] for basis in bases], alignment=1024)


@gluon.constexpr_function  # type: ignore[untyped-decorator]
def copy_layout(units: int, heads: int) -> gl.BlockedLayout:
    """Of a block [2, warps, tokens, units] over the producers' threads, 16 bytes each: a token's key and value lie
    beside each other in memory, and so do its heads, if warps have different ones; they are asked for at once."""
    across = min(units // 8, 32)
    both = 2 if across < 32 else 1
    if heads == 1:
        return gl.BlockedLayout([1, 1, 1, 8], [both, 1, 32 // (both * across), across], [1, 4, 1, 1], [3, 0, 2, 1])
    beside = min(heads, 32 // (both * across))
    return gl.BlockedLayout(
        [1, 1, 1, 8], [both, beside, 32 // (both * beside * across), across], [1, 1, 4, 1], [3, 0, 1, 2]
    )


@gluon.constexpr_function  # type: ignore[untyped-decorator]
def words_copy_layout(planes: int, words: int) -> gl.BlockedLayout:
    """The same of [planes, warps, words]: 4 bytes each."""
    beside = min(planes, 32 // words)
    return gl.BlockedLayout([1, 1, 1], [beside, 32 // (beside * words), words], [1, 4, 1], [2, 0, 1])


@gluon.constexpr_function  # type: ignore[untyped-decorator]
def scale_planes(shape: DecodeShape) -> int:
    """Of keys and of values together."""
    return 2 * (1 + shape.affine) if shape.scaled else 0


@gluon.constexpr_function  # type: ignore[untyped-decorator]
def scale_boxes_layout(shape: DecodeShape) -> gl.NVMMASharedLayout:
    """Of words of two scales, [planes, block_kv / 2], one behind the other."""
    return gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)


@gluon.jit  # type: ignore[untyped-decorator]
def new_ring(dtype: gl.constexpr, SHAPE: gl.constexpr, STAGES: gl.constexpr) -> Ring:
    BUFFERS: gl.constexpr = buffers(SHAPE)
    COUNT: gl.constexpr = 1 if SHAPE.boxed else 32 * PRODUCER_WARPS
    boxes: gl.tuple = ()
    blocks: gl.tuple = ()
    units: gl.tuple = ()
    for buffer in gl.static_range(BUFFERS):
        box, block, numbers = _new_buffer(dtype, buffer, SHAPE, STAGES)
        boxes += (box,)
        blocks += (block,)
        units += (numbers,)
    planes, scale_boxes, scales = _new_scales(SHAPE, STAGES)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=COUNT)
        mbarrier.init(empty.index(stage), count=1)
    if SHAPE.boxed:
        # The copy engine sees the barriers.
        fence_async_shared()
        gl.thread_barrier()
    return Ring(blocks, boxes, units, planes, scale_boxes, scales, full, empty)


@gluon.jit  # type: ignore[untyped-decorator]
def _new_buffer(dtype: gl.constexpr, BUFFER: gl.constexpr, SHAPE: gl.constexpr, STAGES: gl.constexpr) -> gl.tuple:
    """A buffer of all stages as boxes, as blocks and as units; boxes are blocks where there are none."""
    WARPS: gl.constexpr = SHAPE.warps
    TOKENS: gl.constexpr = SHAPE.tokens
    UNITS: gl.constexpr = buffer_units(SHAPE, BUFFER)
    if SHAPE.boxed:
        BOX: gl.constexpr = gl.NVMMASharedLayout.get_default_for([WARPS * TOKENS, UNITS], dtype)
        boxes = gl.allocate_shared_memory(dtype, [STAGES * 2, WARPS * TOKENS, UNITS], BOX)
        blocks = boxes._reinterpret(dtype, [STAGES, 2, WARPS, TOKENS, UNITS], boxes_layout(SHAPE, UNITS, 4))
        units = boxes._reinterpret(dtype, [STAGES * 2, WARPS, TOKENS, UNITS], boxes_layout(SHAPE, UNITS, 3))
    else:
        blocks = gl.allocate_shared_memory(dtype, [STAGES, 2, WARPS, TOKENS, UNITS], units_layout(UNITS, 4))
        units = blocks._reinterpret(dtype, [STAGES * 2, WARPS, TOKENS, UNITS], units_layout(UNITS, 3))
        boxes = blocks
    return boxes, blocks, units


@gluon.jit  # type: ignore[untyped-decorator]
def _new_scales(SHAPE: gl.constexpr, STAGES: gl.constexpr) -> gl.tuple:
    """`Ring.planes`, `Ring.scale_boxes` and `Ring.scales`, each of one or, unquantized, none."""
    WARPS: gl.constexpr = SHAPE.warps
    TOKENS: gl.constexpr = SHAPE.tokens
    PLANES: gl.constexpr = scale_planes(SHAPE)
    WORDS: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    PLANE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    planes: gl.tuple = ()
    boxes: gl.tuple = ()
    scales: gl.tuple = ()
    if PLANES > 0:
        if SHAPE.boxed:
            BOX: gl.constexpr = scale_boxes_layout(SHAPE)
            box = gl.allocate_shared_memory(gl.int32, [STAGES, PLANES, WARPS * TOKENS // 2], BOX)
            boxes += (box,)
            planes += (box._reinterpret(gl.int32, [STAGES, PLANES, WARPS, TOKENS // 2], WORDS),)
            scales += (box._reinterpret(gl.float16, [STAGES * PLANES, WARPS, TOKENS], PLANE),)
        else:
            together = gl.allocate_shared_memory(gl.int32, [STAGES, PLANES, WARPS, TOKENS // 2], WORDS)
            planes += (together,)
            scales += (together._reinterpret(gl.int32, [STAGES * PLANES, WARPS, TOKENS // 2], PLANE),)
    return planes, boxes, scales


@gluon.jit  # type: ignore[untyped-decorator]
def token_of_row(row: gl.tensor, SHAPE: gl.constexpr) -> gl.tensor:
    """Which token of a warp's a row of its tile is: of every 16 with scales first the even ones, since a thread's rows
    of a tensor core tile lie 8 apart, and so share a word of scales. The copy engine leaves them as they are."""
    token = row
    if SHAPE.scaled and not SHAPE.boxed:
        token = row // 16 * 16 + row % 8 * 2 + row // 8 % 2
    return token


@gluon.jit  # type: ignore[untyped-decorator]
def fetch_blocks(
    ring: gl.tuple,
    kv: gl.tuple,
    boxes: gl.tuple,
    plan: gl.tuple,
    work: gl.tuple,
    window: gl.tensor,
    SHAPE: gl.constexpr,
    STAGES: gl.constexpr,
    EARLY: gl.constexpr,
    BESIDE: gl.constexpr,
) -> None:
    """Fetch a program's blocks, one behind the other through all its sequences, each as soon as there is room.

    Nothing but the newest tokens, which the kernel before this one writes, is waited for; BESIDE: not they either.
    """
    block, end, sequence, head = work
    first, last, span = load_sequence(plan, sequence, block < end, head, window, SHAPE)
    granule = first_granule(kv, span, (span.lowest // SHAPE.block_kv + block - first) * SHAPE.block_kv, SHAPE)
    step = 0
    while block < end:
        coming = load_sequence(plan, sequence + 1, last < end, head, window, SHAPE)
        stop = gl.minimum(last, end)
        skipped = span.lowest // SHAPE.block_kv - first
        for each in range(block + skipped, stop + skipped):
            position = each * SHAPE.block_kv
            if position + SHAPE.block_kv > span.kv_len - SHAPE.query_len:
                wait_for_inputs(EARLY and not BESIDE)
            stage = step % STAGES
            # The first turn waits for the phase before the first one, which has ended.
            mbarrier.wait(ring.empty.index(stage), (step // STAGES + 1) & 1)
            if SHAPE.boxed:
                if (position + SHAPE.block_kv <= span.kv_len) & (position >= span.lowest):
                    _fetch_boxes(ring, kv, boxes, span, position, granule, stage, SHAPE)
                else:
                    _fetch_block(ring, kv, span, position, granule, stage, SHAPE)
            else:
                _fetch_block(ring, kv, span, position, granule, stage, SHAPE)
            # Asked for a block before it is needed.
            granule = block_granule(kv, span, each + 1, stop + skipped, SHAPE)
            step += 1
        block = gl.maximum(stop, block)
        sequence = sequence + 1
        first, last, span = coming
        granule = first_granule(kv, span, span.lowest, SHAPE)
    # Whoever ends says that the kernels before it have ended, too.
    wait_for_inputs(EARLY)


@gluon.jit  # type: ignore[untyped-decorator]
def _fetch_block(
    ring: gl.tuple,
    kv: gl.tuple,
    span: gl.tuple,
    position: gl.tensor,
    granule: gl.tensor,
    stage: gl.tensor,
    SHAPE: gl.constexpr,
) -> None:
    """Start to copy the block at `position` of a granule; outside the span nothing is read, and zeros are left."""
    BUFFERS: gl.constexpr = buffers(SHAPE)
    for buffer in gl.static_range(BUFFERS):
        _fetch_buffer(ring.blocks[buffer].index(stage), kv, span, position, granule, buffer, SHAPE)
    if SHAPE.scaled:
        _fetch_words(ring.planes[0], stage, kv, granule, span.head, position, SHAPE)
    async_copy.mbarrier_arrive(ring.full.index(stage), increment_count=SHAPE.boxed)
    if SHAPE.boxed:
        mbarrier.arrive(ring.full.index(stage))


@gluon.jit  # type: ignore[untyped-decorator]
def _fetch_buffer(
    block: gl.shared_memory_descriptor,
    kv: gl.tuple,
    span: gl.tuple,
    position: gl.tensor,
    granule: gl.tensor,
    BUFFER: gl.constexpr,
    SHAPE: gl.constexpr,
) -> None:
    UNITS: gl.constexpr = buffer_units(SHAPE, BUFFER)
    LAYOUT: gl.constexpr = copy_layout(UNITS, SHAPE.lane_heads)
    value = gl.arange(0, 2, layout=gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, LAYOUT))))
    warp = gl.arange(0, SHAPE.warps, layout=gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, LAYOUT))))
    row = gl.arange(0, SHAPE.tokens, layout=gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, LAYOUT))))
    unit = gl.arange(0, UNITS, layout=gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT))))
    HEAD_WARPS: gl.constexpr = SHAPE.head_warps
    token = (warp % HEAD_WARPS * SHAPE.tokens)[None, :, None, None] + token_of_row(row, SHAPE)[None, None, :, None]
    token = token + (value * 0)[:, None, None, None]
    first = span.base_row + position
    if SHAPE.paged:
        first = granule.to(gl.int64) * SHAPE.granule_tokens + position % SHAPE.granule_tokens
    payload = kv.payload + (span.head.to(gl.int64) * kv.head_stride + first * kv.row_stride) * SHAPE.step
    offset = token * kv.row_stride * SHAPE.step + (value * kv.value_stride * SHAPE.step)[:, None, None, None]
    if SHAPE.lane_heads > 1:
        offset += (warp // HEAD_WARPS * kv.head_stride * SHAPE.step)[None, :, None, None]
    inside = token < span.kv_len - position
    if SHAPE.windowed:
        inside &= token >= span.lowest - position
    places = payload + (offset + (unit + BUFFER * 2 * SHAPE.units)[None, None, None, :])
    async_copy.async_copy_global_to_shared(block, places, mask=inside)


@gluon.jit  # type: ignore[untyped-decorator]
def _fetch_boxes(
    ring: gl.tuple,
    kv: gl.tuple,
    boxes: gl.tuple,
    span: gl.tuple,
    position: gl.tensor,
    granule: gl.tensor,
    stage: gl.tensor,
    SHAPE: gl.constexpr,
) -> None:
    """Have the copy engine fetch the block at `position`, all of which lies in the span."""
    PLANES: gl.constexpr = scale_planes(SHAPE)
    BYTES: gl.constexpr = 2 * SHAPE.block_kv * (2 * SHAPE.words * SHAPE.units + PLANES)
    BUFFERS: gl.constexpr = buffers(SHAPE)
    row = (span.base_row + position).to(gl.int32)
    full = ring.full.index(stage)
    mbarrier.expect(full, BYTES)
    for value in gl.static_range(2):
        column = (span.head * kv.head_stride + value * kv.value_stride) * SHAPE.step
        for buffer in gl.static_range(BUFFERS):
            place = [row, column + buffer * 2 * SHAPE.units]
            tma.async_copy_global_to_shared(boxes[buffer], place, full, ring.boxes[buffer].index(2 * stage + value))
    if PLANES > 0:
        plane = (granule * SHAPE.kv_heads + span.head) * PLANES
        place = [plane.to(gl.int32), position % SHAPE.granule_tokens // 2]
        tma.async_copy_global_to_shared(boxes[2], place, full, ring.scale_boxes[0].index(stage))


@gluon.jit  # type: ignore[untyped-decorator]
def _fetch_words(
    words: gl.shared_memory_descriptor,
    stage: gl.tensor,
    kv: gl.tuple,
    granule: gl.tensor,
    head: gl.tensor,
    position: gl.tensor,
    SHAPE: gl.constexpr,
) -> None:
    """The scales and zeros of a block, which lies in a granule; a word holds two, and strides count words."""
    COUNT: gl.constexpr = SHAPE.tokens // 2
    PLANES: gl.constexpr = scale_planes(SHAPE)
    LAYOUT: gl.constexpr = words_copy_layout(PLANES, COUNT)
    plane = gl.arange(0, PLANES, layout=gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT)))
    warp = gl.arange(0, SHAPE.warps, layout=gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT)))
    pair = gl.arange(0, COUNT, layout=gl.SliceLayout(0, gl.SliceLayout(1, LAYOUT)))
    offset = plane // (PLANES // 2) * kv.scale_value_stride + plane % (PLANES // 2) * kv.scale_plane_stride
    HEAD_WARPS: gl.constexpr = SHAPE.head_warps
    beside = warp % HEAD_WARPS * COUNT
    if SHAPE.lane_heads > 1:
        beside += warp // HEAD_WARPS * kv.scale_head_stride
    first = kv.scales + granule.to(gl.int64) * kv.scale_granule_stride + head * kv.scale_head_stride
    first += position % SHAPE.granule_tokens // 2
    places = first + (offset[:, None, None] + beside[None, :, None] + pair[None, None, :])
    async_copy.async_copy_global_to_shared(words.index(stage), places)
