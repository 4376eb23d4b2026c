"""What the kernels of `linear` share: tiles of the weight, and the way of the sums to the outputs."""

import triton
import triton.language as tl


@triton.jit  # type: ignore[untyped-decorator]
def block_outputs(block: tl.tensor, BLOCK_N: tl.constexpr) -> tl.tensor:
    """Numbers of a block's outputs, int32 [BLOCK_N]."""
    return block * BLOCK_N + tl.arange(0, BLOCK_N)


@triton.jit  # type: ignore[untyped-decorator]
def load_weight(
    weight: tl.tensor,
    weight_stride: tl.tensor,
    outputs: tl.tensor,
    inputs: tl.tensor,
    block: tl.tensor,
    column: tl.tensor,
    part: tl.constexpr,
    BLOCK_N: tl.constexpr,
    EVEN: tl.constexpr,
) -> tl.tensor:
    """Columns of a block's rows, zero beyond `inputs`. Rows beyond the last are the last: nobody stores their sums.

    Evicted first from the L2 cache: a weight is read once a step, and what others keep there is read again.
    """
    row = (tl.minimum(block_outputs(block, BLOCK_N), outputs - 1) + part * outputs).to(tl.int64)
    place = weight + row[:, None] * weight_stride + column[None, :]
    if EVEN:
        tile = tl.load(place, eviction_policy="evict_first")
    else:
        tile = tl.load(place, mask=(column < inputs)[None, :], other=0.0, eviction_policy="evict_first")
    return tile


@triton.jit  # type: ignore[untyped-decorator]
def prefetch_weight(
    weight: tl.tensor,
    weight_stride: tl.tensor,
    outputs: tl.tensor,
    inputs: tl.tensor,
    first: tl.tensor,
    end: tl.tensor,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    TILES: tl.constexpr,
    PARTS: tl.constexpr,
) -> None:
    """Ask for tiles [first, first + TILES), but none from `end` on, into the L2 cache; tiles count along K, then N."""
    SECTOR: tl.constexpr = 256 // weight.dtype.element_ty.primitive_bitwidth
    output, column = tile_sectors(outputs, inputs, first, end, BLOCK_N, BLOCK_K, TILES, SECTOR)
    for part in tl.static_range(PARTS):
        place = weight + (output + part * outputs).to(tl.int64) * weight_stride + column
        # Not the bulk instruction: that takes one address of a warp at a time.
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
            "=r,l",
            [place.to(tl.int64)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit  # type: ignore[untyped-decorator]
def tile_sectors(
    outputs: tl.tensor,
    inputs: tl.tensor,
    first: tl.tensor,
    end: tl.tensor,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    TILES: tl.constexpr,
    SECTOR: tl.constexpr,
) -> tl.tuple:
    """Output and first column of every SECTOR numbers of the tiles; those beyond the weight are its last ones."""
    PIECES: tl.constexpr = BLOCK_K // SECTOR
    length = tl.cdiv(inputs, BLOCK_K)
    piece = tl.arange(0, TILES * PIECES)
    tile = tl.minimum(first + piece // PIECES, end - 1)
    column = tl.minimum(tile % length * BLOCK_K + piece % PIECES * SECTOR, inputs - 1)
    output = (tile // length * BLOCK_N)[None, :] + tl.arange(0, BLOCK_N)[:, None]
    return tl.minimum(output, outputs - 1), column[None, :]


@triton.jit  # type: ignore[untyped-decorator]
def apply_gate(
    sums: tl.tuple,
    bias: tl.tensor | None,
    block: tl.tensor,
    outputs: tl.tensor,
    BLOCK_N: tl.constexpr,
    PARTS: tl.constexpr,
) -> tl.tensor:
    """Sums [BLOCK_N, rows] plus bias; where there are two parts, `silu(first) · second`."""
    value = _add_bias(sums[0], bias, block, outputs, 0, BLOCK_N)
    if PARTS == 2:
        value = value / (1.0 + tl.exp(-value)) * _add_bias(sums[1], bias, block, outputs, 1, BLOCK_N)
    return value


@triton.jit  # type: ignore[untyped-decorator]
def _add_bias(
    value: tl.tensor,
    bias: tl.tensor | None,
    block: tl.tensor,
    outputs: tl.tensor,
    part: tl.constexpr,
    BLOCK_N: tl.constexpr,
) -> tl.tensor:
    if bias is not None:
        output = block_outputs(block, BLOCK_N)
        numbers = tl.load(bias + part * outputs + output, mask=output < outputs, other=0.0).to(tl.float32)
        value += numbers[:, None] if len(value.shape) == 2 else numbers
    return value


@triton.jit  # type: ignore[untyped-decorator]
def store_outputs(
    values: tl.tensor,
    residual: tl.tensor | None,
    out: tl.tensor,
    output: tl.tensor,
    row: tl.tensor,
    rows: tl.tensor,
    outputs: tl.tensor,
    residual_stride: tl.tensor,
    out_stride: tl.tensor,
) -> None:
    """Write values, plus the residual where there is one: output and row broadcast to their shape."""
    inside = (output < outputs) & (row < rows)
    if residual is not None:
        values += tl.load(residual + row * residual_stride + output, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * out_stride + output, values.to(out.dtype.element_ty), mask=inside)
