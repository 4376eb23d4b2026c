"""From arguments to a running engine: model, memory, scheduler, runner; with the time and the bytes of each part."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from bladellm_runtime.config import EngineArgs, check_lora, check_parallel
from bladellm_runtime.engine.adapters import AdapterPreparer, Adapters, NoAdapters
from bladellm_runtime.engine.arrival_hold import ArrivalHold
from bladellm_runtime.engine.build_runner import BuiltRunner, StartRecord, build_runner
from bladellm_runtime.engine.cascade import sharing_rule
from bladellm_runtime.engine.compile_kernels import keep_kernel_list
from bladellm_runtime.engine.constraints import Constraints
from bladellm_runtime.engine.core import EngineCore
from bladellm_runtime.engine.cuda_capture import Capture
from bladellm_runtime.engine.kernel_compiles import KERNEL_COMPILES
from bladellm_runtime.engine.launch_timer import LaunchTimer
from bladellm_runtime.engine.measure_steps import measure_step_cost
from bladellm_runtime.engine.preparation import WaitingRoom
from bladellm_runtime.engine.rank_place import RankPlace
from bladellm_runtime.engine.ranked_loader import RankedLoader
from bladellm_runtime.engine.ranked_runner import RankedRunner, lost_group
from bladellm_runtime.engine.runner import ModelRunner
from bladellm_runtime.engine.step_graphs import eager_sizes
from bladellm_runtime.engine.warm_up import warm_up
from bladellm_runtime.errors import ConfigError
from bladellm_runtime.guided.backends import BACKENDS, load_vocabulary
from bladellm_runtime.guided.compiler import Compiler
from bladellm_runtime.kv.accounting import KvAccounting
from bladellm_runtime.kv.arena import KvArena
from bladellm_runtime.kv.factory import arena_kind
from bladellm_runtime.kv.spec import KvSpec
from bladellm_runtime.lora.policy import AdapterPolicy
from bladellm_runtime.lora.store import AdapterStore
from bladellm_runtime.models.config import ModelSpec, read_model_spec
from bladellm_runtime.models.hub import resolve_model
from bladellm_runtime.models.parallel import make_plan, plan_digest
from bladellm_runtime.ranks.group import Home, Ranks
from bladellm_runtime.scheduler.late_prompts import FirstTokenTarget
from bladellm_runtime.scheduler.limits import SchedulerLimits
from bladellm_runtime.scheduler.micro_batches import MicroBatches
from bladellm_runtime.scheduler.prefill_budget import StepBound
from bladellm_runtime.scheduler.scheduler import Scheduler
from bladellm_runtime.scheduler.step_cost import StepCost
from bladellm_runtime.wire.messages import EngineReady

MIB = 2**20
TARGET_TBT_MS = 14.0
"""On a GPU: half of vLLM's TBT p99 of the Llama-3.1-8B shape on an H200 at 8 requests a second
(docs/prefill_chunks.md)."""


@dataclass(slots=True)
class Engine:
    """A built engine and what it announces of itself."""

    core: EngineCore
    ready: EngineReady
    arena: KvArena


@KERNEL_COMPILES.expected()
def build_engine(args: EngineArgs, capture: Capture | None = None, home: Home | None = None) -> Engine:
    """Load the model and make an engine of it, and of other ranks where there are any. Raises `UserError` for anything
    the user can mend.

    capture: how decode steps are captured; by default as CUDA graphs, and not at all on a CPU. home: what this process
    has for the other ranks.
    """
    check_parallel(args)
    check_lora(args)
    if args.node_rank:
        raise ConfigError(f"--node_rank {args.node_rank} has ranks only, and no engine; start it with blade_llm serve")
    record = StartRecord()
    with record.times.phase("find model"):
        folder = resolve_model(args.model)
        spec = read_model_spec(folder)
    constraints = Constraints(partial(make_compiler, args, folder, spec))
    constraints.begin()  # beside the loading of the weights
    try:
        if args.world_size == 1:
            built = build_runner(args, folder, spec, RankPlace(), record, capture)
            return make_engine(built, folder, spec, record, constraints)
        args = replace(args, model=str(folder))
        return build_group(args, folder, spec, record, constraints, capture, home or Home())
    except BaseException:
        constraints.close()
        raise


def build_group(
    args: EngineArgs,
    folder: Path,
    spec: ModelSpec,
    record: StartRecord,
    constraints: Constraints,
    capture: Capture | None,
    home: Home,
) -> Engine:
    """Start the other ranks, and be rank 0. Raises `UserError`, before any is started where that can be."""
    plan = make_plan(folder, args.tensor_parallel_size, args.pipeline_parallel_size)
    ranks = Ranks(args, home, plan_digest(folder, plan))
    try:
        with ranks.guarded():
            with record.times.phase("start ranks"):
                ranks.wait_for_all()
            place = RankPlace(0, ranks.meeting.group)
            built = build_runner(args, folder, spec, place, record, capture)
        return make_engine(built, folder, spec, record, constraints, RankedRunner(built.runner, ranks, place))
    except BaseException as error:
        lost = lost_group(error, ranks)
        ranks.close()
        if lost is not None:
            raise lost from error
        raise


def make_engine(
    built: BuiltRunner,
    folder: Path,
    spec: ModelSpec,
    record: StartRecord,
    constraints: Constraints,
    ranked: RankedRunner | None = None,
) -> Engine:
    """Join a runner with a scheduler, warm both up and learn what steps cost. ranked: the runner with other ranks."""
    args, runner = built.args, ranked or built.runner
    with record.times.phase("read vocabulary"):
        constraints.wait()
    core = make_core(built, runner, constraints, make_adapters(args, built, ranked))
    with record.times.phase("warm up"):
        warm_up_steps(core, runner, built)
    with record.times.phase("time steps"):
        pace_steps(args, core, built.limits, built.kv_spec, built.device, runner.mixed_sizes)
    if args.enable_json_warmup:
        with record.times.phase("warm up JSON"):
            constraints.warm_up()
    if ranked is None:
        core.survive_full_memory()
    else:
        ranked.serve()
    keep_kernel_list(args, folder, built.device)
    return Engine(core, announce(spec, built, record), built.arena)


def make_core(
    built: BuiltRunner, runner: ModelRunner | RankedRunner, constraints: Constraints, adapters: Adapters
) -> EngineCore:
    """Join a runner with a scheduler. runner: that of `built`, or the one that leads other ranks, too."""
    args, arena, count = built.args, built.arena, built.args.micro_batches
    memory = KvAccounting(
        built.kv_spec,
        shares=arena.shares,
        sticky=arena.sticky,
        prompt_cache=not args.disable_prompt_cache,
        progress=arena if arena.background else None,
    )
    sharing = None
    if built.cascade is not None and runner.shared_rows:
        sharing = sharing_rule(built.cascade, built.kv_spec, runner.shared_rows)
    overlap = not args.disable_overlap
    scheduler = Scheduler(built.limits, memory, sharing=sharing, micro_batches=MicroBatches(count, each=1 + overlap))
    return EngineCore(
        scheduler, runner, overlap=overlap, micro_batches=count,
        room=WaitingRoom([constraints, adapters]), constraints=constraints, adapters=adapters,
    )  # fmt: skip


def warm_up_steps(core: EngineCore, runner: ModelRunner | RankedRunner, built: BuiltRunner) -> None:
    """Run requests of every kind, so that no step that is served compiles or allocates for the first time."""
    args, limits = built.args, built.limits
    # Captured steps have their kernels; those that no graph will serve need some of their own.
    runner.use_mixed_graphs(False)
    thorough, rows = built.device.type == "cuda", eager_sizes(args)
    # Captured steps, which run all layers, may read what no rehearsal has written: requests end early then.
    with built.model.rehearsal():
        warm_up(
            core, limits, thorough=thorough, micro_batches=args.micro_batches, decode_rows=rows,
            slots=built.kv_spec.num_slots, adapted=args.enable_lora,
        )  # fmt: skip
    runner.use_mixed_graphs(True)
    warm_up(core, limits, thorough=False, adapted=args.enable_lora)


def make_adapters(args: EngineArgs, built: BuiltRunner, ranked: RankedRunner | None) -> Adapters:
    """What an engine does about adapters. ranked: as in `make_engine`."""
    if built.loader is None:
        return NoAdapters()
    loader = built.loader if ranked is None else RankedLoader(built.loader, ranked, args.world_size)
    return AdapterPreparer(AdapterStore(AdapterPolicy(args.max_loras, args.max_cpu_loras), loader), args.max_loras)


def make_compiler(args: EngineArgs, folder: Path, spec: ModelSpec) -> Compiler:
    """The compiler of constraints for a model; takes seconds. Raises `UserError` without a usable tokenizer."""
    tokenizer = folder if args.tokenizer_dir is None else Path(args.tokenizer_dir)
    vocabulary = load_vocabulary(tokenizer, spec.vocab_size, spec.eos_token_ids)
    backend = BACKENDS[args.guided_backend](vocabulary)
    return Compiler(backend, max_bytes=int(args.guided_cache_mib * MIB), deadline=args.guided_deadline)


def pace_steps(
    args: EngineArgs,
    core: EngineCore,
    limits: SchedulerLimits,
    kv_spec: KvSpec,
    device: torch.device,
    sizes: Sequence[int],
) -> None:
    """Decide, from what steps cost here, how much goes into one, who goes first and when the next one is planned.
    sizes: token counts, ascending, that steps with prompts are padded to."""
    cost: StepCost | None = None
    tbt, ttft = target_tbt(args, device), args.target_ttft_ms
    if tbt or ttft:
        cost = measure_step_cost(core, limits, kv_spec, sizes, args.max_loras if args.enable_lora else 0)
        # Between two tokens of a request every micro-batch has a step.
        bound = StepBound(tbt / args.micro_batches, cost) if tbt else None
        core.bound_steps(bound, FirstTokenTarget(ttft / 1e3, cost) if ttft else None)
        core.reset_prompt_cache()
        core.reset_counters()
    if device.type == "cuda" and not args.disable_overlap and args.micro_batches == 1:
        core.pace(LaunchTimer(cost), ArrivalHold())


def target_tbt(args: EngineArgs, device: torch.device) -> float:
    """Milliseconds that a step may take while requests decode, 0 for no bound."""
    default = TARGET_TBT_MS if device.type == "cuda" else 0.0
    return default if args.target_tbt_ms is None else args.target_tbt_ms


def describe_kv(built: BuiltRunner) -> str:
    """The KV cache in a few words, for the start-up banner."""
    args, kv_spec = built.args, built.kv_spec
    kind = arena_kind(args.kv_arena, built.device, args.attn_cls)
    turned = ", rotated keys" if built.rotated else ""
    cached = "no prompt cache" if args.disable_prompt_cache or kind == "relocating" else "prompt cache"
    swap = " with swap" if kv_spec.host_granules else ""
    return f"{built.shape.format.name}{turned}; {kind}, {kv_spec.granule_tokens} tokens a granule; {cached}{swap}"


def announce(spec: ModelSpec, built: BuiltRunner, record: StartRecord) -> EngineReady:
    """What the front end needs to know of the engine."""
    kv_spec, model = built.kv_spec, built.model
    return EngineReady(
        vocab_size=spec.vocab_size,
        max_model_len=built.limits.max_model_len,
        kv_tokens=kv_spec.num_granules * kv_spec.granule_tokens,
        eos_token_ids=list(spec.eos_token_ids),
        device=str(model.device),
        dtype=str(model.dtype).removeprefix("torch."),
        memory=record.table.rows,
        phases=record.times.phases,
        kv_cache=describe_kv(built),
    )
