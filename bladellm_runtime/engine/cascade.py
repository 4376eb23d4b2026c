"""Decode steps that read shared beginnings once: whether an engine has them, and when they pay.

Figures of an H200 (kernels/benchmarks/results/decode_attention_h200.md): a layer of 4 KiB of KV a token, tiles of 4
rows.

- A row alone reads shared tokens at 0.36 ns each, out of the L2 cache: 64 rows of 2,048 take 47 µs, of 512 take 11.
- The kernel that reads them once for a tile takes 7 µs, whatever it reads, and 0.44 ns for a token of a tile: 21 µs
  and 11 µs for the same rows. Merging what it leaves takes 1.2 µs.

So a layer gains 0.35 ns for each token that is not read again, less 9 µs: nothing below some 27,000 tokens (16 rows of
2,048, or 64 of 512, save 24,600 and lose 1 to 2 µs), 24 µs at 98,000. A step takes two plans more, and is padded to the
next of fewer sizes; `STEP_BYTES` is where a layer gains 8 µs, some 5 % of what it takes 64 rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from bladellm_kernels.cascade_decode_attention import CascadeWorkspace, tile_members

from bladellm_runtime.config import EngineArgs
from bladellm_runtime.kv.arena import KvArena, KvShape
from bladellm_runtime.kv.shared_reads import SharingRule
from bladellm_runtime.kv.spec import KvSpec
from bladellm_runtime.models.config import ModelSpec

STEP_BYTES = 192 << 20
"""Of a layer's KV that a step must save: 49,152 tokens of 4 KiB."""
GROUP_BYTES = 4 << 20
"""The same of a group: what takes its segments, about two blocks of 128 tokens a program, to begin and to end."""
LEAST_ROWS = 32
"""Fewer rows are not measured; up to 16 have fused layers, for which attention leaves room on the device."""
SIZE_STEP = 32
"""Rows between captured sizes, at least: a capture takes 55 ms at start, and some rows of padding a step little."""


@dataclass(frozen=True, slots=True)
class Cascade:
    """members: sequences that share one read. workspace: of decode attention, None on a CPU."""

    members: int
    workspace: CascadeWorkspace | None


def make_cascade(
    args: EngineArgs, spec: ModelSpec, arena: KvArena, shape: KvShape, sizes: Sequence[int]
) -> Cascade | None:
    """None where nothing can be shared or gained: without a prompt cache, with an arena that shows granules once, with
    windows in all layers, where a row's heads fill a tile, and without a size to capture (`sizes`: all of them)."""
    members = tile_members(spec.heads, spec.kv_heads, spec.head_dim, shape.dtype)
    shares = arena.shares and not args.disable_prompt_cache
    if not shares or members < 2 or None not in spec.windows or not cascade_sizes(sizes):
        return None
    workspace = None
    if arena.device.type == "cuda":
        heads = (spec.heads, spec.kv_heads, spec.head_dim)
        paged = args.attn_cls == "paged"
        workspace = CascadeWorkspace(arena.device, max(sizes), *heads, shape.format, shape.dtype, paged)
    return Cascade(members, workspace)


def cascade_sizes(sizes: Sequence[int]) -> list[int]:
    """Which of the captured batch sizes are captured with shared reads too, ascending; the largest is among them."""
    chosen: list[int] = []
    for size in sorted(sizes, reverse=True):
        if size >= LEAST_ROWS and (not chosen or chosen[-1] - size >= SIZE_STEP):
            chosen.append(size)
    return chosen[::-1]


def sharing_rule(cascade: Cascade, kv_spec: KvSpec, most_rows: int) -> SharingRule:
    """When the scheduler has rows read what they share once, for steps of up to `most_rows`."""
    layers = sum(len(group.layers) for group in kv_spec.groups)
    token_bytes = kv_spec.token_bytes / layers
    return SharingRule(
        members=cascade.members,
        least_rows=LEAST_ROWS,
        most_rows=most_rows,
        step_tokens=round(STEP_BYTES / token_bytes),
        group_tokens=round(GROUP_BYTES / token_bytes),
    )
