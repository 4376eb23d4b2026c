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

import torch

from bladellm_kernels.decode_schedule import (
    ALONE,
    FEW_SEQUENCES,
    LEAST_ROWS,
    TOGETHER,
    DecodeSchedule,
    DecodeSetting,
    default_schedule,
    is_long,
    row_tile,
    short_tokens,
)
from bladellm_kernels.hopper_device import is_hopper
from bladellm_kernels.kv_format import NO_QUANT, KvFormat
from bladellm_kernels.multiprocessors import multiprocessors

SEQUENCE_FIELDS = 5
PROGRAM_FIELDS = 3


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
        """KV tokens of a step of few sequences beyond which it is `long`."""
        self.warp_specialized = is_hopper(device) and not paged
        queries = range(1, max_query_len + 1)
        batches = 1, min(FEW_SEQUENCES.start, max_batch), max_batch
        settings = ALONE, DecodeSetting(fused=True), DecodeSetting(long=True)
        programs = {count: max(self.programs(count, *case) for case in product(batches, settings)) for count in queries}
        rows = max((programs[count] + max_batch) * count for count in queries) * heads
        self.partial = torch.empty(rows * head_dim, dtype=torch.float32, device=device)
        self.lse = torch.empty(rows, dtype=torch.float32, device=device)
        lanes = kv_heads * max(self.tiles(count) for count in queries)
        self.arrived = torch.zeros(max_batch * lanes, dtype=torch.int32, device=device)

    def rows(self, query_len: int) -> int:
        """Query rows of a KV head that one program takes."""
        return row_tile(query_len * (self.heads // self.kv_heads), self.head_dim, self.dtype)

    def schedule(self, query_len: int, batch: int = 1, setting: DecodeSetting = ALONE) -> DecodeSchedule:
        """Of so many sequences of query_len queries each."""
        rows = self.rows(query_len)
        return self.given_schedule or self._default(rows, batch, setting, self.kv_heads)

    def differs_by_length(self, batch: int, setting: DecodeSetting = ALONE) -> bool:
        """Whether it may make a difference to so many sequences that they are long. Ranks agree on that, whatever heads
        they have: it is asked for the heads to which it makes most."""
        settings = (replace(setting, long=long) for long in (False, True))
        short, long = (self._default(LEAST_ROWS, batch, each, TOGETHER) for each in settings)
        return short != long

    def is_long(self, sequences: int, tokens: int) -> bool:
        """Of a step of so many KV tokens in all."""
        return is_long(sequences, tokens, self.most_short)

    def _default(self, rows: int, batch: int, setting: DecodeSetting, kv_heads: int) -> DecodeSchedule:
        shape = (self.head_dim, self.format, self.dtype, rows, batch)
        return default_schedule(*shape, setting, self.warp_specialized, kv_heads)

    def programs(self, query_len: int, batch: int = 1, setting: DecodeSetting = ALONE) -> int:
        """Programs of each lane: of the KV heads that one takes, or a tile of their query rows."""
        schedule = self.schedule(query_len, batch, setting)
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
        setting: DecodeSetting = ALONE,
    ) -> DecodeWork:
        """The split for sequences of kv_lens, int64 [B] on the device, with query_len queries and window as in
        `ragged_decode_attention`; reads, shares: see `DecodeWork`. Queues one small kernel and never waits. Valid until
        the next step's plan.
        """
        work = self.reserve(len(kv_lens), window, query_len, setting)
        work.reads, work.shares = reads, shares
        self.fill(work, kv_lens)
        return work

    def reserve(self, batch: int, window: int | None, query_len: int, setting: DecodeSetting) -> DecodeWork:
        """The memory of a `plan` for so many sequences, to `fill`."""
        if batch > self.max_batch or not 1 <= query_len <= self.max_query_len:
            raise ValueError(
                f"the workspace holds {self.max_batch} sequences of {self.max_query_len} queries, "
                f"asked for {batch} of {query_len}"
            )
        count, schedule = self.programs(query_len, batch, setting), self.schedule(query_len, batch, setting)
        programs = torch.empty(count, PROGRAM_FIELDS, dtype=torch.int32, device=self.device)
        sequences = torch.empty(batch, SEQUENCE_FIELDS, dtype=torch.int32, device=self.device)
        # Each for itself: kernels are compiled for pointers at whole 16 bytes.
        merges = torch.empty(1 + batch, dtype=torch.int32, device=self.device)
        empties = torch.empty_like(merges)
        segments, rows = count + batch, query_len * self.heads
        partial = self.partial[: segments * rows * self.head_dim].view(segments, rows, self.head_dim)
        lse = self.lse[: segments * rows].view(segments, rows)
        return DecodeWork(programs, sequences, merges, empties, self.arrived, partial, lse, window, query_len, schedule)

    def fill(self, work: DecodeWork, kv_lens: torch.Tensor, settled: bool = False) -> None:
        """Make the plan of reserved work. settled: no kernel that is still at work when the one before this starts
        writes kv_lens, or uses the memory reserved: then this runs beside that one."""
        from bladellm_kernels.decode_plan_triton import launch

        skipped = work.shares if work.reads == "own" else None
        parts = (work.programs, work.sequences, work.merges, work.empties)
        launch(kv_lens, skipped, work.window, work.query_len, work.schedule, *parts, settled)
