"""The end of a segment of decode attention: its warps' states become one, and an output or a part of one."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from bladellm_kernels.kv_codes_triton import part_number

LN2 = tl.constexpr(0.6931471805599453)


class StateArguments(NamedTuple):
    """Where segments leave their states: `partial` and `lse` of `DecodeWork`."""

    partial: Any
    lse: Any


@triton.jit  # type: ignore[untyped-decorator]
def join_warps(
    outputs: tl.tuple, maximum: tl.tensor, total: tl.tensor, shift: tl.tensor, SHAPE: tl.constexpr
) -> tl.tuple:
    """Normalised outputs by part, which the warps' add up to, and the logarithm of the sum of exponentials."""
    PARTS: tl.constexpr = SHAPE.parts
    highest = tl.max(maximum, 0)
    weight = tl.exp2(maximum - highest[None, :])
    whole = tl.sum(total * weight, 0)
    share = weight / tl.where(whole == 0.0, 1.0, whole)[None, :]
    weighted: tl.tuple = ()
    for part in tl.static_range(PARTS):
        weighted += ((outputs[part] + shift[:, None, :]) * share[:, None, :],)
    return weighted, (highest + tl.log2(whole)) * LN2


@triton.jit  # type: ignore[untyped-decorator]
def _sum_warps(numbers: tl.tensor, SHAPE: tl.constexpr) -> tl.tensor:
    """The sum of numbers [warps, units_padded, rows] over warps: halves come to lie in one thread.

    tl.sum exchanges by lanes, twice. Part of the stores, so that numbers come to where these want them at once.
    """
    folded = tl.permute(numbers, (1, 2, 0))
    for level in tl.static_range(1, 6):
        if SHAPE.warps >> level >= 1:
            halves = tl.reshape(folded, (SHAPE.units_padded, SHAPE.rows, SHAPE.warps >> level, 2))
            left, right = tl.split(halves)
            folded = left + right
    return tl.reshape(folded, (SHAPE.units_padded, SHAPE.rows))


@triton.jit  # type: ignore[untyped-decorator]
def store_output(
    state: tl.tuple, out: tl.tuple, sequence: tl.tensor, head: tl.tensor, row: tl.tensor, SHAPE: tl.constexpr
) -> None:
    PARTS: tl.constexpr = SHAPE.parts
    unit = tl.arange(0, SHAPE.units_padded)
    token = sequence.to(tl.int64) * SHAPE.query_len + row // SHAPE.group
    place = out.rows + token * out.token_stride + (head * SHAPE.group + row % SHAPE.group) * out.head_stride
    inside = (unit < SHAPE.units)[:, None] & (row < SHAPE.rows_used)[None, :]
    for part in tl.static_range(PARTS):
        number = part_number(unit, part, PARTS, SHAPE.head_dim)
        numbers = _sum_warps(state[0][part], SHAPE).to(out.rows.dtype.element_ty)
        tl.store(place[None, :] + number[:, None], numbers, mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def store_partial(
    state: tl.tuple,
    states: tl.tuple,
    segment: tl.tensor,
    head: tl.tensor,
    row: tl.tensor,
    SHAPE: tl.constexpr,
) -> None:
    PARTS: tl.constexpr = SHAPE.parts
    unit = tl.arange(0, SHAPE.units_padded)
    heads = SHAPE.kv_heads * SHAPE.group
    place = (segment * SHAPE.query_len + row // SHAPE.group) * heads + head * SHAPE.group + row % SHAPE.group
    inside = (unit < SHAPE.units)[:, None] & (row < SHAPE.rows_used)[None, :]
    for part in tl.static_range(PARTS):
        number = part_number(unit, part, PARTS, SHAPE.head_dim)
        target = states.partial + place.to(tl.int64)[None, :] * SHAPE.head_dim + number[:, None]
        tl.store(target, _sum_warps(state[0][part], SHAPE), mask=inside)
    tl.store(states.lse + place, state[1], mask=row < SHAPE.rows_used)
