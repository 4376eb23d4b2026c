"""How the work of a decode step is split over a GPU: made once a step on the device, shared by all layers.

The blocks of `block_kv` positions that a batch has to read are counted through, sequence after sequence, and cut into
ranges, one a program, whatever the lengths are. The part of a sequence within one program is a *segment*: it takes time
to start and to end, and cuts that move to a border of sequences save one. Ranges are equal in blocks, or in blocks and
segments, or somewhat longer where then fewer sequences are cut: as the slowest program takes least time. Where a
sequence is a single segment its program writes the output; else the segments leave partial states (an output and the
logarithm of the sum of exponentials) that are merged. Program c's segment of sequence b has the number c + b: unique,
since both only grow, and consecutive for the segments of a sequence. The grid is fixed: a captured CUDA graph stays
valid for other lengths.
"""

from dataclasses import dataclass, replace
from itertools import product
from math import gcd

import torch

from bladellm_kernels.hopper_device import is_hopper
from bladellm_kernels.kv_format import NO_QUANT, KvFormat
from bladellm_kernels.multiprocessors import multiprocessors
from bladellm_kernels.power_of_two import power_of_two

_SHARED_BYTES = 228 * 1024
"""Shared memory of an SM (sm_90)."""
_TILE_BYTES = 32 * 1024
_MANY_SEQUENCES = 64
"""From so many on most programs of Triton's kernel have several, and small tiles lose less at their ends: on an H200 71
µs, not 74, at 128 of 520 tokens in bfloat16."""
_STATE = 4096
"""Most numbers of one warp's output state: 128 registers a thread."""
_IDLE_NS = 3000
_SHORT_TOKENS = 131072
"""KV tokens of a step up to which attention had better be `light`, beside linear layers that start early: that gains
some 0.3 ms a step, and attention loses up to 6 % of its bandwidth. Sequences of more in all are `long`."""
SEQUENCE_FIELDS = 5
PROGRAM_FIELDS = 3


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
    warp_specialized: producer warps load, consumer warps attend, where `ring_decode.py` has a kernel for that; all
    stages are buffers then.
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
    256: DecodeSchedule(64, 5, 4, 2, warp_specialized=True),
    128: DecodeSchedule(128, 4, 4, 2, warp_specialized=True),
}
"""By bytes of K and V of a token and head: the fastest on an H200. Of 4 bits three an SM were slower by half."""

_MANY_KV_HEADS = 16
_FEW_SEQUENCES = range(3, 17)
_FEW_BYTES = 128
_TOGETHER = 2
"""Where K and V of a token and head are no more than `_FEW_BYTES`, a program takes two of many KV heads, and of a few
long sequences: an H200 reads 256 bytes here and there faster than 128, and as fast wherever they lie. One or two
sequences it reads faster by single heads."""

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


def default_schedule(
    head_dim: int,
    format: KvFormat = NO_QUANT,
    dtype: torch.dtype = torch.bfloat16,
    rows: int = 8,
    batch: int = 1,
    light: bool = False,
    warp_specialized: bool = True,
    kv_heads: int = 1,
    long: bool = False,
    late: bool = False,
) -> DecodeSchedule:
    """Tiles of about 32 KiB, K and V together, and as many of them in flight as fit; rows: of a program's queries.

    batch: sequences; long: of more than `short_tokens` in all. light: leave half of an SM's shared memory to the kernel
    behind, where the format allows it. warp_specialized: whether there is such a kernel for the device and its memory.
    kv_heads: of the layer. late: the kernel behind can wait until attention has left its SMs.
    """
    if light and rows == 8 and _gains_by_light(head_dim, format, dtype, batch, late):
        return LIGHT_SCHEDULE
    token_bytes = _token_bytes(head_dim, format, dtype)
    if warp_specialized and rows == 8 and dtype.itemsize == 2 and token_bytes in WARP_SPECIALIZED_SCHEDULES:
        schedule = WARP_SPECIALIZED_SCHEDULES[token_bytes]
        together = kv_heads >= _MANY_KV_HEADS or (long and batch in _FEW_SEQUENCES)
        heads = gcd(kv_heads, _TOGETHER) if token_bytes <= _FEW_BYTES and together else 1
        schedule = replace(schedule, block_kv=schedule.block_kv // heads, lane_heads=heads)
    else:
        schedule = _filling_schedule(head_dim, format, dtype, rows, batch)
    return replace(schedule, idle_ns=_IDLE_NS if light and not late else 0, late=late)


def _token_bytes(head_dim: int, format: KvFormat, dtype: torch.dtype) -> int:
    """Of K and V of a token and head."""
    return 2 * format.width(head_dim) * format.dtype(dtype).itemsize


def _is_plain_512(head_dim: int, format: KvFormat, dtype: torch.dtype) -> bool:
    """Whether K and V of a token and head are 512 bytes of unquantized 16-bit numbers."""
    return not format.quantized and dtype.itemsize == 2 and power_of_two(head_dim) == 128


def _gains_by_light(head_dim: int, format: KvFormat, dtype: torch.dtype, batch: int, late: bool) -> bool:
    """Whether there is a light schedule, and whole SMs with a layer behind that starts late are no faster."""
    return _is_plain_512(head_dim, format, dtype) and not (late and batch <= _FEW_LATE)


def _filling_schedule(head_dim: int, format: KvFormat, dtype: torch.dtype, rows: int, batch: int) -> DecodeSchedule:
    """Of Triton's kernel; takes the whole of an SM."""
    token_bytes = 2 * power_of_two(format.width(head_dim)) * format.dtype(dtype).itemsize
    if rows == 8 and batch >= _MANY_SEQUENCES and _is_plain_512(head_dim, format, dtype):
        return DecodeSchedule(32, 4, 2, 4, segment_blocks=4)
    block_kv = 64 if dtype == torch.float32 else min(max(_TILE_BYTES // token_bytes, 64), 128)
    plans = [(2, 3), (2, 2), (1, 3), (1, 2)]
    warps = 4
    # Zeros and many rows take registers that a third program would have to do without; products of float32 take all.
    if dtype == torch.float32:
        plans = [(1, 2)]
    elif format.quantized and format.per_element == 1 and rows == 8 and head_dim <= 128:
        # Small programs lose less where sequences are short (on an H200 39 µs, not 44, at 64 of 1,024 tokens).
        block_kv, warps, plans = 64, 2, [(4, 3), (4, 2), *plans]
    elif not format.quantized and rows == 8:
        plans = [(3, 3), *plans]
    # Beside the tiles: queries, scales, what warps exchange at the end, and 1 KiB of every program that CUDA takes.
    kept = 2 * warps * (rows if format.quantized else 8) * power_of_two(head_dim) + (3 + warps) * 1024
    for ctas, buffers in plans:
        if ctas * (buffers * block_kv * token_bytes + kept) <= _SHARED_BYTES:
            return DecodeSchedule(block_kv, buffers + 1, warps, ctas)
    return DecodeSchedule(block_kv, 2, 4, 1)


def row_tile(rows: int, head_dim: int, dtype: torch.dtype) -> int:
    """Query rows of a KV head, of `rows` in all, that one program takes: a power of two from 8 to 32."""
    most = 8 if dtype == torch.float32 else min(32, max(_STATE // power_of_two(head_dim), 8))
    return min(max(power_of_two(rows), 8), most)


@dataclass(slots=True)
class DecodeWork:
    """The split of one step for layers of one window.

    programs: int32 [C, 3]: first block, end of the blocks, sequence of the first one, of each program of a KV head.
    sequences: int32 [B, 5]: first and end of the sequence's blocks in the count over the batch, the block of the
    sequence that the first one is, number of the first segment, segments (0 for a sequence of length 0).
    merges, empties: int32 [1 + B]: how many sequences are not one segment, and these; the same of those that are none.
    arrived: int32 [B · tiles of the query rows of all KV heads], zeros: of counters in the kernel that merges itself.
    partial: float32 [segments, query_len · Hq, D] and lse: float32 [segments, query_len · Hq]: where partial states go.
    reads: "all"; "own": of each sequence what is behind its first shares[b] tokens, int64 [B], multiples of block_kv;
    or "shared": the sequences are beginnings that others share, the query_len others of each in shares, int64
    [B, query_len], -1 for none, and all segments leave partial states. See `cascade_decode_attention.py`.
    used: whether a kernel has waited for the plan: what is launched after that kernel need not.
    """

    programs: torch.Tensor
    sequences: torch.Tensor
    merges: torch.Tensor
    empties: torch.Tensor
    arrived: torch.Tensor
    partial: torch.Tensor
    lse: torch.Tensor
    window: int | None
    query_len: int
    schedule: DecodeSchedule
    reads: str = "all"
    shares: torch.Tensor | None = None
    used: bool = False


class DecodeWorkspace:
    """Memory for the partial states of decode attention over up to `max_batch` sequences, and the planning of steps.

    heads, kv_heads, head_dim, format, dtype: of all layers that share it (dtype is the model's). max_query_len: most
    query tokens of a sequence. schedule: None for the default one. paged: as in `KvLayer`. most_short: as of
    `short_tokens`, None where no other rank has a part of the heads. One workspace serves one stream.
    """

    def __init__(
        self,
        device: torch.device,
        max_batch: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        max_query_len: int = 1,
        format: KvFormat = NO_QUANT,
        dtype: torch.dtype = torch.bfloat16,
        schedule: DecodeSchedule | None = None,
        paged: bool = False,
        most_short: int | None = None,
    ) -> None:
        if heads % kv_heads:
            raise ValueError(f"{kv_heads} KV heads do not divide {heads} query heads")
        self.device = device
        self.max_batch = max_batch
        self.heads = heads
        self.kv_heads = kv_heads
        self.head_dim = head_dim
        self.max_query_len = max_query_len
        self.format = format
        self.dtype = dtype
        self.given_schedule = schedule
        self.most_short = short_tokens(kv_heads) if most_short is None else most_short
        """KV tokens of a step beyond which it is `long`."""
        self.warp_specialized = is_hopper(device) and not paged
        queries = range(1, max_query_len + 1)
        sizes = list(product((1, min(_FEW_SEQUENCES.start, max_batch), max_batch), (False, True)))
        programs = {count: max(self.programs(count, batch, long=long) for batch, long in sizes) for count in queries}
        rows = max((programs[count] + max_batch) * count for count in queries) * heads
        self.partial = torch.empty(rows * head_dim, dtype=torch.float32, device=device)
        self.lse = torch.empty(rows, dtype=torch.float32, device=device)
        lanes = kv_heads * max(self.tiles(count) for count in queries)
        self.arrived = torch.zeros(max_batch * lanes, dtype=torch.int32, device=device)

    def rows(self, query_len: int) -> int:
        """Query rows of a KV head that one program takes."""
        return row_tile(query_len * (self.heads // self.kv_heads), self.head_dim, self.dtype)

    def schedule(
        self, query_len: int, batch: int = 1, light: bool = False, long: bool = False, late: bool = False
    ) -> DecodeSchedule:
        return self.given_schedule or default_schedule(
            self.head_dim,
            self.format,
            self.dtype,
            self.rows(query_len),
            batch,
            light,
            warp_specialized=self.warp_specialized,
            kv_heads=self.kv_heads,
            long=long,
            late=late,
        )

    def differs_by_length(self, batch: int, light: bool = False, late: bool = False) -> bool:
        """Whether `long`, in place of `light` where that is given, may make a difference to so many sequences, whatever
        heads a rank has."""
        few = _token_bytes(self.head_dim, self.format, self.dtype) <= _FEW_BYTES
        if self.warp_specialized and few and batch in _FEW_SEQUENCES:
            return True
        # Programs without work stay a while in steps that are light by name only, where nothing is late.
        return light and (not late or _gains_by_light(self.head_dim, self.format, self.dtype, batch, late))

    def programs(
        self, query_len: int, batch: int = 1, light: bool = False, long: bool = False, late: bool = False
    ) -> int:
        """Programs of each lane: of the KV heads that one takes, or a tile of their query rows."""
        schedule = self.schedule(query_len, batch, light, long, late)
        lanes = self.kv_heads // schedule.lane_heads * self.tiles(query_len)
        return max(1, schedule.ctas_per_sm * multiprocessors(self.device) // lanes)

    def tiles(self, query_len: int) -> int:
        """Tiles of `rows` query rows of a KV head."""
        return -(-query_len * (self.heads // self.kv_heads) // self.rows(query_len))

    def plan(
        self,
        kv_lens: torch.Tensor,
        window: int | None = None,
        query_len: int = 1,
        reads: str = "all",
        shares: torch.Tensor | None = None,
        light: bool = False,
        long: bool = False,
        late: bool = False,
    ) -> DecodeWork:
        """The split for sequences of kv_lens, int64 [B] on the device, with query_len queries and window as in
        `ragged_decode_attention`; reads, shares: see `DecodeWork`. Queues one small kernel and never waits. Valid until
        the next step's plan.

        light: programs leave room for those of the linear layer behind attention, one a multiprocessor of each. Short
        contexts gain by that, long ones lose up to 6 % of the bandwidth. long, late: as in `default_schedule`.
        """
        from bladellm_kernels.decode_plan_triton import launch

        batch = kv_lens.shape[0]
        if batch > self.max_batch or not 1 <= query_len <= self.max_query_len:
            raise ValueError(
                f"the workspace holds {self.max_batch} sequences of {self.max_query_len} queries, "
                f"asked for {batch} of {query_len}"
            )
        asked = (query_len, batch, light, long, late)
        count, schedule = self.programs(*asked), self.schedule(*asked)
        programs = torch.empty(count, PROGRAM_FIELDS, dtype=torch.int32, device=kv_lens.device)
        sequences = torch.empty(batch, SEQUENCE_FIELDS, dtype=torch.int32, device=kv_lens.device)
        # Each for itself: kernels are compiled for pointers at whole 16 bytes.
        merges = torch.empty(1 + batch, dtype=torch.int32, device=kv_lens.device)
        empties = torch.empty_like(merges)
        skipped = shares if reads == "own" else None
        launch(kv_lens, skipped, window, query_len, schedule, programs, sequences, merges, empties)
        segments, rows = count + batch, query_len * self.heads
        partial = self.partial[: segments * rows * self.head_dim].view(segments, rows, self.head_dim)
        lse = self.lse[: segments * rows].view(segments, rows)
        return DecodeWork(
            programs, sequences, merges, empties, self.arrived, partial, lse, window, query_len, schedule, reads, shares
        )
