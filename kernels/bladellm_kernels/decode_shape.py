"""What the decode kernel is compiled for."""

from dataclasses import dataclass, replace
from math import gcd

import torch

from bladellm_kernels.decode_schedule import row_tile
from bladellm_kernels.decode_work import DecodeWork
from bladellm_kernels.kv_layer import KvLayer
from bladellm_kernels.power_of_two import power_of_two

_RAISED = {"int8": 6, "int8_affine": 6, "int4": 2, "int4_affine": 2, "fp8_e4m3": 8, "fp8_e5m2": 14}
"""Exponent of a power of two not above half the range of codes: probabilities are raised by it before they are
multiplied by scales, which are the largest value divided by that range, and rounded to float16."""

_OFFSET = {"int8": 128.0, "int4": 8.0}
"""By how much codes are too high as `unit_numbers` counts them, from 0 on."""
_SUBNORMAL = 2.0**-24
"""What the lowest bit of a float16 counts."""
_BRAIN = 2.0**-112
"""What a code of 12 bits that is 1.0 becomes as a bfloat16, with the same bits in front of its mantissa."""
_BRAIN_RAISED = 64
"""Powers of two by which queries, and probabilities, are raised beside such: sums are far from float32's ends."""


@dataclass(frozen=True)
class DecodeShape:
    """The kernel's compile-time arguments.

    rows_used: query rows of a KV head, query_len · group; tiles of `rows` of them go to different programs. parts:
    numbers in a unit, words: of a unit (see `kv_codes_triton.py`). units: in a head, padded to a power of two. step:
    words; a power of two up to 16 bytes that divides the payload's strides. nibbles: codes of 4 bits. bounded: any
    codes are numbers. code_step: what `unit_numbers` makes of a code of 1. offset: by which they are higher, counted
    from 0 on. raised: powers of two by which probabilities are, queries_raised: queries. one_granule: every block lies
    in one granule. plain: without CUDA instructions. idle_ns, stay_ns, lane_heads: see `DecodeSchedule`. tokens:
    positions of a block that a warp takes. reads: see `DecodeWork`. boxed: the copy engine fetches whole blocks.
    """

    kv_heads: int
    group: int
    query_len: int
    rows_used: int
    rows: int
    tiles: int
    head_dim: int
    parts: int
    words: int
    units: int
    units_padded: int
    step: int
    format: str
    scaled: bool
    affine: bool
    raised: int
    queries_raised: int
    nibbles: bool
    bounded: bool
    code_step: float
    offset: float
    granule_tokens: int
    one_granule: bool
    paged: bool
    windowed: bool
    reads: str
    plain: bool
    idle_ns: int
    stay_ns: int
    block_kv: int
    warps: int
    tokens: int
    lane_heads: int = 1
    boxed: bool = False

    @property
    def head_warps(self) -> int:
        """Warps of a KV head."""
        return self.warps // self.lane_heads

    def of_one_head(self) -> "DecodeShape":
        """For a kernel whose programs take one KV head."""
        warps = min(self.warps, self.block_kv // 16)
        return replace(self, lane_heads=1, warps=warps, tokens=self.block_kv // warps)

    @property
    def lanes(self) -> int:
        """Programs of a range: one for some KV heads, and a tile of their query rows."""
        return self.kv_heads // self.lane_heads * self.tiles

    @property
    def causal_len(self) -> int:
        """Queries that see no more than those before them; what sequences share lies before all their queries."""
        return 1 if self.reads == "shared" else self.query_len

    @property
    def query_factor(self) -> float:
        """By which queries are raised."""
        return 2.0**self.queries_raised

    @property
    def score_step(self) -> float:
        """What products with queries are too large by; upper nibbles count 16-fold, and the queries of lower ones."""
        return self.code_step * self.query_factor * (16 if self.nibbles else 1)


def decode_shape(q: torch.Tensor, kv: KvLayer, work: DecodeWork) -> DecodeShape:
    """For queries [tokens, Hq, D]; the arguments have been checked."""
    group = q.shape[1] // kv.kv_heads
    rows_used = work.query_len * group
    rows = row_tile(rows_used, kv.head_dim, q.dtype)
    parts = unit_parts(kv)
    units = kv.head_dim // parts
    block_kv = work.schedule.block_kv
    plain = q.dtype == torch.float32 or not q.is_cuda or torch.version.hip is not None
    brain = kv.format.float12 and q.dtype == torch.bfloat16 and not plain
    integer = kv.format.quantized and not (kv.payload.dtype.is_floating_point or kv.format.float12)
    return DecodeShape(
        kv_heads=kv.kv_heads,
        group=group,
        query_len=work.query_len,
        rows_used=rows_used,
        rows=rows,
        tiles=-(-rows_used // rows),
        head_dim=kv.head_dim,
        parts=parts,
        words=unit_words(kv),
        units=units,
        units_padded=max(power_of_two(units), 16),
        step=gcd(16 // unit_bytes(kv), *unit_strides(kv)),
        format=kv.format.name,
        scaled=kv.format.quantized,
        affine=kv.format.affine,
        raised=_BRAIN_RAISED if brain else _RAISED.get(kv.format.name, 0),
        queries_raised=_BRAIN_RAISED if brain else 0,
        nibbles=kv.format.nibbles,
        bounded=integer or kv.format.float12,
        code_step=_BRAIN if brain else _SUBNORMAL if integer and not plain else 1.0,
        offset=_OFFSET.get(kv.format.name, 0.0),
        granule_tokens=kv.granule_tokens,
        one_granule=kv.granule_tokens % block_kv == 0 and _even_scales(kv),
        paged=kv.paged,
        windowed=work.window is not None,
        reads=work.reads,
        plain=plain,
        idle_ns=0 if plain else work.schedule.idle_ns,
        stay_ns=0 if plain else work.schedule.stay_ns,
        block_kv=block_kv,
        warps=work.schedule.warps,
        tokens=block_kv * work.schedule.lane_heads // work.schedule.warps,
        lane_heads=work.schedule.lane_heads,
        boxed=_boxed(kv) and work.schedule.lane_heads == 1,
    )


def unit_parts(kv: KvLayer) -> int:
    """Numbers in a unit: two bytes of codes, three times two of 12 bits, or one unquantized element."""
    return unit_words(kv) * 16 // kv.format.bits if kv.format.quantized else 1


def unit_words(kv: KvLayer) -> int:
    return 3 if kv.format.float12 else 1


def unit_bytes(kv: KvLayer) -> int:
    """Of a word of a unit."""
    return 2 if kv.format.quantized else kv.payload.element_size()


def unit_strides(kv: KvLayer) -> list[int]:
    """Strides of the payload's rows, heads, and of V after K, in words of units."""
    row, value, head, _ = kv.payload.stride()
    return [stride * kv.payload.element_size() // unit_bytes(kv) for stride in (row, head, value)]


def _boxed(kv: KvLayer) -> bool:
    """Whether the copy engine can fetch tokens, one behind the other in memory, in halves or whole lines of 128 bytes,
    and their scales."""
    if kv.paged or len(kv.payload) >= 2**31 or not (kv.scales is None or kv.scales.is_contiguous()):
        return False
    if kv.format.quantized:
        return not kv.format.nibbles and kv.head_dim // unit_parts(kv) % 32 == 0
    return kv.payload.element_size() == 2 and kv.head_dim % 64 == 0


def _even_scales(kv: KvLayer) -> bool:
    """Whether the scales of a block start in the first half of a 32-bit word."""
    return kv.scales is None or all(stride % 2 == 0 for stride in kv.scales.stride()[:-1])
