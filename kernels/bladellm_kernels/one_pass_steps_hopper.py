"""One step of prefill attention in one pass on a Hopper, for `one_pass_prefill_hopper`: a group of four warps starts
Q·Kᵀ of a block and P·V of the one before, lets the other group start its own, and takes the softmax of the first."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

ROWS = gl.constexpr(64)
"""Of a tile that a group attends with."""
KEYS = gl.constexpr(128)
"""Of a block."""
SCORES = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16]))
"""Of a group's scores [ROWS, KEYS]."""
EIGHTS = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 0, 1], [8, 0, 0], [0, 1, 0], [0, 2, 0], [0, 4, 0], [0, 8, 0]],
        [[0, 0, 2], [0, 0, 4], [1, 0, 0], [2, 0, 0], [4, 0, 0]],
        [[16, 0, 0], [32, 0, 0]],
        [],
        [64, 16, 8],
    )
)
"""The same where it is, as [ROWS, KEYS / 8, 8]: the keys in the middle all lie with one thread."""
PARTS = gl.constexpr(gl.SliceLayout(1, EIGHTS.value))
"""Of what the threads of a row find each, [ROWS, 8]."""
PAIRS = gl.constexpr(
    gl.DistributedLinearLayout(
        [[8, 0], [0, 4], [0, 8], [0, 16], [0, 32]],
        [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]],
        [[16, 0], [32, 0]],
        [],
        [64, 64],
    )
)
"""Of weights as a product takes them, two in a register: [ROWS, KEYS / 2]."""


@gluon.constexpr_function  # type: ignore[untyped-decorator]
def outputs_layout(dim: int) -> gl.NVMMADistributedLayout:
    """Of a group's outputs [ROWS, dim]."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, dim, 16])


@gluon.constexpr_function  # type: ignore[untyped-decorator]
def weights_layout(dim: int) -> gl.DotOperandLayout:
    """Of weights [ROWS, KEYS] as the product with values takes them."""
    return gl.DotOperandLayout(operand_index=0, parent=outputs_layout(dim), k_width=2)


@gluon.jit  # type: ignore[untyped-decorator]
def take_step(
    state: gl.tuple,
    sources: gl.tuple,
    now: gl.tensor,
    there: gl.tensor,
    key0: gl.tensor,
    group: gl.constexpr,
    MASKED: gl.constexpr,
    TILE: gl.constexpr,
) -> gl.tuple:
    """Weights of the program's `now`-th block, and beside them the product of the one before, if there is one.

    state: sums, weights of the block before, peak, total; sources: `Sources`. Returns the next state, and what its sums
    have yet to fade by.
    """
    sums, weights, peak, total = state
    keys, values = sources.key_ring, sources.value_ring
    operand = _operand(weights, sources.rows.dtype, TILE.dim)
    stage, before = now % TILE.stages, (now + TILE.stages - 1) % TILE.stages
    mbarrier.wait(keys.full.index(stage), now // TILE.stages & 1)
    await_turn(group)
    scores = gl.zeros((ROWS, KEYS), gl.float32, SCORES)
    turned = keys.blocks.index(stage).permute((1, 0))
    scores = warpgroup_mma(sources.rows, turned, scores, use_acc=False, is_async=True)
    mbarrier.wait(values.full.index(before), (now - 1) // TILE.stages & 1, pred=there)
    sums = warpgroup_mma(operand, values.blocks.index(before), sums, is_async=True)
    let_start(1 - group)
    scores = warpgroup_mma_wait(num_outstanding=1, deps=(scores,))
    mbarrier.arrive(keys.empty.index(stage))
    numbers, peak, total, fade = _soften(scores, peak, total, key0, sources, MASKED)
    sums = warpgroup_mma_wait(num_outstanding=0, deps=(sums,))
    mbarrier.arrive(values.empty.index(before), pred=there)
    return (sums, _rounded(numbers, sources.rows.dtype), peak, total), fade


@gluon.jit  # type: ignore[untyped-decorator]
def _soften(
    scores: gl.tensor,
    peak: gl.tensor,
    total: gl.tensor,
    key0: gl.tensor,
    sources: gl.tuple,
    MASKED: gl.constexpr,
) -> gl.tuple:
    """Weights of a block's scores, the new peak and total, and what older sums fade by."""
    # Not along rows: one number of a thread would wait for the other.
    scores = gl.convert_layout(gl.reshape(scores, (ROWS, KEYS // 8, 8)), EIGHTS, assert_trivial=True)
    if MASKED:
        first = gl.arange(0, KEYS // 8, layout=gl.SliceLayout(0, gl.SliceLayout(2, EIGHTS))) * 8
        last = (sources.position - key0)[:, None] - gl.arange(0, 8, layout=gl.SliceLayout(0, PARTS))[None, :]
        scores = gl.where(first[None, :, None] <= last[:, None, :], scores, float("-inf"))
    higher = gl.maximum(peak, gl.max(gl.max(scores, 1), 1) * sources.qk_scale)
    level = higher
    if MASKED:
        # A row that sees nothing yet has no finite peak, and -inf - -inf is not a number.
        level = gl.where(higher == float("-inf"), 0.0, higher)
    weights = gl.exp2(scores * sources.qk_scale - level[:, None][:, None, :])
    fade = gl.exp2(peak - level)
    total = total * fade[:, None] + gl.sum(weights, 1)
    return weights, higher, total, fade


@gluon.jit  # type: ignore[untyped-decorator]
def _rounded(weights: gl.tensor, dtype: gl.constexpr) -> gl.tensor:
    """Pairs of weights. As halves of registers they would be put together anew in every step."""
    even, odd = gl.split(gl.reshape(weights, (ROWS, KEYS // 2, 2)))
    if dtype == gl.bfloat16:
        pairs = gl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", [even, odd], dtype=gl.int32, is_pure=False, pack=1
        )
    else:
        pairs = gl.inline_asm_elementwise(
            "cvt.rn.f16x2.f32 $0, $2, $1;", "=r,r,r", [even, odd], dtype=gl.int32, is_pure=False, pack=1
        )
    return gl.convert_layout(pairs, PAIRS, assert_trivial=True)


@gluon.jit  # type: ignore[untyped-decorator]
def _operand(pairs: gl.tensor, dtype: gl.constexpr, DIM: gl.constexpr) -> gl.tensor:
    """Weights as a product takes them from registers."""
    if dtype == gl.bfloat16:
        even, odd = gl.inline_asm_elementwise(
            "mov.b32 {$0, $1}, $2;", "=h,=h,r", [pairs], dtype=(gl.bfloat16, gl.bfloat16), is_pure=True, pack=1
        )
    else:
        even, odd = gl.inline_asm_elementwise(
            "mov.b32 {$0, $1}, $2;", "=h,=h,r", [pairs], dtype=(gl.float16, gl.float16), is_pure=True, pack=1
        )
    weights = gl.reshape(gl.join(even, odd), (ROWS, KEYS))
    LAYOUT: gl.constexpr = weights_layout(DIM)
    return gl.convert_layout(weights, LAYOUT, assert_trivial=True)


@gluon.jit  # type: ignore[untyped-decorator]
def last_product(
    sums: gl.tensor, weights: gl.tensor, values: gl.tuple, step: gl.tensor, TILE: gl.constexpr
) -> gl.tensor:
    """Sums of the last tile, with its last block."""
    stage = step % TILE.stages
    mbarrier.wait(values.full.index(stage), step // TILE.stages & 1)
    sums = warpgroup_mma(
        _operand(weights, values.blocks.dtype, TILE.dim), values.blocks.index(stage), sums, is_async=True
    )
    sums = warpgroup_mma_wait(num_outstanding=0, deps=(sums,))
    mbarrier.arrive(values.empty.index(stage))
    return sums


@gluon.jit  # type: ignore[untyped-decorator]
def await_turn(group: gl.constexpr) -> None:
    """Wait until the other group lets this one start its products."""
    TEXT: gl.constexpr = "bar.sync 8, 256; mov.u32 $0, 0;" if group == 0 else "bar.sync 9, 256; mov.u32 $0, 0;"
    gl.inline_asm_elementwise(TEXT, "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit  # type: ignore[untyped-decorator]
def let_start(group: gl.constexpr) -> None:
    """Let a group start its next products."""
    TEXT: gl.constexpr = "bar.arrive 8, 256; mov.u32 $0, 0;" if group == 0 else "bar.arrive 9, 256; mov.u32 $0, 0;"
    gl.inline_asm_elementwise(TEXT, "=r", [], dtype=gl.int32, is_pure=False, pack=1)
