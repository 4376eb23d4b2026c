"""The kernel of prefill attention in one pass on a Hopper: a chunk's queries against its prefix and, causally, itself.

After FlashAttention-3 (arXiv:2407.08608). Every multiprocessor runs one program, which takes tile after tile: a
producer warp brings queries and blocks of keys and of values by the copy engine (TMA), and two groups of four consumer
warps attend with 64 rows each. A group starts Q·Kᵀ of a block and P·V of the one before together, and the groups do so
by turns: one's softmax runs beside the other's products. (Beside its own product too, by holding the wait for that
back, was 3 to 6 % slower on an H200.) Blocks go from the last to the first: only the first steps mask.

Heads that share a KV head are packed as rows: row r of a tile is token r // pack, head r % pack. Which tiles a program
takes is an entry of a list (`one_pass_list`) in device memory, so that a captured launch serves other chunks.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
)

from bladellm_kernels.early_launch import let_next_start, wait_for_inputs
from bladellm_kernels.one_pass_list import ENTRY_FIELDS
from bladellm_kernels.one_pass_parts_hopper import Place, Results, Ring, Sources, Work
from bladellm_kernels.one_pass_steps_hopper import (
    KEYS,
    PAIRS,
    PARTS,
    ROWS,
    await_turn,
    last_product,
    let_start,
    outputs_layout,
    take_step,
)

GROUPS = gl.constexpr(2)
"""Of four warps. With the producer warp they are three groups of 168 registers a thread, dealt out anew."""

FIELDS = gl.constexpr(ENTRY_FIELDS)


@gluon.jit  # type: ignore[untyped-decorator]
def one_pass_kernel(
    q: tma.tensor_descriptor,
    out: tma.tensor_descriptor,
    written: gl.tuple,
    kv: gl.tuple,
    entries: gl.tensor,
    heads: gl.tensor,
    group: gl.tensor,
    qk_scale: gl.tensor,
    TILE: gl.constexpr,
    EARLY: gl.constexpr,
) -> None:
    """q, out: [T, heads, dim] in tiles of [ROWS / pack, pack, dim]; written: `Written`, of out; kv: `Stored`; entries:
    int64 [programs, FIELDS] of `one_pass_list`. qk_scale holds log2 e."""
    entry = entries + gl.program_id(0) * FIELDS
    first, queries, start = _number(entry), _number(entry + 1), _number(entry + 2)
    place, programs = _number(entry + 4), _number(entry + 5)
    work = Work(first, queries, start, place, programs, heads, group, kv.head_stride, kv.kv_stride)
    # Whoever ends says that the kernels before it have ended, too.
    wait_for_inputs(EARLY)
    # No sooner: decode attention beside this one relies on what the kernels before it wrote.
    let_next_start(EARLY)
    if queries > 0:
        _attend_to_chunk(q, kv, gl.load(entry + 3), Results(out, written), work, qk_scale, TILE)


@gluon.jit  # type: ignore[untyped-decorator]
def _number(place: gl.tensor) -> gl.tensor:
    return gl.load(place).to(gl.int32)


@gluon.jit  # type: ignore[untyped-decorator]
def _attend_to_chunk(
    q: tma.tensor_descriptor,
    kv: gl.tuple,
    base_row: gl.tensor,
    out: gl.tuple,
    work: gl.tuple,
    qk_scale: gl.tensor,
    TILE: gl.constexpr,
) -> None:
    """A program's tiles. Nothing behind the chunk's keys is read: it may not even be mapped."""
    STAGES: gl.constexpr = TILE.stages
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([KEYS, TILE.dim], q.dtype)
    rows = kv.data + base_row * kv.row_stride
    seen = tma.make_tensor_descriptor(
        rows, [work.start + work.queries, kv.columns], [kv.row_stride, 1], [KEYS, TILE.dim], LAYOUT
    )
    asked = _new_ring(q.dtype, 2 * GROUPS, ROWS, TILE.dim, 1)
    keys = _new_ring(q.dtype, STAGES, KEYS, TILE.dim, GROUPS)
    values = _new_ring(q.dtype, STAGES, KEYS, TILE.dim, GROUPS)
    results = _new_blocks(q.dtype, GROUPS, ROWS, TILE.dim)
    # The copy engine sees the barriers.
    fence_async_shared()
    gl.thread_barrier()
    gl.warp_specialize(
        [
            (_attend, (0, asked, keys, values, results, out, work, qk_scale, TILE)),
            (_attend, (1, asked, keys, values, results, out, work, qk_scale, TILE)),
            (_fetch, (asked, keys, values, q, seen, work, TILE)),
        ],
        [4, 1],
        [240, 24],
    )


@gluon.jit  # type: ignore[untyped-decorator]
def _new_blocks(
    dtype: gl.constexpr, COUNT: gl.constexpr, LENGTH: gl.constexpr, DIM: gl.constexpr
) -> gl.shared_memory_descriptor:
    SHARED: gl.constexpr = gl.NVMMASharedLayout.get_default_for([LENGTH, DIM], dtype)
    return gl.allocate_shared_memory(dtype, [COUNT, LENGTH, DIM], SHARED)


@gluon.jit  # type: ignore[untyped-decorator]
def _new_ring(
    dtype: gl.constexpr, COUNT: gl.constexpr, LENGTH: gl.constexpr, DIM: gl.constexpr, READERS: gl.constexpr
) -> gl.tuple:
    """Of COUNT blocks [LENGTH, DIM]."""
    blocks = _new_blocks(dtype, COUNT, LENGTH, DIM)
    full = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for each in gl.static_range(COUNT):
        mbarrier.init(full.index(each), count=1)
        mbarrier.init(empty.index(each), count=READERS)
    return Ring(blocks, full, empty)


@gluon.jit  # type: ignore[untyped-decorator]
def _tiles(work: gl.tuple, TILE: gl.constexpr) -> gl.tensor:
    return gl.cdiv(work.queries, GROUPS * ROWS // TILE.pack) * (work.heads // TILE.pack)


@gluon.jit  # type: ignore[untyped-decorator]
def _tile_of(turn: gl.tensor, work: gl.tuple) -> gl.tensor:
    """Which tile is a program's `turn`-th: programs take them in order, and every other time in reverse order."""
    return turn * work.programs + gl.where(turn % 2 == 0, work.place, work.programs - 1 - work.place)


@gluon.jit  # type: ignore[untyped-decorator]
def _place(tile: gl.tensor, work: gl.tuple, TILE: gl.constexpr) -> gl.tuple:
    """Where a tile lies: the last tokens of all heads first, which see most."""
    TOKENS: gl.constexpr = GROUPS * ROWS // TILE.pack
    wide = work.heads // TILE.pack
    token = (gl.cdiv(work.queries, TOKENS) - 1 - tile // wide) * TOKENS
    end = work.start + gl.minimum(token + TOKENS, work.queries)
    blocks = gl.cdiv(end, KEYS)
    return Place(token, tile % wide * TILE.pack, blocks, blocks - (work.start + token + 1) // KEYS)


@gluon.jit  # type: ignore[untyped-decorator]
def _fetch(
    asked: gl.tuple,
    keys: gl.tuple,
    values: gl.tuple,
    q: tma.tensor_descriptor,
    kv: tma.tensor_descriptor,
    work: gl.tuple,
    TILE: gl.constexpr,
) -> None:
    """The warp that fills the rings, keys a block ahead of values, across tiles too."""
    step = 0
    turn = 0
    last = work.kv_stride
    tile = _tile_of(turn, work)
    while tile < _tiles(work, TILE):
        place = _place(tile, work, TILE)
        column = place.head // work.group * work.head_stride
        for group in gl.static_range(GROUPS):
            _fetch_queries(asked, q, turn, group, place, work, TILE)
        _fetch_block(keys, kv, step, place.blocks - 1, column, TILE)
        if turn > 0:
            _fetch_block(values, kv, step - 1, 0, last, TILE)
        last = column + work.kv_stride
        for each in range(1, place.blocks):
            _fetch_block(keys, kv, step + each, place.blocks - 1 - each, column, TILE)
            _fetch_block(values, kv, step + each - 1, place.blocks - each, last, TILE)
        step += place.blocks
        turn += 1
        tile = _tile_of(turn, work)
    _fetch_block(values, kv, step - 1, 0, last, TILE)


@gluon.jit  # type: ignore[untyped-decorator]
def _fetch_queries(
    asked: gl.tuple,
    q: tma.tensor_descriptor,
    turn: gl.tensor,
    group: gl.constexpr,
    place: gl.tuple,
    work: gl.tuple,
    TILE: gl.constexpr,
) -> None:
    """A group's rows of the program's `turn`-th tile; those behind the chunk are anything."""
    DIM: gl.constexpr = TILE.dim
    PACK: gl.constexpr = TILE.pack
    slot = turn % 2 * GROUPS + group
    # The first turn of a ring waits for the phase before the first one, which has ended.
    mbarrier.wait(asked.empty.index(slot), (turn // 2 + 1) & 1)
    mbarrier.expect(asked.full.index(slot), 2 * ROWS * TILE.dim)
    rows = asked.blocks.index(slot).reshape((ROWS // PACK, PACK, DIM))
    corner = [work.first + place.token + group * (ROWS // PACK), place.head, 0]
    tma.async_copy_global_to_shared(q, corner, asked.full.index(slot), rows)


@gluon.jit  # type: ignore[untyped-decorator]
def _fetch_block(
    ring: gl.tuple, kv: tma.tensor_descriptor, step: gl.tensor, block: gl.tensor, column: gl.tensor, TILE: gl.constexpr
) -> None:
    """The `step`-th block of the program's into its ring."""
    stage = step % TILE.stages
    mbarrier.wait(ring.empty.index(stage), (step // TILE.stages + 1) & 1)
    mbarrier.expect(ring.full.index(stage), 2 * KEYS * TILE.dim)
    tma.async_copy_global_to_shared(kv, [block * KEYS, column], ring.full.index(stage), ring.blocks.index(stage))


@gluon.jit  # type: ignore[untyped-decorator]
def _attend(
    group: gl.constexpr,
    asked: gl.tuple,
    keys: gl.tuple,
    values: gl.tuple,
    results: gl.tensor,
    out: gl.tuple,
    work: gl.tuple,
    qk_scale: gl.tensor,
    TILE: gl.constexpr,
) -> None:
    """A group's rows of all tiles. A tile's first scores are found beside the last product of the one before."""
    if group == 1:
        let_start(0)
    step = 0
    turn = 0
    tile = _tile_of(turn, work)
    place = _place(tile, work, TILE)
    # Before the first tile there is nothing: a product of what the memory holds, which nobody reads.
    DIM: gl.constexpr = TILE.dim
    SUMS: gl.constexpr = outputs_layout(DIM)
    sums = gl.zeros((ROWS, DIM), gl.float32, SUMS)
    weights = gl.zeros((ROWS, KEYS // 2), gl.int32, PAIRS)
    total = gl.zeros((ROWS, 8), gl.float32, PARTS)
    while tile < _tiles(work, TILE):
        done = place
        place = _place(tile, work, TILE)
        rows, position = _queries(asked, turn, place, work, group, TILE)
        sources = Sources(rows, keys, values, position, qk_scale)
        factor = 1.0 / gl.sum(total, 1)
        peak = gl.full((ROWS,), float("-inf"), gl.float32, gl.SliceLayout(1, PARTS))
        state = sums, weights, peak, gl.zeros((ROWS, 8), gl.float32, PARTS)
        key0 = (place.blocks - 1) * KEYS
        state, _ = take_step(state, sources, step, turn > 0, key0, group, True, TILE)
        if turn > 0:
            _store(state[0], factor, results.index(group), out, done, work, group, TILE)
        state = gl.zeros((ROWS, DIM), gl.float32, SUMS), state[1], state[2], state[3]
        masked = gl.maximum(place.masked, 1)
        for each in range(1, masked):
            state = _inner_step(state, sources, step, each, place, group, True, TILE)
        for each in range(masked, place.blocks):
            state = _inner_step(state, sources, step, each, place, group, False, TILE)
        sums, weights, _, total = state
        mbarrier.arrive(asked.empty.index(turn % 2 * GROUPS + group))
        step += place.blocks
        turn += 1
        tile = _tile_of(turn, work)
    sums = last_product(sums, weights, values, step - 1, TILE)
    _store(sums, 1.0 / gl.sum(total, 1), results.index(group), out, place, work, group, TILE)
    if group == 0:
        await_turn(0)
    tma.store_wait(0)


@gluon.jit  # type: ignore[untyped-decorator]
def _queries(
    asked: gl.tuple, turn: gl.tensor, place: gl.tuple, work: gl.tuple, group: gl.constexpr, TILE: gl.constexpr
) -> gl.tuple:
    """A group's rows of the program's `turn`-th tile, as soon as they are here, and their positions."""
    slot = turn % 2 * GROUPS + group
    row = gl.arange(0, ROWS, layout=gl.SliceLayout(1, PARTS)) + group * ROWS
    mbarrier.wait(asked.full.index(slot), turn // 2 & 1)
    return asked.blocks.index(slot), work.start + place.token + row // TILE.pack


@gluon.jit  # type: ignore[untyped-decorator]
def _inner_step(
    state: gl.tuple,
    sources: gl.tuple,
    step: gl.tensor,
    each: gl.tensor,
    place: gl.tuple,
    group: gl.constexpr,
    MASKED: gl.constexpr,
    TILE: gl.constexpr,
) -> gl.tuple:
    """The `each`-th step of a tile that began with the program's `step`-th."""
    key0 = (place.blocks - 1 - each) * KEYS
    state, fade = take_step(state, sources, step + each, True, key0, group, MASKED, TILE)
    sums, weights, peak, total = state
    SUMS: gl.constexpr = outputs_layout(TILE.dim)
    fade = gl.convert_layout(fade, gl.SliceLayout(1, SUMS), assert_trivial=True)
    return sums * fade[:, None], weights, peak, total


@gluon.jit  # type: ignore[untyped-decorator]
def _store(
    sums: gl.tensor,
    factor: gl.tensor,
    block: gl.tensor,
    out: gl.tuple,
    place: gl.tuple,
    work: gl.tuple,
    group: gl.constexpr,
    TILE: gl.constexpr,
) -> None:
    """Write a group's rows of a tile, through a block that its last tile may still be copied from; or the rows of the
    chunk alone."""
    PACK: gl.constexpr = TILE.pack
    DIM: gl.constexpr = TILE.dim
    TOKENS: gl.constexpr = ROWS // PACK
    SUMS: gl.constexpr = outputs_layout(TILE.dim)
    factor = gl.convert_layout(factor, gl.SliceLayout(1, SUMS), assert_trivial=True)
    found = (sums * factor[:, None]).to(out.rows.data.dtype.element_ty)
    token = place.token + group * TOKENS
    if token + TOKENS <= work.queries:
        tma.store_wait(0)
        gl.thread_barrier()
        block.store(found)
        fence_async_shared()
        gl.thread_barrier()
        corner = [work.first + token, place.head, 0]
        tma.async_copy_shared_to_global(out.tiles, corner, block.reshape((TOKENS, PACK, DIM)))
    else:
        row = gl.arange(0, ROWS, layout=gl.SliceLayout(1, SUMS))
        column = gl.arange(0, TILE.dim, layout=gl.SliceLayout(0, SUMS))
        token_stride, head_stride = out.rows.token_stride, out.rows.head_stride
        first = out.rows.data + (work.first + token).to(gl.int64) * token_stride + place.head * head_stride
        target = first + row // PACK * token_stride + row % PACK * head_stride
        real = token + row // PACK < work.queries
        gl.store(target[:, None] + column[None, :], found, mask=real[:, None])
