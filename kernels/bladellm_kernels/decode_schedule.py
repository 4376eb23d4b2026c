"""How decode attention is launched: its tiles, and how programs share a multiprocessor."""

from dataclasses import dataclass, replace
from math import gcd

import torch

from bladellm_kernels.kv_format import NO_QUANT, KvFormat
from bladellm_kernels.power_of_two import power_of_two

_SHARED_BYTES = 228 * 1024
"""Shared memory of an SM (sm_90)."""
_TILE_BYTES = 32 * 1024
_MANY_SEQUENCES = 64
"""From so many on most programs of Triton's kernel have several, and small tiles lose less at their ends: on an H200 71
µs, not 74, at 128 of 520 tokens in bfloat16."""
_STATE = 4096
"""Most numbers of one warp's output state: 128 registers a thread."""
LEAST_ROWS = 8
"""Query rows of the smallest tile."""
_IDLE_NS = 3000
_SHORT_TOKENS = 131072
"""KV tokens of a step up to which attention had better be `light`, beside linear layers that start early: that gains
some 0.3 ms a step, and attention loses up to 6 % of its bandwidth. Sequences of more in all are `long`."""
_LONG_EACH = 2048
"""KV tokens that sequences of a `long` step have on average, at least: the ends of their segments weigh little then."""
_MANY_KV_HEADS = 16
FEW_SEQUENCES = range(3, 17)
_PLAIN_BYTES = 512
_FEW_BYTES = 128
TOGETHER = 2
"""Where K and V of a token and head are no more than `_FEW_BYTES`, a program takes two of many KV heads, of many
sequences, and of a few long ones: an H200 reads 256 bytes here and there faster than 128, and as fast wherever they
lie. One or two sequences it reads faster by single heads. 256 sequences of 640 tokens take an H100 65.5 µs instead of
71.0, an H200 50.4 instead of 50.9."""


@dataclass(frozen=True, slots=True)
class DecodeSetting:
    """What is around decode attention in a step.

    fused: linear layers that start early, beside it. late: the one behind can wait until attention has left its SMs.
    long: as of `is_long`.
    """

    fused: bool = False
    late: bool = False
    long: bool = False

    @property
    def light(self) -> bool:
        """Whether attention leaves half of an SM's shared memory to the layer behind, one program an SM of each, where
        the format of KV allows it. Short contexts gain by that, long ones lose up to 6 % of the bandwidth."""
        return self.fused and not self.long


@dataclass(frozen=True, slots=True)
class DecodeSchedule:
    """block_kv: positions a step of the loop, `warps` warps sharing them, at least 16 each. stages: of the software
    pipeline, whose tiles take stages - 1 buffers. ctas_per_sm: programs started for each SM, to run at once.
    segment_blocks: blocks that a program could read in the time that starting and ending a segment takes it.

    idle_ns, stay_ns: so long programs stay on their SMs that have no work, or all programs, counted from when the next
    kernel may start; 0 for not at all. See `linger`.
    late: the linear layer behind may start no sooner than all programs have left their SMs, beside the merge of their
    segments at most. Its programs, one an SM, then find all of them empty.
    lane_heads: KV heads that a program takes, its warps divided among them: what they have of a token lies beside each
    other, and is read at a time.
    merge_beside: programs leave room for those of the kernel that merges their segments, which then wait on every SM
    beside them. Else they begin on the first SMs that attention leaves, and what comes next there waits for them.
    warp_specialized: producer warps load, consumer warps attend, where `ring_decode.py` has a kernel for that; all
    stages are buffers then.
    private_rings: every warp loads for itself, and waits for the others at the end of a segment only, where
    `warp_rings.py` has a kernel for that.
    """

    block_kv: int
    stages: int
    warps: int
    ctas_per_sm: int
    segment_blocks: int = 2
    idle_ns: int = 0
    stay_ns: int = 0
    warp_specialized: bool = False
    lane_heads: int = 1
    late: bool = False
    merge_beside: bool = False
    private_rings: bool = False

    def __post_init__(self) -> None:
        warps = self.warps // self.lane_heads
        tokens = self.block_kv // max(warps, 1)
        if warps * self.lane_heads != self.warps or tokens < 16 or power_of_two(tokens) * warps != self.block_kv:
            raise ValueError(
                f"{self.warps} warps of {self.lane_heads} KV heads must share {self.block_kv} positions of each by a "
                "power of two from 16 on"
            )


WARP_SPECIALIZED_SCHEDULES = {
    512: DecodeSchedule(64, 3, 4, 2, warp_specialized=True),
    384: DecodeSchedule(64, 3, 4, 2, warp_specialized=True, merge_beside=True),
    256: DecodeSchedule(64, 5, 4, 2, warp_specialized=True, merge_beside=True),
    192: DecodeSchedule(128, 3, 4, 2, warp_specialized=True, merge_beside=True),
    128: DecodeSchedule(128, 4, 4, 2, warp_specialized=True, merge_beside=True),
}
"""By bytes of K and V of a token and head: the fastest on an H200. Of 4 bits three an SM were slower by half. Of 512
bytes two programs leave no shared memory for a third."""

_WHOLE_BLOCKS = 8
"""`segment_blocks` of `_MANY_SEQUENCES` and more in 512 bytes: cuts then move to borders of sequences that lie further
away. On an H100 128 of 520 to 640 tokens take 102.3 µs instead of 105.4, 256 of them 203.0 instead of 205.0."""

PRIVATE_SCHEDULE = DecodeSchedule(128, 5, 4, 2, warp_specialized=True, merge_beside=True, private_rings=True)
"""Of the 128 bytes that 4 bits make of K and V of a head of 128, for fewer than `_MANY_SEQUENCES` or long ones: on an
H200 22.2 µs instead of 23.6 for one of 70,000 tokens, 36.1 of 38.4 for 32 of 4,096, but 22.3 of 21.6 for 64 of 1,024
and 55.4 of 50.4 for 256 of 640, whose segments end too often. Six stages are as fast."""
_PRIVATE_HEAD = 128

ALONE = DecodeSetting()
LIGHT_SCHEDULE = DecodeSchedule(64, 4, 4, 1, stay_ns=4500)
"""Leaves half of an SM to the kernel behind, of 512 bytes of K and V a token."""
_FEW_LATE = 4
"""Most sequences that are read faster by whole SMs, with a layer behind that starts late, than by a `light` schedule:
steps of 1, 2 and 4 rows of Llama-3.1-8B take 1.7, 1.1 and 3.2 % less on an H100, of 1 and 2 rows of Llama-2-13B 5.5 and
4 %; 8 rows as long."""


def short_tokens(kv_heads: int, ranks: int = 1) -> int:
    """Most KV tokens of a step that is not `long`, for a model's KV heads shared by so many ranks: all agree on it.

    Of many heads half as many: one sequence of Llama-2-13B, 40 heads, took 13.14 ms as a short and 13.4 as a long one
    on an H200 at 32,768 tokens, 20.30 and 20.18 at 70,000, before few sequences were read by whole SMs either way.
    """
    return _SHORT_TOKENS // 2 if kv_heads >= _MANY_KV_HEADS * ranks else _SHORT_TOKENS


def is_long(sequences: int, tokens: int, most_short: int) -> bool:
    """Whether a step is `long`, of so many KV tokens in all; most_short: as of `short_tokens`."""
    return tokens > max(most_short, sequences * _LONG_EACH)


def default_schedule(
    head_dim: int,
    format: KvFormat = NO_QUANT,
    dtype: torch.dtype = torch.bfloat16,
    rows: int = LEAST_ROWS,
    batch: int = 1,
    setting: DecodeSetting = ALONE,
    warp_specialized: bool = True,
    kv_heads: int = 1,
) -> DecodeSchedule:
    """Tiles of about 32 KiB, K and V together, and as many of them in flight as fit; rows: of a program's queries.

    batch: sequences. warp_specialized: whether there is such a kernel for the device and its memory. kv_heads: of the
    layer.
    """
    whole = setting.late and batch <= _FEW_LATE
    if setting.light and rows == LEAST_ROWS and not whole and _is_plain_512(head_dim, format, dtype):
        return LIGHT_SCHEDULE
    token_bytes, idle_ns = _token_bytes(head_dim, format, dtype), _IDLE_NS if setting.light and not setting.late else 0
    whole_units = power_of_two(head_dim) == head_dim and token_bytes in WARP_SPECIALIZED_SCHEDULES
    if warp_specialized and rows == LEAST_ROWS and dtype.itemsize == 2 and whole_units:
        private = token_bytes == _FEW_BYTES and head_dim == _PRIVATE_HEAD and not idle_ns
        private &= batch < _MANY_SEQUENCES or setting.long
        schedule = PRIVATE_SCHEDULE if private else _in_step(token_bytes, batch, setting, kv_heads)
    else:
        schedule = _filling_schedule(head_dim, format, dtype, rows, batch)
    return replace(schedule, idle_ns=idle_ns, late=setting.late)


def _in_step(token_bytes: int, batch: int, setting: DecodeSetting, kv_heads: int) -> DecodeSchedule:
    """Warp-specialized, of warps that share their blocks, and of `TOGETHER` heads where that is faster."""
    schedule = WARP_SPECIALIZED_SCHEDULES[token_bytes]
    if batch >= _MANY_SEQUENCES and token_bytes == _PLAIN_BYTES:
        schedule = replace(schedule, segment_blocks=_WHOLE_BLOCKS)
    together = kv_heads >= _MANY_KV_HEADS or batch >= _MANY_SEQUENCES or (setting.long and batch in FEW_SEQUENCES)
    heads = gcd(kv_heads, TOGETHER) if token_bytes <= _FEW_BYTES and together else 1
    return replace(schedule, block_kv=schedule.block_kv // heads, lane_heads=heads)


def _token_bytes(head_dim: int, format: KvFormat, dtype: torch.dtype) -> int:
    """Of K and V of a token and head."""
    return 2 * format.width(head_dim) * format.dtype(dtype).itemsize


def _is_plain_512(head_dim: int, format: KvFormat, dtype: torch.dtype) -> bool:
    """Whether K and V of a token and head are 512 bytes of unquantized 16-bit numbers."""
    return not format.quantized and dtype.itemsize == 2 and power_of_two(head_dim) == 128


def _filling_schedule(head_dim: int, format: KvFormat, dtype: torch.dtype, rows: int, batch: int) -> DecodeSchedule:
    """Of Triton's kernel; takes the whole of an SM."""
    token_bytes = 2 * power_of_two(format.width(head_dim)) * format.dtype(dtype).itemsize
    if rows == LEAST_ROWS and batch >= _MANY_SEQUENCES and _is_plain_512(head_dim, format, dtype):
        return DecodeSchedule(32, 4, 2, 4, segment_blocks=4)
    block_kv = 64 if dtype == torch.float32 else min(max(_TILE_BYTES // token_bytes, 64), 128)
    plans = [(2, 3), (2, 2), (1, 3), (1, 2)]
    warps = 4
    # Zeros and many rows take registers that a third program would have to do without; products of float32 take all.
    if dtype == torch.float32:
        plans = [(1, 2)]
    elif format.quantized and format.bits == 8 and rows == LEAST_ROWS and head_dim <= 128:
        # Small programs lose less where sequences are short (on an H200 39 µs, not 44, at 64 of 1,024 tokens).
        block_kv, warps, plans = 64, 2, [(4, 3), (4, 2), *plans]
    elif not format.quantized and rows == LEAST_ROWS:
        plans = [(3, 3), *plans]
    # Beside the tiles: queries, scales, what warps exchange at the end, and 1 KiB of every program that CUDA takes.
    kept = 2 * warps * (rows if format.quantized else 8) * power_of_two(head_dim) + (3 + warps) * 1024
    for ctas, buffers in plans:
        if ctas * (buffers * block_kv * token_bytes + kept) <= _SHARED_BYTES:
            return DecodeSchedule(block_kv, buffers + 1, warps, ctas)
    return DecodeSchedule(block_kv, 2, 4, 1)


def row_tile(rows: int, head_dim: int, dtype: torch.dtype) -> int:
    """Query rows of a KV head, of `rows` in all, that one program takes: a power of two from 8 to 32."""
    most = LEAST_ROWS if dtype == torch.float32 else min(32, max(_STATE // power_of_two(head_dim), LEAST_ROWS))
    return min(max(power_of_two(rows), LEAST_ROWS), most)
