"""From arguments to a running engine: model, memory, scheduler, runner; with the time and the bytes of each part."""

import logging
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from bladellm_kernels.decode_work import DecodeWorkspace
from bladellm_kernels.has_triton import has_triton
from bladellm_kernels.prefill_calls import PlannedCalls
from bladellm_kernels.prefill_warm_up import warm_up as warm_up_prefill

from bladellm_runtime.config import GIB, GPU_STEP_TOKENS, EngineArgs
from bladellm_runtime.engine.cascade import Cascade, make_cascade, sharing_rule
from bladellm_runtime.engine.compile_kernels import compile_ahead, keep_kernel_list
from bladellm_runtime.engine.core import EngineCore
from bladellm_runtime.engine.cuda_capture import Capture, CudaCapture
from bladellm_runtime.engine.device import pick_device, pick_dtype, use_threads
from bladellm_runtime.engine.kernel_compiles import KERNEL_COMPILES
from bladellm_runtime.engine.kv_format import key_rotation, pick_kv_format
from bladellm_runtime.engine.launch_timer import LaunchTimer
from bladellm_runtime.engine.measure_steps import measure_step_cost
from bladellm_runtime.engine.memory import MemoryTable, kv_budget, make_kv_spec
from bladellm_runtime.engine.memory_recovery import MemoryRecovery
from bladellm_runtime.engine.mixed_graphs import mixed_sizes
from bladellm_runtime.engine.runner import ModelRunner
from bladellm_runtime.engine.sampling_state import SamplingState
from bladellm_runtime.engine.step_graphs import graph_sizes
from bladellm_runtime.engine.warm_up import warm_up
from bladellm_runtime.errors import ConfigError
from bladellm_runtime.kv.accounting import KvAccounting
from bladellm_runtime.kv.arena import KvArena, KvShape
from bladellm_runtime.kv.factory import arena_kind, make_arena
from bladellm_runtime.kv.spec import KvSpec
from bladellm_runtime.models.config import ModelSpec, read_model_spec
from bladellm_runtime.models.decoder import Decoder
from bladellm_runtime.models.hub import resolve_model
from bladellm_runtime.models.loading import load_model
from bladellm_runtime.scheduler.limits import SchedulerLimits
from bladellm_runtime.scheduler.prefill_budget import StepBound
from bladellm_runtime.scheduler.scheduler import Scheduler
from bladellm_runtime.scheduler.step_cost import StepCost
from bladellm_runtime.wire.messages import EngineReady

SWITCH_SECONDS = 1e-4
"""How soon a thread that steps gives way to the one that maps memory. With Python's 5 ms a mapping call that takes
50 µs alone took 15 ms beside a busy thread, three turns of waiting."""

TARGET_TBT_MS = 14.0
"""On a GPU: half of vLLM's TBT p99 of the Llama-3.1-8B shape on an H200 at 8 requests a second
(docs/prefill_chunks.md)."""

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class PhaseTimes:
    """Seconds per phase of the start, in order, for the start-up banner."""

    phases: list[tuple[str, float]] = field(default_factory=list)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        started = time.monotonic()
        yield
        self.phases.append((name, time.monotonic() - started))


@dataclass(slots=True)
class Engine:
    """A built engine and what it announces of itself."""

    core: EngineCore
    ready: EngineReady
    folder: Path
    arena: KvArena


@KERNEL_COMPILES.expected()
def build_engine(args: EngineArgs, capture: Capture | None = None) -> Engine:
    """Load the model and make an engine of it. Raises `UserError` for anything the user can mend.

    capture: how decode steps are captured; by default as CUDA graphs, and not at all on a CPU.
    """
    times, table = PhaseTimes(), MemoryTable()
    with times.phase("find model"):
        folder = resolve_model(args.model)
        spec = read_model_spec(folder)
    with times.phase("open device"):
        device = pick_device(args.device)
        torch.empty(1, device=device)  # the first tensor makes a GPU's context, which takes a second
        if device.type == "cpu":
            use_threads(args.cpu_threads)
        elif args.ragged_flash_max_batch_tokens is None:
            args = replace(args, ragged_flash_max_batch_tokens=GPU_STEP_TOKENS)
        dtype = pick_dtype(args.dtype, spec.dtype, device)
        max_model_len = model_length(args.max_model_len, spec.max_position_embeddings)
        shape = KvShape(spec.kv_heads, spec.head_dim, dtype, pick_kv_format(args, spec, device))
        rotation = key_rotation(args, shape.format, spec.head_dim, dtype, device)
        compiling = compile_ahead(args, folder, device)
    with times.phase("load weights"):
        model = load_model(folder, spec, device=device, dtype=dtype, load_format=args.load_format, seed=args.dummy_seed)
    table.add("weights", model.weight_bytes)
    with times.phase("compile kernels"):
        compiling.wait()
    with times.phase("allocate memory"):
        sampling = SamplingState(args.max_running_requests, spec.vocab_size, spec.eos_token_ids, device)
        table.add("sampling state", sampling.bytes)
        kv_spec, arena = allocate_kv(args, spec, shape, device, max_model_len, table)
        max_model_len = fit_model_length(args.max_model_len, max_model_len, kv_spec)
    limits = scheduler_limits(args, spec, max_model_len)
    with times.phase("plan attention"):
        workspace = decode_workspace(spec, kv_spec.num_slots, shape, device)
        planned = plan_prefill(spec, dtype, arena, limits)
    runner = ModelRunner(model, arena, sampling, workspace, rotation, planned)
    with times.phase("capture graphs"):
        cascade = make_cascade(args, spec, arena, shape, graph_sizes(args))
        capture_steps(args, runner, device, capture, cascade)
    memory = KvAccounting(kv_spec, shares=arena.shares, sticky=arena.sticky, prompt_cache=not args.disable_prompt_cache)
    sharing = None
    if cascade is not None and runner.shared_rows:
        sharing = sharing_rule(cascade, kv_spec, runner.shared_rows)
    scheduler = Scheduler(limits, memory, sharing=sharing)
    core = EngineCore(scheduler, runner, overlap=not args.disable_overlap)
    with times.phase("warm up"):
        # Captured steps have their kernels; those that no graph will serve need some of their own.
        with runner.without_mixed_graphs():
            warm_up(core, limits, thorough=device.type == "cuda")
        warm_up(core, limits, thorough=False)
    with times.phase("time steps"):
        pace_steps(args, core, limits, kv_spec, device, runner.mixed_sizes)
    core.recovery = MemoryRecovery(scheduler)
    keep_kernel_list(args, folder, device)
    kv_cache = describe_kv(args, shape, kv_spec, device, rotated=rotation is not None)
    return Engine(core, announce(spec, kv_spec, model, max_model_len, table, times, kv_cache), folder, arena)


def model_length(asked: int | None, positions: int) -> int:
    """The longest sequence to serve. Raises `ConfigError` above what the model was made for."""
    if asked is not None and asked > positions:
        raise ConfigError(f"--max_model_len {asked} is above the model's max_position_embeddings of {positions}")
    return positions if asked is None else asked


def fit_model_length(asked: int | None, length: int, kv_spec: KvSpec) -> int:
    """The longest sequence that the KV cache holds; shorter than the model's own with a warning.

    Raises `ConfigError` when that is less than what was asked for.
    """
    if length <= kv_spec.max_tokens:
        return length
    need = kv_spec.granules(length) * kv_spec.granule_bytes / GIB
    advice = f"raise --kv_cache_gib to {need:.3g} or more, or lower --max_model_len to {kv_spec.max_tokens}"
    if asked is not None:
        raise ConfigError(f"the KV cache holds {kv_spec.max_tokens} tokens, below --max_model_len {asked}; {advice}")
    logger.warning("sequences are limited to %d of the model's %d tokens; %s", kv_spec.max_tokens, length, advice)
    return kv_spec.max_tokens


def allocate_kv(
    args: EngineArgs, spec: ModelSpec, shape: KvShape, device: torch.device, max_model_len: int, table: MemoryTable
) -> tuple[KvSpec, KvArena]:
    """Decide the size of the KV cache and create its arena."""
    budget = kv_budget(args, spec, shape.dtype, device, table)
    kv_spec = make_kv_spec(args, spec, shape, device, max_model_len, budget)
    arena = make_arena(args.kv_arena, args.attn_cls, kv_spec, shape, device)
    if device.type == "cuda":
        sys.setswitchinterval(SWITCH_SECONDS)
    table.add("KV cache", kv_spec.num_granules * kv_spec.granule_bytes)
    return kv_spec, arena


def decode_workspace(spec: ModelSpec, num_slots: int, shape: KvShape, device: torch.device) -> DecodeWorkspace | None:
    """Where decode attention on a GPU plans and keeps parts of its results; a CPU needs none."""
    if device.type != "cuda":
        return None
    return DecodeWorkspace(device, num_slots, spec.heads, spec.kv_heads, spec.head_dim, 1, shape.format, shape.dtype)


def capture_steps(
    args: EngineArgs, runner: ModelRunner, device: torch.device, capture: Capture | None, cascade: Cascade | None
) -> None:
    """Have the runner capture steps where the flags and the device allow it, those of most tokens first: the memory of
    all others fits into theirs."""
    if capture is None and device.type == "cuda" and has_triton():
        capture = CudaCapture(device)
    sizes, asked = graph_sizes(args), args.cuda_graph_max_batch_size is not None
    if asked and args.cuda_graph_batch_sizes:
        logger.warning("--cuda_graph_max_batch_size is ignored beside --cuda_graph_batch_sizes")
    if sizes and capture is not None:
        if mixed := mixed_sizes(args):
            runner.capture_mixed(mixed, capture)
        runner.capture(sizes, capture, cascade)
        if device.type == "cuda":
            # Memory of the work before it was captured, which no step will use.
            torch.cuda.empty_cache()
    elif asked or args.cuda_graph_batch_sizes or any(args.cuda_graph_prefill_tokens):
        logger.warning("no CUDA graphs: they %s", "are disabled" if not sizes else "need a CUDA device with triton")


def plan_prefill(spec: ModelSpec, dtype: torch.dtype, arena: KvArena, limits: SchedulerLimits) -> PlannedCalls | None:
    """Prepare prefill attention for every step that the limits allow; in the thread that will run the steps."""
    layers = [arena.layer(index) for index in range(len(spec.windows))]
    tokens = min(limits.max_batch_tokens, limits.prefill_chunk_tokens)
    return warm_up_prefill(spec.heads, dtype, layers, spec.windows, tokens, limits.max_model_len)


def scheduler_limits(args: EngineArgs, spec: ModelSpec, max_model_len: int) -> SchedulerLimits:
    """The scheduler's view of the flags."""
    return SchedulerLimits(
        max_batch_tokens=args.step_tokens,
        prefill_chunk_tokens=args.prefill_chunk_tokens or args.step_tokens,
        max_model_len=max_model_len,
        eos_token_ids=frozenset(spec.eos_token_ids),
        vocab_size=spec.vocab_size,
    )


def pace_steps(
    args: EngineArgs,
    core: EngineCore,
    limits: SchedulerLimits,
    kv_spec: KvSpec,
    device: torch.device,
    sizes: Sequence[int],
) -> None:
    """Decide, from what steps cost here, how much goes into one and when the next one is planned. sizes: token counts,
    ascending, that steps with prompts are padded to."""
    cost: StepCost | None = None
    if target := target_tbt(args, device):
        cost = measure_step_cost(core, limits, kv_spec, sizes)
        core.bound_steps(StepBound(target, cost))
        core.reset_prompt_cache()
        core.reset_counters()
    if device.type == "cuda" and not args.disable_overlap:
        core.timer = LaunchTimer(cost)


def target_tbt(args: EngineArgs, device: torch.device) -> float:
    """Milliseconds that a step may take while requests decode, 0 for no bound."""
    default = TARGET_TBT_MS if device.type == "cuda" else 0.0
    return default if args.target_tbt_ms is None else args.target_tbt_ms


def describe_kv(args: EngineArgs, shape: KvShape, kv_spec: KvSpec, device: torch.device, rotated: bool) -> str:
    """The KV cache in a few words, for the start-up banner."""
    kind = arena_kind(args.kv_arena, device, args.attn_cls)
    turned = ", rotated keys" if rotated else ""
    cached = "no prompt cache" if args.disable_prompt_cache or kind == "relocating" else "prompt cache"
    swap = " with swap" if kv_spec.host_granules else ""
    return f"{shape.format.name}{turned}; {kind}, {kv_spec.granule_tokens} tokens a granule; {cached}{swap}"


def announce(
    spec: ModelSpec,
    kv_spec: KvSpec,
    model: Decoder,
    max_model_len: int,
    table: MemoryTable,
    times: PhaseTimes,
    kv_cache: str,
) -> EngineReady:
    """What the front end needs to know of the engine."""
    return EngineReady(
        vocab_size=spec.vocab_size,
        max_model_len=max_model_len,
        kv_tokens=kv_spec.num_granules * kv_spec.granule_tokens,
        eos_token_ids=list(spec.eos_token_ids),
        device=str(model.device),
        dtype=str(model.dtype).removeprefix("torch."),
        memory=table.rows,
        phases=times.phases,
        kv_cache=kv_cache,
    )
