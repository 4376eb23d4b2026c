"""The kernel of `ragged_decode_attention` for Hopper, warp-specialized.

Ranges are cut as `decode_work.py` says; scores are transposed, and each consumer warp has its own positions of a block,
as in `ragged_decode_triton`.

The producer warps go through all of a program's sequences and keep a ring of blocks in shared memory full: the first
ones before the kernel in front has ended, but for the newest tokens, which that one writes; and those of the next
sequence while the consumers end the last one. Where JOINED, the last program of a sequence that has several merges
their states, and no kernel is behind this one for it. Where LATE, the kernel behind starts as the last program ends.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

from bladellm_kernels.decode_kv_triton import KvArguments, is_whole
from bladellm_kernels.decode_queries_hopper import load_parts, turn_queries
from bladellm_kernels.decode_queries_triton import PlanArguments, RowArguments, load_sequence
from bladellm_kernels.decode_results_hopper import (
    Target,
    clear_empty,
    count_arrived,
    join_segment,
    store_output,
    store_partial,
)
from bladellm_kernels.decode_ring_hopper import PRODUCER_REGISTERS, PRODUCER_WARPS, Range, fetch_blocks, new_ring
from bladellm_kernels.decode_steps_hopper import add_block, end_segment, new_state
from bladellm_kernels.decode_warps_hopper import join_warps, new_scratch
from bladellm_kernels.early_launch import let_next_start, linger, stay_until, wait_for_inputs


@gluon.jit(
    do_not_specialize=["window"],
    do_not_specialize_on_alignment=["base_rows", "slots", "kv_lens", "shares", "programs", "sequences", "empties"],
)  # type: ignore[untyped-decorator]
def ring_decode_kernel(
    q: gl.tuple,
    kv: gl.tuple,
    boxes: tma.tensor_descriptor | None,
    upper_boxes: tma.tensor_descriptor | None,
    scale_boxes: tma.tensor_descriptor | None,
    base_rows: gl.tensor,
    slots: gl.tensor,
    kv_lens: gl.tensor,
    shares: gl.tensor,
    programs: gl.tensor,
    sequences: gl.tensor,
    empties: gl.tensor,
    out: gl.tuple,
    states: gl.tuple,
    scale: gl.tensor,
    window: gl.tensor,
    SHAPE: gl.constexpr,
    STAGES: gl.constexpr,
    JOINED: gl.constexpr,
    LATE: gl.constexpr,
    EARLY: gl.constexpr,
    SETTLED: gl.constexpr,
    BESIDE: gl.constexpr,
) -> None:
    """Program c · lanes + lane takes range c of the blocks, for one tile of the query rows of one KV head. boxes:
    keys and values, upper_boxes: their upper nibbles, scale_boxes: their scales, as the copy engine reads them, if it
    does. SETTLED: the plan can be read at once. BESIDE: so can all
    else, and outputs of sequences without tokens are not this kernel's."""
    LANES: gl.constexpr = SHAPE.lanes
    lane = gl.program_id(0) % LANES
    program = gl.program_id(0) // LANES
    target = Target(lane // SHAPE.tiles * SHAPE.lane_heads, lane % SHAPE.tiles * SHAPE.rows, lane)
    plan = PlanArguments(sequences, base_rows, slots, kv_lens, shares)
    if not SETTLED:
        wait_for_inputs(EARLY)
    place = programs + program * 3
    # Asked for before the threads meet over the ring's barriers.
    work = Range(gl.load(place), gl.load(place + 1), gl.load(place + 2), target.head)
    ring, scratch = new_ring(kv.payload.dtype.element_ty, SHAPE, STAGES), new_scratch(SHAPE)
    numbers = _as_tensors(kv)
    results = RowArguments(out.rows, gl.to_tensor(out.token_stride), gl.to_tensor(out.head_stride))
    asked = RowArguments(q.rows, gl.to_tensor(q.token_stride), gl.to_tensor(q.head_stride))
    given = asked, plan, work, target, ring, scratch, empties, results, states, gl.to_tensor(scale), window, program
    gl.warp_specialize(
        [
            (_attend, (given, SHAPE, STAGES, JOINED, LATE, EARLY, BESIDE)),
            (
                fetch_blocks,
                (ring, numbers, (boxes, upper_boxes, scale_boxes), plan, work, window, SHAPE, STAGES, EARLY, BESIDE),
            ),
        ],
        [PRODUCER_WARPS],
        [PRODUCER_REGISTERS],
    )


@gluon.jit  # type: ignore[untyped-decorator]
def _as_tensors(kv: gl.tuple) -> KvArguments:
    """With numbers as tensors: a 1 is known to the compiler, which loses it among what groups of warps are given."""
    return KvArguments(
        kv.payload, gl.to_tensor(kv.row_stride), gl.to_tensor(kv.head_stride), gl.to_tensor(kv.value_stride),
        kv.scales, gl.to_tensor(kv.scale_granule_stride), gl.to_tensor(kv.scale_head_stride),
        gl.to_tensor(kv.scale_value_stride), gl.to_tensor(kv.scale_plane_stride), kv.table,
        gl.to_tensor(kv.table_stride),
    )  # fmt: skip


@gluon.jit  # type: ignore[untyped-decorator]
def _attend(
    given: gl.tuple,
    SHAPE: gl.constexpr,
    STAGES: gl.constexpr,
    JOINED: gl.constexpr,
    LATE: gl.constexpr,
    EARLY: gl.constexpr,
    BESIDE: gl.constexpr,
) -> None:
    """The segments of a program. What describes one is asked for before the blocks of the one before it."""
    q, plan, work, target, ring, scratch, empties, out, states, scale, window, program = given
    block, end, sequence, head = work
    first, last, span = load_sequence(plan, sequence, block < end, head, window, SHAPE)
    empty = gl.load(empties)
    wait_for_inputs(EARLY and not BESIDE)
    let_next_start(EARLY and not LATE)
    leaves = linger(block >= end, SHAPE.idle_ns, SHAPE.stay_ns)
    parts = load_parts(q, plan, sequence, block < end, head, target.row, SHAPE)
    if JOINED and not BESIDE:
        LANES: gl.constexpr = SHAPE.lanes
        clear_empty(empties, empty, program, gl.num_programs(0) // LANES, out, target, SHAPE)
    stage, phase = 0, 0
    while block < end:
        next_first, next_last, next_span = load_sequence(plan, sequence + 1, last < end, head, window, SHAPE)
        next_parts = load_parts(q, plan, sequence + 1, last < end, head, target.row, SHAPE)
        stop = gl.minimum(last, end)
        segments = gl.load(plan.sequences + sequence * 5 + 3), gl.load(plan.sequences + sequence * 5 + 4)
        if stop > block:
            queries = turn_queries(parts, scale, SHAPE)
            skipped = span.lowest // SHAPE.block_kv - first
            state = new_state(SHAPE)
            for each in range(block + skipped, stop + skipped):
                position = each * SHAPE.block_kv
                state = add_block(state, ring, stage, phase, queries, span, position, target.row, window, SHAPE)
                stage += 1
                if stage == STAGES:
                    stage = 0
                    phase ^= 1
            whole = (block == first) & (stop == last) & is_whole(span, SHAPE)
            arrived = sequence * 0
            if JOINED:
                # Asked for before the warps wait for one another.
                arrived = count_arrived(states, sequence, segments, target, SHAPE)
            results = join_warps(scratch, end_segment(state, SHAPE), SHAPE)
            segment = program + sequence
            if whole:
                store_output(results, out, sequence, target, SHAPE)
            elif JOINED:
                join_segment(results, states, segment, segments, arrived, out, sequence, target, SHAPE)
            else:
                store_partial(results, states, segment, target, SHAPE)
            block = stop
        sequence = sequence + 1
        first, last, span, parts = next_first, next_last, next_span, next_parts
    stay_until(leaves, SHAPE.stay_ns)
