"""From arguments to a model runner, on every rank alike: model, KV memory, captured steps."""

import logging
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from bladellm_kernels.decode_schedule import short_tokens
from bladellm_kernels.decode_work import DecodeWorkspace
from bladellm_kernels.has_triton import has_triton
from bladellm_kernels.prefill_calls import PlannedCalls
from bladellm_kernels.prefill_warm_up import warm_up as warm_up_prefill

from bladellm_runtime.config import GIB, GPU_STEP_TOKENS, EngineArgs
from bladellm_runtime.engine.adapter_slots import adapter_loader, lora_shape
from bladellm_runtime.engine.cascade import Cascade, make_cascade
from bladellm_runtime.engine.compile_kernels import Compiling, compile_ahead, count_compiles
from bladellm_runtime.engine.cuda_capture import Capture, CudaCapture
from bladellm_runtime.engine.device import pick_device, pick_dtype, use_threads
from bladellm_runtime.engine.kernel_record import hashing_triton
from bladellm_runtime.engine.kv_format import key_rotation, pick_kv_format
from bladellm_runtime.engine.memory import MemoryTable, kv_budget, make_kv_spec
from bladellm_runtime.engine.mixed_graphs import mixed_sizes
from bladellm_runtime.engine.packed_weights import check_packed, packed_room
from bladellm_runtime.engine.rank_place import Others, RankPlace
from bladellm_runtime.engine.runner import ModelRunner
from bladellm_runtime.engine.sampling_state import SamplingState
from bladellm_runtime.engine.step_graphs import graph_sizes
from bladellm_runtime.engine.uploaded_masks import warm_up_masks
from bladellm_runtime.errors import ConfigError
from bladellm_runtime.kv.arena import KvArena, KvShape
from bladellm_runtime.kv.factory import make_arena
from bladellm_runtime.kv.spec import KvSpec
from bladellm_runtime.lora.loader import AdapterLoader
from bladellm_runtime.models.config import ModelSpec
from bladellm_runtime.models.decoder import Decoder
from bladellm_runtime.models.loading import load_model
from bladellm_runtime.models.stages import Stages
from bladellm_runtime.scheduler.limits import SchedulerLimits

SWITCH_SECONDS = 1e-4
"""How soon a thread that steps gives way to the one that maps memory. With Python's 5 ms a mapping call that takes
50 µs alone took 15 ms beside a busy thread, three turns of waiting."""

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
class StartRecord:
    """What the start took: time by phase, memory by use."""

    times: PhaseTimes = field(default_factory=PhaseTimes)
    table: MemoryTable = field(default_factory=MemoryTable)


@dataclass(slots=True)
class BuiltRunner:
    """A runner, and what is known of it. args: with the defaults of the device; rotated: whether keys are; loader: of
    adapters, None where there are no slots for any."""

    args: EngineArgs
    device: torch.device
    shape: KvShape
    rotated: bool
    model: Decoder
    kv_spec: KvSpec
    arena: KvArena
    limits: SchedulerLimits
    cascade: Cascade | None
    runner: ModelRunner
    loader: AdapterLoader | None


def build_runner(
    args: EngineArgs, folder: Path, whole: ModelSpec, place: RankPlace, record: StartRecord, capture: Capture | None
) -> BuiltRunner:
    """Load the model and make a runner of it. All ranks do the same in the same order, and some of it together.

    Raises `UserError` for anything the user can mend. whole: the model's spec, of which a rank may hold a part.
    capture: as in `build_engine`.
    """
    times, table = record.times, record.table
    with times.phase("open device"):
        device, args = open_device(args, place)
        dtype = pick_dtype(args.dtype, whole.dtype, device)
        max_model_len = model_length(args.max_model_len, whole.max_position_embeddings)
        others = place.join(args, device)
        parallel = place.share(args, folder, whole, others)
        spec = whole if parallel is None else parallel.spec(whole)
        shape = KvShape(spec.kv_heads, spec.head_dim, dtype, pick_kv_format(args, spec, device))
        rotation = key_rotation(args, shape.format, spec.head_dim, dtype, device)
        compiling = start_compiling(args, folder, device, place)
    with times.phase("load weights"):
        model = load_model(
            folder, whole, device=device, dtype=dtype, load_format=args.load_format, seed=args.dummy_seed,
            parallel=parallel, lora=lora_shape(args, dtype),
            packed_room=packed_room(args, spec, shape, device, max_model_len),
            precompute_first_layer=args.precompute_first_layer,
        )  # fmt: skip
        check_packed(args, model.packed_bytes)
    add_weights(table, model)
    with times.phase("compile kernels"):
        end_compiling(compiling, model, others)
    with times.phase("allocate memory"):
        if others is not None and parallel is not None:
            place.write_to_ranks(args, others, parallel, model, table)
        sampling = None
        if model.ends.last:
            sampling = SamplingState(args.slots, spec.vocab_size, spec.eos_token_ids, device)
            table.add("sampling state", sampling.bytes)
        stages = Stages.of(spec, None if parallel is None else parallel.plan)
        kv_spec, arena = allocate_kv(args, stages, shape, device, max_model_len, table, others)
        max_model_len = fit_model_length(args.max_model_len, max_model_len, kv_spec, stages)
    limits = scheduler_limits(args, spec, max_model_len)
    with times.phase("plan attention"):
        short = short_tokens(whole.kv_heads, args.tensor_parallel_size)
        workspace = decode_workspace(spec, kv_spec.num_slots, shape, device, args.attn_cls == "paged", short)
        planned = plan_prefill(spec, dtype, arena, limits)
    stage = place.stage(args, others, model.ends, device)
    runner = ModelRunner(model, arena, sampling, workspace, rotation, planned, stage)
    with times.phase("capture graphs"):
        cascade = make_cascade(args, spec, arena, shape, graph_sizes(args)) if stages.all_share(whole) else None
        capture_steps(args, runner, model, capture, cascade)
        check_equal_graphs(runner, others)
        if device.type == "cuda" and model.ends.last:
            # Of eager steps, and of captured ones.
            warm_up_masks(spec.vocab_size, (torch.float32, dtype), device)
    return BuiltRunner(
        args, device, shape, rotation is not None, model, kv_spec, arena, limits, cascade, runner,
        adapter_loader(whole, runner, model),
    )  # fmt: skip


def open_device(args: EngineArgs, place: RankPlace) -> tuple[torch.device, EngineArgs]:
    """This rank's device, ready for use, and the flags with its defaults."""
    count = len(args.local_ranks)
    device = pick_device(args.device, place.local_index(args) if count > 1 else None, count)
    with hashing_triton(device):
        torch.empty(1, device=device)  # the first tensor makes a GPU's context, which takes a second
    if device.type == "cpu":
        use_threads(args.cpu_threads, count)
    elif args.ragged_flash_max_batch_tokens is None:
        args = replace(args, ragged_flash_max_batch_tokens=GPU_STEP_TOKENS)
    return device, args


def add_weights(table: MemoryTable, model: Decoder) -> None:
    """The terms of what a model holds."""
    adapters = 0 if model.lora is None else model.lora.bytes
    table.add("weights", model.weight_bytes - adapters - model.packed_bytes)
    others = {"packed weights": model.packed_bytes, "first layer": model.known_bytes, "LoRA adapters": adapters}
    for name, size in others.items():
        if size:
            table.add(name, size)


def end_compiling(compiling: Compiling, model: Decoder, others: Others | None) -> None:
    """Have all kernels that are known to be needed, on every rank."""
    compiling.wait()
    model.prepare()
    if others is not None:
        others.every.barrier()


def start_compiling(args: EngineArgs, folder: Path, device: torch.device, place: RankPlace) -> Compiling:
    """Start to compile the model's kernels; one rank of a host does it for all."""
    if place.local_index(args):
        count_compiles(device)
        return Compiling()
    return compile_ahead(args, folder, device)


def model_length(asked: int | None, positions: int) -> int:
    """The longest sequence to serve. Raises `ConfigError` above what the model was made for."""
    if asked is not None and asked > positions:
        raise ConfigError(f"--max_model_len {asked} is above the model's max_position_embeddings of {positions}")
    return positions if asked is None else asked


def fit_model_length(asked: int | None, length: int, kv_spec: KvSpec, stages: Stages) -> int:
    """The longest sequence that the KV cache holds; shorter than the model's own with a warning.

    Raises `ConfigError` when that is less than what was asked for.
    """
    if length <= kv_spec.max_tokens:
        return length
    need = kv_spec.granules(length) * kv_spec.granule_bytes / GIB * stages.most_layers / stages.spec.layers
    advice = f"raise --kv_cache_gib to {need:.3g} or more, or lower --max_model_len to {kv_spec.max_tokens}"
    if asked is not None:
        raise ConfigError(f"the KV cache holds {kv_spec.max_tokens} tokens, below --max_model_len {asked}; {advice}")
    logger.warning("sequences are limited to %d of the model's %d tokens; %s", kv_spec.max_tokens, length, advice)
    return kv_spec.max_tokens


def allocate_kv(
    args: EngineArgs,
    stages: Stages,
    shape: KvShape,
    device: torch.device,
    max_model_len: int,
    table: MemoryTable,
    others: Others | None = None,
) -> tuple[KvSpec, KvArena]:
    """Decide the size of the KV cache and create its arena. All ranks have room for as many tokens as the one that can
    have least."""
    budget = kv_budget(args, stages.spec, shape.dtype, device, table)
    if others is not None:
        budget = others.every.min_int(budget // stages.spec.layers) * stages.spec.layers
    kv_spec = make_kv_spec(args, stages, shape, device, max_model_len, budget)
    if others is not None and (least := others.every.min_int(kv_spec.num_granules)) != kv_spec.num_granules:
        raise ConfigError(
            f"a rank can map {least} pieces of KV cache and this one {kv_spec.num_granules}; give all hosts the same "
            "vm.max_map_count and the same GPUs"
        )
    arena = make_arena(args.kv_arena, args.attn_cls, kv_spec, shape, device)
    if device.type == "cuda":
        sys.setswitchinterval(SWITCH_SECONDS)
    table.add("KV cache", kv_spec.num_granules * kv_spec.granule_bytes)
    return kv_spec, arena


def decode_workspace(
    spec: ModelSpec, num_slots: int, shape: KvShape, device: torch.device, paged: bool, most_short: int
) -> DecodeWorkspace | None:
    """Where decode attention on a GPU plans and keeps parts of its results; a CPU needs none. most_short: KV tokens of
    a step, the same on all ranks."""
    if device.type != "cuda":
        return None
    heads = (spec.heads, spec.kv_heads, spec.head_dim)
    return DecodeWorkspace(device, num_slots, *heads, 1, shape.format, shape.dtype, paged=paged, most_short=most_short)


def capture_steps(
    args: EngineArgs, runner: ModelRunner, model: Decoder, capture: Capture | None, cascade: Cascade | None
) -> None:
    """Have the runner capture steps where the flags and the device allow it, those of most tokens first: the memory of
    all others fits into theirs."""
    device = model.device
    if capture is None and device.type == "cuda" and has_triton():
        capture = CudaCapture(device, model.rehearsal)
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


def check_equal_graphs(runner: ModelRunner, others: Others | None) -> None:
    """Raise `ConfigError` where some ranks could capture their steps and others could not: they would be led apart."""
    if others is None:
        return
    for captured in runner.captured:
        if others.every.min_int(captured) != captured:
            raise ConfigError("a rank could not capture its steps as CUDA graphs; use --disable_cuda_graph")


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
