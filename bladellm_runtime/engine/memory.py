"""How much memory the KV cache gets: by calculation from what is free, never by a trial run."""

from dataclasses import dataclass, field, replace
from math import lcm

import psutil
import torch
from bladellm_kernels.kv_format import KV_FORMATS
from bladellm_kernels.listed_scratch import SEEN_ROWS
from bladellm_kernels.lora_expand import MAX_SLICES
from bladellm_kernels.lora_tokens import TILE_PARTS
from bladellm_kernels.prefill_tiles import PROGRAMS

from bladellm_runtime.config import GIB, EngineArgs
from bladellm_runtime.engine.cascade import cascade_sizes
from bladellm_runtime.engine.mixed_graphs import mixed_sizes
from bladellm_runtime.engine.step_graphs import graph_sizes
from bladellm_runtime.errors import ConfigError
from bladellm_runtime.kv.arena import KvShape
from bladellm_runtime.kv.factory import arena_kind, block_bytes, page_bytes
from bladellm_runtime.kv.sizing import granule_unit, kv_groups, plan_spec
from bladellm_runtime.kv.spec import KvSpec
from bladellm_runtime.models.config import ModelSpec
from bladellm_runtime.models.stages import Stages

CPU_KV_GIB = 4.0
CPU_KV_SHARE = 0.5
"""On a CPU the default KV cache is `CPU_KV_GIB`, but never more than this share of the memory that is free."""
LAYERS_PER_GROUP = 4
"""Layers interleaved in one granule: on an H200, 4 to 8 cost 1-2 % of the read bandwidth, all of them 5-6 %."""
GRANULE_TOKENS = 16
GRAPH_BYTES = 8 << 20
"""Device memory that CUDA keeps for the nodes of the graphs of one batch size or token count, amply."""
PROGRAM_STATE = 256
"""Rows of float32 that a program of prefill attention leaves: 128, and head dimensions may be padded to twice."""
ATTENTION_STATES = 12
"""Outputs of attention of a step's tokens that a prefill with a long prefix holds at once."""


@dataclass(slots=True)
class MemoryTable:
    """Terms of the device's memory, (name, bytes), for the start-up banner."""

    rows: list[tuple[str, int]] = field(default_factory=list)

    def add(self, name: str, size: int) -> None:
        self.rows.append((name, size))


def workspace_bytes(args: EngineArgs, spec: ModelSpec, dtype: torch.dtype) -> int:
    """An upper bound of a step's activations: residual, QKV, MLP and attention scratch of its tokens, and logits."""
    tokens = args.step_tokens
    width = 6 * spec.hidden_size + 3 * spec.intermediate_size + 4 * spec.heads * spec.head_dim
    activations = tokens * width * max(dtype.itemsize, 2)
    # Where steps are captured, all leave what the head makes in the same memory, which `graph_bytes` counts.
    copies = 2 if graph_sizes(args) else 3
    logits = copies * min(tokens, args.slots) * spec.vocab_size * 4
    # What the A of adapters leave of tokens, and of decode rows those of all slots.
    rows = min(tokens, args.slots) * args.max_loras * max(dtype.itemsize, 2)
    adapters = (TILE_PARTS * tokens * 4 + rows) * MAX_SLICES * args.max_lora_rank if args.enable_lora else 0
    # Dequantized keys and values, at most 256 MiB, kernels' work lists; and the parts of long prefixes, a few at once.
    attention = GIB // 2 + ATTENTION_STATES * tokens * spec.heads * spec.head_dim * max(dtype.itemsize, 2)
    return activations + logits + adapters + attention


def graph_bytes(args: EngineArgs, spec: ModelSpec, dtype: torch.dtype) -> int:
    """About what captured steps take: the largest one's activations, which all share, logits of all slots, parts of
    prefill attention, and CUDA's own of each."""
    sizes, mixed = graph_sizes(args), mixed_sizes(args)
    shared = [] if args.disable_prompt_cache else cascade_sizes(sizes)
    width = 6 * spec.hidden_size + 3 * spec.intermediate_size + 4 * spec.heads * spec.head_dim
    rows = max(sizes, default=0) * torch.float32.itemsize + (args.slots if sizes else 0) * dtype.itemsize
    logits = rows * spec.vocab_size
    # What the A of all slots leave of rows of decode steps.
    width += args.max_loras * MAX_SLICES * args.max_lora_rank if args.enable_lora else 0
    # Beside the activations, what the final norm leaves.
    activations = max(max(sizes, default=0), max(mixed, default=0)) * (width + spec.hidden_size) * dtype.itemsize
    times = 2 if args.enable_lora else 1  # without adapters and with them
    parts = PROGRAMS * PROGRAM_STATE * spec.head_dim * torch.float32.itemsize if mixed else 0
    numbers = spec.kv_heads * spec.head_dim * dtype.itemsize
    # What attention in one pass reads of keys and values in 12 bits.
    made = 2 * numbers * (max(mixed) + SEEN_ROWS) if mixed and KV_FORMATS[args.kv_cache_quant].float12 else 0
    return logits + activations + parts + made + (times * (len(sizes) + len(mixed)) + len(shared)) * GRAPH_BYTES


def kv_budget(args: EngineArgs, spec: ModelSpec, dtype: torch.dtype, device: torch.device, table: MemoryTable) -> int:
    """Bytes for the KV cache. Raises `ConfigError` when nothing is left for it."""
    if args.kv_cache_gib is not None:
        return int(args.kv_cache_gib * GIB)
    if device.type == "cpu":
        return int(min(CPU_KV_GIB * GIB, psutil.virtual_memory().available * CPU_KV_SHARE) / len(args.local_ranks))
    free, total = torch.cuda.mem_get_info(device)
    workspace = workspace_bytes(args, spec, dtype)
    table.add("workspace", workspace)
    graphs = graph_bytes(args, spec, dtype)
    table.add("CUDA graphs", graphs)
    budget = int(total * args.max_gpu_memory_utilization) - (total - free) - workspace - graphs
    if budget <= 0:
        raise ConfigError(
            f"no memory is left for the KV cache: {(total - free) / GIB:.1f} of {total / GIB:.1f} GiB are in use and "
            f"steps need {(workspace + graphs) / GIB:.1f}; raise --max_gpu_memory_utilization or lower "
            "--ragged_flash_max_batch_tokens"
        )
    return budget


def make_kv_spec(
    args: EngineArgs, stages: Stages, shape: KvShape, device: torch.device, max_model_len: int, budget: int
) -> KvSpec:
    """Carve a stage's budget into granules, of as many tokens and as many of them as on all other stages, if these have
    as much of it for a layer."""
    kind = arena_kind(args.kv_arena, device, args.attn_cls)
    swap = args.prompt_cache_enable_swap and not args.disable_prompt_cache
    page = page_bytes(kind, device)
    grouped = {count: kv_groups(count, shape.payload_bytes, LAYERS_PER_GROUP) for count in map(len, stages.layers)}
    most, own = stages.most_layers, stages.spec.layers
    # All stages as the largest one: of no other is a granule larger, or has more parts to be mapped.
    largest = plan_spec(
        grouped[most],
        budget_bytes=budget // own * most,
        num_slots=args.slots,
        max_model_len=max_model_len,
        granule_tokens_hint=GRANULE_TOKENS,
        page_bytes=page,
        unit=lcm(*(granule_unit(groups, page) for groups in grouped.values())),
        block_bytes=block_bytes(kind),
        scale_token_bytes=most * shape.scale_bytes,
        host_bytes=int(args.prompt_cache_swap_gib * GIB) if swap else 0,
    )
    return replace(largest, groups=grouped[own], scale_token_bytes=own * shape.scale_bytes)
