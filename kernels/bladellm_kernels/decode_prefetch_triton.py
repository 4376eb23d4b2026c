"""Bring blocks of KV that are read soon into the L2 cache of a CUDA GPU, while the loop reads other blocks."""

import triton
import triton.language as tl

# Not cp.async.bulk.prefetch: it takes its address from a uniform register, so a warp asks for one row after another.
_PREFETCH = tl.constexpr("""{
        .reg .pred wanted;
        setp.ne.b32 wanted, $2, 0;
        @wanted prefetch.global.L2 [$1];
        mov.b32 $0, 0;
    }""")


@triton.jit  # type: ignore[untyped-decorator]
def prefetch_block(kv: tl.tuple, span: tl.tuple, block: tl.tensor, stop: tl.tensor, SHAPE: tl.constexpr) -> None:
    """Ask for the keys and values of a block of unpaged memory: those within the span and before block `stop`.

    No number depends on it: also what an earlier kernel still writes may be asked for.
    """
    GRAINS: tl.constexpr = SHAPE.row_grains
    request = tl.arange(0, SHAPE.block_kv * 2 * GRAINS)
    position = block * SHAPE.block_kv + request // (2 * GRAINS)
    byte = request % GRAINS * SHAPE.grain
    wanted = (position >= span.lowest) & (position < tl.minimum(span.kv_len, stop * SHAPE.block_kv))
    wanted &= byte < SHAPE.row_bytes
    place = span.head.to(tl.int64) * kv.head_stride + (span.base_row + position) * kv.row_stride
    place += request // GRAINS % 2 * kv.value_stride
    address = (kv.payload + place * SHAPE.step).to(tl.int64, bitcast=True) + byte
    tl.inline_asm_elementwise(_PREFETCH, "=r,l,r", [address, wanted.to(tl.int32)], tl.int32, is_pure=False, pack=1)
