"""The kernel of `linear` for Hopper: the next layer's weight is on its way while the present layer ends.

Every multiprocessor runs one program, which takes less than half of its shared memory: the next kernel's program fits
beside it, and fills its ring of tiles before its inputs are ready. The product is transposed and divided among the
programs as in `linear_triton`; tiles come by the copy engine (TMA), which also fills what is outside with zeros.
"""

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from bladellm_kernels.early_launch import let_next_start, wait_for_inputs
from bladellm_kernels.hopper_device import on_hopper
from bladellm_kernels.linear_division_hopper import Division, block_segments, tiles_of
from bladellm_kernels.linear_outputs_hopper import Outputs, finish, norm_weight_of, residual_of_few_rows, row_factors
from bladellm_kernels.linear_sums_hopper import join_segments, zeros


@gluon.jit(do_not_specialize=["rows"])  # type: ignore[untyped-decorator]
def hopper_linear_kernel(
    x: tma.tensor_descriptor,
    weight: tma.tensor_descriptor,
    weight_rows: gl.tensor,
    weight_stride: gl.tensor,
    bias: gl.tensor | None,
    residual: gl.tensor | None,
    out: gl.tensor,
    front: gl.tuple | None,
    behind: gl.tuple | None,
    partial: gl.tensor,
    counters: gl.tensor,
    rows: gl.tensor,
    outputs: gl.tensor,
    inputs: gl.tensor,
    residual_stride: gl.tensor,
    out_stride: gl.tensor,
    TILE: gl.constexpr,
    SEGMENTS: gl.constexpr,
    EARLY: gl.constexpr,
) -> None:
    """Program p takes tiles [p · T / P, (p + 1) · T / P) of T, counted along K and then along N. weight, weight_rows:
    [parts · outputs, inputs], the latter in memory. front, behind: a `NormInFront` and a `NormBehind`, or None.
    partial, counters: as in `linear_triton`."""
    let_next_start(EARLY and TILE.late == 0)
    length = gl.cdiv(inputs, TILE.inputs)
    work = Division(gl.num_programs(0), gl.cdiv(outputs, TILE.outputs) * length, length)
    begin, end = tiles_of(gl.program_id(0), work)
    ring = _new_ring(weight_rows.dtype.element_ty, TILE)
    STAGES: gl.constexpr = TILE.stages
    for first in gl.static_range(STAGES):
        _fetch_weight(weight, ring, first, begin + first, end, length, outputs, TILE)
    if EARLY and TILE.prefetch > 0 and begin + STAGES < end:
        _prefetch(weight_rows, weight_stride, begin + STAGES, length, outputs, inputs, TILE)
    wait_for_inputs(EARLY)
    for first in gl.static_range(STAGES):
        _fetch_x(x, ring, first, begin + first, end, length, TILE)
    outs = Outputs(out, rows, outputs, out_stride, residual_stride, residual, bias, behind)
    factors = row_factors(front, rows, inputs, TILE)
    _take_blocks(x, weight, ring, factors, outs, work, begin, end, partial, counters, TILE, SEGMENTS, EARLY)


@gluon.jit  # type: ignore[untyped-decorator]
def _take_blocks(
    x: tma.tensor_descriptor,
    weight: tma.tensor_descriptor,
    ring: gl.tuple,
    factors: gl.tuple,
    outs: gl.tuple,
    work: gl.tuple,
    begin: gl.tensor,
    end: gl.tensor,
    partial: gl.tensor,
    counters: gl.tensor,
    TILE: gl.constexpr,
    SEGMENTS: gl.constexpr,
    EARLY: gl.constexpr,
) -> None:
    """All tiles of a program, of the first of which the ring's are on their way."""
    STAGES: gl.constexpr = TILE.stages
    length = work.length
    tile = begin
    while tile < end:
        block = tile // length
        stop = gl.minimum((block + 1) * length, end)
        # Here, while tiles are on their way, and not behind the last one.
        lowest, segments = block_segments(block, work)
        sums = zeros(TILE)
        for each in range(tile, stop):
            if EARLY and TILE.late > 0 and each == gl.maximum(end - TILE.late, begin):
                let_next_start(True)
            stage = (each - begin) % STAGES
            sums = _add_products(sums, ring, stage, (each - begin) // STAGES, TILE)
            # All warps have read the stage that is filled again.
            gl.thread_barrier()
            _fetch_weight(weight, ring, stage, each + STAGES, end, length, outs.outputs, TILE)
            _fetch_x(x, ring, stage, each + STAGES, end, length, TILE)
        _write_block(sums, factors, outs, block, partial, counters, lowest, segments, SEGMENTS, TILE)
        tile = stop


@gluon.jit  # type: ignore[untyped-decorator]
def _new_ring(dtype: gl.constexpr, TILE: gl.constexpr) -> gl.tuple:
    """Tiles of the weight and of x, and for every stage a barrier that says that they are here."""
    STAGES: gl.constexpr = TILE.stages
    OUTPUTS: gl.constexpr = TILE.outputs
    INPUTS: gl.constexpr = TILE.inputs
    ROWS: gl.constexpr = TILE.rows
    W_SHARED: gl.constexpr = gl.NVMMASharedLayout.get_default_for([OUTPUTS, INPUTS], dtype)
    X_SHARED: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, INPUTS], dtype)
    weights = gl.allocate_shared_memory(dtype, [STAGES * TILE.parts, OUTPUTS, INPUTS], W_SHARED)
    numbers = gl.allocate_shared_memory(dtype, [STAGES, ROWS, INPUTS], X_SHARED)
    barriers = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(barriers.index(stage), count=1)
    # The copy engine sees the barriers.
    fence_async_shared()
    gl.thread_barrier()
    return weights, numbers, barriers


@gluon.jit  # type: ignore[untyped-decorator]
def _fetch_weight(
    weight: tma.tensor_descriptor,
    ring: gl.tuple,
    stage: gl.tensor,
    tile: gl.tensor,
    end: gl.tensor,
    length: gl.tensor,
    outputs: gl.tensor,
    TILE: gl.constexpr,
) -> None:
    """Start to copy a tile of the weight, where it is before `end`; its barrier expects that of x too."""
    weights, _, barriers = ring
    PARTS: gl.constexpr = TILE.parts
    BYTES: gl.constexpr = 2 * TILE.inputs * (PARTS * TILE.outputs + TILE.rows)
    inside = tile < end
    block = tile // length
    mbarrier.expect(barriers.index(stage), BYTES, pred=inside)
    for part in gl.static_range(PARTS):
        place = [block * TILE.outputs + part * outputs, (tile - block * length) * TILE.inputs]
        buffer = weights.index(stage * PARTS + part)
        tma.async_copy_global_to_shared(weight, place, barriers.index(stage), buffer, pred=inside)


@gluon.jit  # type: ignore[untyped-decorator]
def _fetch_x(
    x: tma.tensor_descriptor,
    ring: gl.tuple,
    stage: gl.tensor,
    tile: gl.tensor,
    end: gl.tensor,
    length: gl.tensor,
    TILE: gl.constexpr,
) -> None:
    """Start to copy the inputs of a tile, where it is before `end`."""
    _, numbers, barriers = ring
    column = tile % length * TILE.inputs
    tma.async_copy_global_to_shared(x, [0, column], barriers.index(stage), numbers.index(stage), pred=tile < end)


@gluon.jit  # type: ignore[untyped-decorator]
def _prefetch(
    weight: gl.tensor,
    stride: gl.tensor,
    tile: gl.tensor,
    length: gl.tensor,
    outputs: gl.tensor,
    inputs: gl.tensor,
    TILE: gl.constexpr,
) -> None:
    """Ask for TILE.prefetch columns from a tile's first one on, as far as its rows go."""
    LINE: gl.constexpr = gl.BlockedLayout([1], [32], [TILE.warps], [0])
    PARTS: gl.constexpr = TILE.parts
    column = tile % length * TILE.inputs
    row = gl.minimum(tile // length * TILE.outputs + gl.arange(0, TILE.outputs, layout=LINE), outputs - 1)
    # Whole 16 bytes.
    size = gl.minimum(inputs - column, TILE.prefetch) // 8 * 16
    for part in gl.static_range(PARTS):
        place = weight + (row + part * outputs).to(gl.int64) * stride + column
        gl.inline_asm_elementwise(
            "cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;",
            "=r,l,r",
            [place.to(gl.int64), gl.full((TILE.outputs,), 0, gl.int32, LINE) + size],
            dtype=gl.int32,
            is_pure=False,
            pack=1,
        )


@gluon.jit  # type: ignore[untyped-decorator]
def _add_products(sums: gl.tuple, ring: gl.tuple, stage: gl.tensor, turn: gl.tensor, TILE: gl.constexpr) -> gl.tuple:
    """Sums plus the product of a stage, as soon as its tiles are here, the ring's `turn`-th."""
    weights, numbers, barriers = ring
    PARTS: gl.constexpr = TILE.parts
    mbarrier.wait(barriers.index(stage), turn & 1)
    added: gl.tuple = ()
    for part in gl.static_range(PARTS):
        columns = numbers.index(stage).permute((1, 0))
        added += (warpgroup_mma(weights.index(stage * PARTS + part), columns, sums[part], is_async=True),)
    done: gl.tuple = ()
    for part in gl.static_range(PARTS):
        done += (warpgroup_mma_wait(num_outstanding=PARTS - 1 - part, deps=(added[part],)),)
    return done


@gluon.jit  # type: ignore[untyped-decorator]
def _write_block(
    sums: gl.tuple,
    factors: gl.tuple,
    outs: gl.tuple,
    block: gl.tensor,
    partial: gl.tensor,
    counters: gl.tensor,
    lowest: gl.tensor,
    segments: gl.tensor,
    SEGMENTS: gl.constexpr,
    TILE: gl.constexpr,
) -> None:
    """Leave a program's sums of a block, or write its outputs where they are the last ones."""
    asked, norm_weight = residual_of_few_rows(outs, block, TILE), norm_weight_of(outs, block, TILE)
    last = True
    if SEGMENTS > 1:
        sums, last = join_segments(sums, partial, counters + block, lowest, segments, SEGMENTS, TILE)
    if last:
        finish(sums, factors, asked, norm_weight, outs, block, TILE)


def takes(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether a launch can do it: half precision on a Hopper, rows of both in and at whole 16 bytes."""
    if not on_hopper(x):
        return False
    return x.dtype in (torch.float16, torch.bfloat16) and x.shape[1] % 8 == 0 and fits(x) and fits(weight)


def fits(matrix: torch.Tensor) -> bool:
    """Whether the copy engine can have it: rows of some numbers at whole 16 bytes."""
    aligned = matrix.data_ptr() % 16 == 0 and (len(matrix) == 1 or matrix.stride(0) % 8 == 0)
    return aligned and matrix.numel() > 0 and matrix.stride(1) == 1


def described(matrix: torch.Tensor, block_rows: int, block_columns: int) -> TensorDescriptor:
    """A matrix of 16-bit numbers as the copy engine reads it, in tiles of block_rows · block_columns."""
    layout = gl.NVMMASharedLayout.get_default_for([block_rows, block_columns], gl.int16)
    # The stride of a single row is never used, but must be whole 16 bytes.
    stride = matrix.stride(0) if len(matrix) > 1 else -(-matrix.shape[1] // 8) * 8
    return TensorDescriptor(matrix, list(matrix.shape), [stride, 1], [block_rows, block_columns], layout)
