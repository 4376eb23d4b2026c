"""The results of the warps of a program of `ring_decode_hopper` are added up, through shared memory.

A result is, of a KV head, outputs by part [units, rows] and their binary logarithms [rows]; a program has one of each
of its heads.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from bladellm_kernels.decode_shape import DecodeShape


class Scratch(NamedTuple):
    """Where warps leave their states: outputs, [warps, units, rows] of each part; maxima and totals, [warps, rows]."""

    outputs: gl.tuple
    maxima: gl.shared_memory_descriptor
    totals: gl.shared_memory_descriptor


@gluon.constexpr_function  # type: ignore[untyped-decorator]
def scratch_layout(shape: DecodeShape, rank: int) -> gl.SwizzledSharedLayout:
    """Of outputs, units side by side: neither where products lie nor where `sums_layout` does two meet in a bank."""
    return gl.SwizzledSharedLayout(8, 2, min(4, max(shape.units // 8, 1)), [1, 2, 0] if rank == 3 else [0, 1])


@gluon.constexpr_function  # type: ignore[untyped-decorator]
def sums_layout(shape: DecodeShape) -> gl.BlockedLayout:
    """Of outputs [units, rows], units side by side."""
    across = min(shape.units, 32)
    warps_across = min(shape.warps, shape.units // across)
    return gl.BlockedLayout([1, 1], [across, 32 // across], [warps_across, shape.warps // warps_across], [0, 1])


@gluon.constexpr_function  # type: ignore[untyped-decorator]
def log_layout(shape: DecodeShape) -> gl.SliceLayout:
    """Of the logarithms of a result."""
    return gl.SliceLayout(0, sums_layout(shape))


@gluon.jit  # type: ignore[untyped-decorator]
def new_scratch(SHAPE: gl.constexpr) -> Scratch:
    PARTS: gl.constexpr = SHAPE.parts
    OUTPUTS: gl.constexpr = scratch_layout(SHAPE, 3)
    NUMBERS: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    outputs: gl.tuple = ()
    for _part in gl.static_range(PARTS):
        # One each: the compiler has the threads meet between stores to the same memory.
        outputs += (gl.allocate_shared_memory(gl.float32, [SHAPE.warps, SHAPE.units, SHAPE.rows], OUTPUTS),)
    maxima = gl.allocate_shared_memory(gl.float32, [SHAPE.warps, SHAPE.rows], NUMBERS)
    return Scratch(outputs, maxima, gl.allocate_shared_memory(gl.float32, [SHAPE.warps, SHAPE.rows], NUMBERS))


@gluon.jit  # type: ignore[untyped-decorator]
def join_warps(scratch: gl.tuple, ended: gl.tuple, SHAPE: gl.constexpr) -> gl.tuple:
    """The results of a program's heads, from what `end_segment` gives of its warps, by one meeting of these."""
    PARTS: gl.constexpr = SHAPE.parts
    HEADS: gl.constexpr = SHAPE.lane_heads
    outputs, maximum, total = ended
    for part in gl.static_range(PARTS):
        scratch.outputs[part].store(outputs[part])
    scratch.maxima.store(maximum)
    scratch.totals.store(total)
    results: gl.tuple = ()
    for head in gl.static_range(HEADS):
        results += (_join_head(scratch, head, SHAPE),)
    return results


@gluon.jit  # type: ignore[untyped-decorator]
def _join_head(scratch: gl.tuple, HEAD: gl.constexpr, SHAPE: gl.constexpr) -> gl.tuple:
    PARTS: gl.constexpr = SHAPE.parts
    WARPS: gl.constexpr = SHAPE.head_warps
    FIRST: gl.constexpr = HEAD * WARPS
    maxima = _by_warp(scratch.maxima, SHAPE)
    totals = _by_warp(scratch.totals, SHAPE)
    highest = maxima.index(FIRST).load(log_layout(SHAPE))
    for warp in gl.static_range(1, WARPS):
        highest = gl.maximum(highest, maxima.index(FIRST + warp).load(log_layout(SHAPE)))
    whole = highest * 0.0
    weights: gl.tuple = ()
    for warp in gl.static_range(WARPS):
        weights += (gl.exp2(maxima.index(FIRST + warp).load(log_layout(SHAPE)) - highest),)
        whole = whole + totals.index(FIRST + warp).load(log_layout(SHAPE)) * weights[warp]
    factor = 1.0 / gl.where(whole == 0.0, 1.0, whole)
    sums: gl.tuple = ()
    for part in gl.static_range(PARTS):
        outputs = scratch.outputs[part]._reinterpret(
            gl.float32, [SHAPE.warps, SHAPE.units, SHAPE.rows], scratch_layout(SHAPE, 2)
        )
        total = outputs.index(FIRST).load(sums_layout(SHAPE)) * weights[0][None, :]
        for warp in gl.static_range(1, WARPS):
            total += outputs.index(FIRST + warp).load(sums_layout(SHAPE)) * weights[warp][None, :]
        sums += (total * factor[None, :],)
    return sums, highest + gl.log2(whole)


@gluon.jit  # type: ignore[untyped-decorator]
def _by_warp(numbers: gl.shared_memory_descriptor, SHAPE: gl.constexpr) -> gl.shared_memory_descriptor:
    """Numbers [warps, rows], to be indexed by warp."""
    return numbers._reinterpret(gl.float32, [SHAPE.warps, SHAPE.rows], gl.SwizzledSharedLayout(1, 1, 1, [0]))
