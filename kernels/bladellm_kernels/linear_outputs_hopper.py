"""From the sums of `linear_hopper` to outputs: the factor of a norm in front, bias, gate, residual, the norm behind."""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from bladellm_kernels.linear_sums_hopper import sums_layout

FEW_ROWS = gl.constexpr(16)
"""Most rows of which the residual is loaded before the sums are whole."""


class NormInFront(NamedTuple):
    """x is weighted, not yet divided. squares: float32 [rows, parts], sums of squares of parts of its rows."""

    squares: gl.tensor
    parts: gl.tensor
    eps: gl.tensor


class NormBehind(NamedTuple):
    """Of the outputs. weight: [outputs]; weighted: [rows, outputs]; squares: float32 [rows, blocks of outputs]."""

    weight: gl.tensor
    weighted: gl.tensor
    squares: gl.tensor


class Outputs(NamedTuple):
    """out, residual: [rows, outputs]; bias: [parts · outputs]; behind: a `NormBehind`; the last three may be None."""

    out: gl.tensor
    rows: gl.tensor
    outputs: gl.tensor
    out_stride: gl.tensor
    residual_stride: gl.tensor
    residual: gl.tensor | None
    bias: gl.tensor | None
    behind: gl.tuple | None


@gluon.constexpr_function  # type: ignore[untyped-decorator]
def squares_layout(parts: int, warps: int) -> gl.BlockedLayout:
    """Of [rows, parts]: a row is in one warp, four numbers of it a thread."""
    lanes = min(32, max(1, parts // 4))
    return gl.BlockedLayout([1, min(parts, 4)], [32 // lanes, lanes], [warps, 1], [1, 0])


@gluon.jit  # type: ignore[untyped-decorator]
def row_factors(front: gl.tuple | None, rows: gl.tensor, inputs: gl.tensor, TILE: gl.constexpr) -> gl.tuple:
    """What the sums of each row are multiplied by, float32 [rows], or nothing where no norm is in front."""
    LAYOUT: gl.constexpr = gl.SliceLayout(0, sums_layout(TILE))
    found: gl.tuple = factors_of(front, rows, inputs, TILE.rows, TILE.squares, TILE.warps, LAYOUT)
    return found


@gluon.jit  # type: ignore[untyped-decorator]
def factors_of(
    front: gl.tuple | None,
    rows: gl.tensor,
    inputs: gl.tensor,
    ROWS: gl.constexpr,
    SQUARES: gl.constexpr,
    WARPS: gl.constexpr,
    OF_ROWS: gl.constexpr,
) -> gl.tuple:
    """The same as OF_ROWS lays it out. SQUARES: a power of two not below the partial sums of a row."""
    return factors_from(squares_at(front, rows, ROWS, SQUARES, WARPS), front, inputs, OF_ROWS)


@gluon.jit  # type: ignore[untyped-decorator]
def squares_at(
    front: gl.tuple | None, rows: gl.tensor, ROWS: gl.constexpr, SQUARES: gl.constexpr, WARPS: gl.constexpr
) -> gl.tuple:
    """The partial sums of the norm in front, [ROWS, SQUARES], or nothing where there is none."""
    found: gl.tuple = ()
    if front is not None:
        LAYOUT: gl.constexpr = squares_layout(SQUARES, WARPS)
        row = gl.arange(0, ROWS, layout=gl.SliceLayout(1, LAYOUT))
        part = gl.arange(0, SQUARES, layout=gl.SliceLayout(0, LAYOUT))
        inside = (row < rows)[:, None] & (part < front.parts)[None, :]
        found += (gl.load(front.squares + row[:, None] * front.parts + part[None, :], mask=inside, other=0.0),)
    return found


@gluon.jit  # type: ignore[untyped-decorator]
def factors_from(squares: gl.tuple, front: gl.tuple | None, inputs: gl.tensor, OF_ROWS: gl.constexpr) -> gl.tuple:
    """Each row's factor of those partial sums, or nothing."""
    found: gl.tuple = ()
    if front is not None:
        factor = gl.rsqrt(gl.sum(squares[0], 1) / inputs + front.eps)
        found += (gl.convert_layout(factor, OF_ROWS),)
    return found


@gluon.jit  # type: ignore[untyped-decorator]
def _outputs_and_rows(block: gl.tensor, TILE: gl.constexpr) -> gl.tuple:
    """Numbers of a block's outputs and of the rows."""
    LAYOUT: gl.constexpr = sums_layout(TILE)
    output = block * TILE.outputs + gl.arange(0, TILE.outputs, layout=gl.SliceLayout(1, LAYOUT))
    return output, gl.arange(0, TILE.rows, layout=gl.SliceLayout(0, LAYOUT))


@gluon.jit  # type: ignore[untyped-decorator]
def residual_of_few_rows(outs: gl.tuple, block: gl.tensor, TILE: gl.constexpr) -> gl.tuple:
    """A block's residual, loaded while its sums still meet, or nothing where there is none or registers do not hold it.

    Every program of a block reads it, but only the last one to come uses it, and writes the outputs that may lie in the
    same place.
    """
    found: gl.tuple = ()
    if TILE.rows <= FEW_ROWS:
        output, row = _outputs_and_rows(block, TILE)
        found = residual_at(outs, output, row)
    return found


@gluon.jit  # type: ignore[untyped-decorator]
def norm_weight_of(outs: gl.tuple, block: gl.tensor, TILE: gl.constexpr) -> gl.tuple:
    """A block's weights of the norm behind, likewise, or nothing where there is none."""
    output, _ = _outputs_and_rows(block, TILE)
    found: gl.tuple = norm_weight_at(outs, output)
    return found


@gluon.jit  # type: ignore[untyped-decorator]
def residual_at(outs: gl.tuple, output: gl.tensor, row: gl.tensor) -> gl.tuple:
    """The residual of numbered outputs and rows, or nothing where there is none."""
    found: gl.tuple = ()
    if outs.residual is not None:
        place = outs.residual + row[None, :] * outs.residual_stride + output[:, None]
        found += (gl.load(place, mask=_inside(outs, output, row), other=0.0),)
    return found


@gluon.jit  # type: ignore[untyped-decorator]
def norm_weight_at(outs: gl.tuple, output: gl.tensor) -> gl.tuple:
    """The weights of the norm behind numbered outputs, or nothing where there is none."""
    found: gl.tuple = ()
    if outs.behind is not None:
        found += (gl.load(outs.behind.weight + output, mask=output < outs.outputs, other=0.0),)
    return found


@gluon.jit  # type: ignore[untyped-decorator]
def _inside(outs: gl.tuple, output: gl.tensor, row: gl.tensor) -> gl.tensor:
    return (output < outs.outputs)[:, None] & (row < outs.rows)[None, :]


@gluon.jit  # type: ignore[untyped-decorator]
def finish(
    sums: gl.tuple,
    factors: gl.tuple,
    asked: gl.tuple,
    norm_weight: gl.tuple,
    outs: gl.tuple,
    block: gl.tensor,
    TILE: gl.constexpr,
) -> None:
    """Write a block's outputs and, where a norm is behind them, the sums of their squares."""
    output, row = _outputs_and_rows(block, TILE)
    if len(asked) == 0:
        asked = residual_at(outs, output, row)
    squares = write_outputs(sums, factors, asked, norm_weight, outs, output, row)
    if outs.behind is not None:
        leave_squares(squares, outs, row, block, gl.cdiv(outs.outputs, TILE.outputs))


@gluon.jit  # type: ignore[untyped-decorator]
def write_outputs(
    sums: gl.tuple,
    factors: gl.tuple,
    residual: gl.tuple,
    norm_weight: gl.tuple,
    outs: gl.tuple,
    output: gl.tensor,
    row: gl.tensor,
) -> gl.tensor:
    """Write numbered outputs of rows: sums by the rows' factors, plus bias, their gate, plus the residual; weighted for
    the norm behind. Two sums are those of the gate and of what it multiplies.

    residual, norm_weight: as `residual_at` and `norm_weight_at` load them. Returns the squares of the outputs as they
    were rounded, zero outside.
    """
    inside = _inside(outs, output, row)
    values = _scaled(sums[0], factors, outs.bias, output, outs.outputs)
    if len(sums) == 2:
        bias = None if outs.bias is None else outs.bias + outs.outputs
        up = _scaled(sums[1], factors, bias, output, outs.outputs)
        values = values / (1.0 + gl.exp(-values)) * up
    if len(residual) == 1:
        values += residual[0].to(gl.float32)
    rounded = values.to(outs.out.dtype.element_ty)
    gl.store(outs.out + row[None, :].to(gl.int64) * outs.out_stride + output[:, None], rounded, mask=inside)
    stream = gl.where(inside, rounded.to(gl.float32), 0.0)
    if outs.behind is not None:
        weighted = (stream * norm_weight[0].to(gl.float32)[:, None]).to(outs.behind.weighted.dtype.element_ty)
        gl.store(outs.behind.weighted + row[None, :] * outs.outputs + output[:, None], weighted, mask=inside)
    return stream * stream


@gluon.jit  # type: ignore[untyped-decorator]
def _scaled(
    values: gl.tensor, factors: gl.tuple, bias: gl.tensor | None, output: gl.tensor, outputs: gl.tensor
) -> gl.tensor:
    if len(factors) == 1:
        values *= factors[0][None, :]
    if bias is not None:
        values += gl.load(bias + output, mask=output < outputs, other=0.0).to(gl.float32)[:, None]
    return values


@gluon.jit  # type: ignore[untyped-decorator]
def leave_squares(squares: gl.tensor, outs: gl.tuple, row: gl.tensor, part: gl.tensor, parts: gl.tensor) -> None:
    """One of the parts of a `DelayedNorm`'s sums: those of squares [outputs, rows]."""
    gl.store(outs.behind.squares + row * parts + part, gl.sum(squares, 0), mask=row < outs.rows)
