"""`ServingArgs`: every flag of the engine and its server, with help, range and choices; the one place they are checked.

The command line is generated from these fields (`--` + field name), `LLM(...)` takes the same names, and a recipe's
YAML keys are the same names again.
"""

from dataclasses import dataclass, fields
from typing import Literal

from bladellm_runtime.errors import ConfigError
from bladellm_runtime.flags import check_fields, flag

Device = Literal["auto", "cpu", "cuda"]
Dtype = Literal["auto", "half", "float16", "bfloat16", "float", "float32"]
LoraDtype = Literal["auto", "float16", "bfloat16", "float32"]
AttnCls = Literal["ragged_flash", "paged"]
KvCacheQuant = Literal["no_quant", "int8", "int4", "int8_affine", "int4_affine", "fp8_e4m3", "fp8_e5m2", "fp12_e4m7"]
KvArenaKind = Literal["auto", "memfd", "cuda", "relocating"]
CPU_STEP_TOKENS, GPU_STEP_TOKENS = 2048, 8192
GIB = 1024**3
DEFAULT_SLOTS = 256
MIXED_FORMATS = {
    "mix_f852i4": "int8 or int4_affine",
    "mix_f843i4": "int8 or int4_affine",
    "mix_i8i4": "int8 or int4_affine",
    "mix_i4i4": "int4_affine",
}
"""BladeLLM's experimental KV formats that mix two."""


@dataclass(frozen=True)
class EngineArgs:
    """How to load a model and run it; what `LLM(...)` and `blade_llm generate` take."""

    model: str = flag("", "Model folder, Hugging Face hub id, or modelscope:org/name.", group="Model")
    tokenizer_dir: str | None = flag(None, "Folder of the tokenizer; default: the model's.", group="Model")
    dtype: Dtype = flag(
        "auto", "Type of weights and activations; auto: the checkpoint's on CUDA, float32 on a CPU.", group="Model"
    )
    device: Device = flag("auto", "Where to run; auto: cuda if there is a GPU.", group="Model")
    load_format: Literal["auto", "dummy"] = flag(
        "auto", "auto: safetensors; dummy: random weights of the real shapes, for benchmarks.", group="Model"
    )
    max_model_len: int | None = flag(
        None, "Longest prompt plus answer in tokens; default: the model's.", group="Model", low=8, high=2**24
    )
    dummy_seed: int = flag(0, "Seed of the weights of --load_format dummy.", group="Model", low=0, high=2**63 - 1)
    max_running_requests: int | None = flag(
        None,
        "Requests that run at once (slots); more wait in the queue. Default: 256; with a file of prompts on a GPU 512.",
        group="Engine", low=1, high=4096,
    )  # fmt: skip
    ragged_flash_max_batch_tokens: int | None = flag(
        None,
        "Most tokens in one step, decode rows and prefill chunks together; default: 8192 on a GPU, 2048 on a CPU.",
        group="Engine", low=1, high=2**20,
    )  # fmt: skip
    prefill_chunk_tokens: int | None = flag(
        None, "Most prompt tokens of one request in one step; default: the whole step.",
        group="Engine", low=1, high=2**20,
    )  # fmt: skip
    target_tbt_ms: float | None = flag(
        None,
        "Milliseconds that a step may take while requests decode: prompts are prefilled in chunks that fit, larger "
        "ones when prompts queue up or take much of the time, or by a tenth where a prompt then takes two steps for "
        "three, or one for two. 0: no bound. Default: 14 in a server on a GPU, else 0.",
        group="Engine", low=0, high=60_000,
    )  # fmt: skip
    target_ttft_ms: float = flag(
        0,
        "Milliseconds from a request's arrival to its first token: prompts that cannot meet it any more stand aside "
        "for those that can, and take turns with them after five times as long. 0: first come, first served.",
        group="Engine", low=0, high=3_600_000,
    )  # fmt: skip
    max_gpu_memory_utilization: float = flag(
        0.9, "Share of the device's memory to use; what weights leave of it is KV cache.",
        group="Engine", low=0.05, high=1.0,
    )  # fmt: skip
    kv_cache_gib: float | None = flag(
        None, "KV cache of a rank in GiB instead of a share of the memory (on a CPU the default is 4 a host).",
        group="KV cache", low=0.0001, high=100_000,
    )  # fmt: skip
    attn_cls: AttnCls = flag(
        "ragged_flash",
        "Where KV lies: ragged_flash keeps each sequence contiguous, paged behind a table (for comparison).",
        group="KV cache",
    )
    kv_arena: KvArenaKind = flag(
        "auto",
        "RaggedAttention memory: cuda and memfd (CPU) map granules, relocating moves them (any device).",
        group="KV cache",
    )
    kv_cache_quant: KvCacheQuant = flag(
        "no_quant", "How keys and values are stored, rounded per token and head.",
        group="KV cache", instead=MIXED_FORMATS,
    )  # fmt: skip
    kv_cache_hadamard: Literal["auto", "on", "off"] = flag(
        "auto", "Rotate queries and keys, so that outlier channels of keys cost less; auto: in 4-bit formats.",
        group="KV cache",
    )  # fmt: skip
    disable_prompt_cache: bool = flag(
        False, "Compute every prompt in full instead of sharing the KV of equal beginnings.", group="KV cache"
    )
    prompt_cache_enable_swap: bool = flag(
        False, "Keep evicted prompts in host memory, to copy back when they come again.", group="KV cache"
    )
    prompt_cache_swap_gib: float = flag(
        4.0, "Host memory of --prompt_cache_enable_swap in GiB.", group="KV cache", low=0.001, high=100_000
    )
    tensor_parallel_size: int = flag(
        1, "Processes, each with a GPU of its own, that every layer is divided between.",
        group="Parallel", low=1, high=1024,
    )  # fmt: skip
    pipeline_parallel_size: int = flag(
        1, "Stages of consecutive layers, each on GPUs of its own.", group="Parallel", low=1, high=1024
    )
    pipeline_micro_batch: int | None = flag(
        None, "Groups of running requests that pass the stages one behind the other; default: as many as stages.",
        group="Parallel", low=1, high=64,
    )  # fmt: skip
    overlap_sums_tokens: int | None = flag(
        None,
        "Tokens of a step without CUDA graph from which on sums over tensor-parallel ranks are taken in two parts, "
        "each while the other is computed. 0: never. Default: 4096 between two GPUs of one host, else never.",
        group="Parallel", low=0, high=2**20,
    )  # fmt: skip
    nnodes: int = flag(1, "Hosts that share the ranks evenly.", group="Parallel", low=1, high=1024)
    node_rank: int = flag(
        0, "Number of this host; 0 runs the server, the others the ranks of their own.",
        group="Parallel", low=0, high=1023,
    )  # fmt: skip
    dist_init_addr: str | None = flag(
        None, "host:port of node 0, where it and the next two ports are free; for --nnodes 2 or more.",
        group="Parallel",
    )  # fmt: skip
    dist_token_file: str | None = flag(
        None, "File with a secret of 16 or more characters, the same on all hosts; for --nnodes 2 or more.",
        group="Parallel",
    )  # fmt: skip
    cpu_threads: int | None = flag(
        None, "Threads of an engine on a CPU; default: all cores but one, shared by the ranks of a host.",
        group="Engine", low=1, high=1024,
    )  # fmt: skip
    preempt_strategy: Literal["AUTO", "RECOMPUTE"] = flag(
        "AUTO", "What happens to the newest request when the KV cache is full; AUTO is RECOMPUTE.", group="Engine"
    )
    enable_lora: bool = flag(False, "Serve LoRA adapters beside the base model, any of them in one step.", group="LoRA")
    max_lora_rank: int = flag(16, "Largest rank of an adapter.", group="LoRA", low=1, high=512)
    max_loras: int = flag(
        4, "Adapters on the device at once; requests for more of them wait, first come, first served.",
        group="LoRA", low=1, high=1024,
    )  # fmt: skip
    max_cpu_loras: int = flag(
        16, "Adapters that the host keeps, to load them without their folders; --max_loras or more.",
        group="LoRA", low=1, high=65536,
    )  # fmt: skip
    lora_dtype: LoraDtype = flag("auto", "Type that adapters are held in; auto: the model's.", group="LoRA")
    disable_overlap: bool = flag(
        False, "Run one step (of each micro-batch) at a time instead of planning the next one while a step runs.",
        group="Engine",
    )  # fmt: skip
    cuda_graph_batch_sizes: list[int] = flag(
        [],
        "Batch sizes whose decode step is captured as CUDA graphs, ascending; steps are padded up to the next one and "
        "run without a graph above the last. Default: 1 2 4 8 16 24 ... 256 288 ... up to --cuda_graph_max_batch_size.",
        group="Engine", low=1, high=4096,
    )  # fmt: skip
    cuda_graph_max_batch_size: int | None = flag(
        None, "Largest batch size that is captured, 256 by default; ignored beside --cuda_graph_batch_sizes.",
        group="Engine", low=1, high=4096,
    )  # fmt: skip
    cuda_graph_prefill_tokens: list[int] = flag(
        [],
        "Token counts, decode rows and prefill chunks together, for which steps with prefill chunks are captured as "
        "CUDA graphs, ascending; steps are padded up to the next one. 0: none. Default: 32 64 96 ... 640 704 ... 1024 "
        "1152 ... 2048, up to --ragged_flash_max_batch_tokens.",
        group="Engine", low=0, high=65536,
    )  # fmt: skip
    disable_cuda_graph: bool = flag(
        False, "Launch all steps operator by operator instead of as CUDA graphs.", group="Engine"
    )
    packed_weights: Literal["auto", "on", "off"] = flag(
        "auto",
        "Keep bfloat16 weights of linear layers a second time in 12 bits a number, without loss: decode steps of up to "
        "64 requests read these. Takes three quarters of the weights' memory. auto: on one Hopper GPU, without "
        "--enable_lora, where that is at most a tenth of the memory the engine may use and leaves the KV cache what "
        "--kv_cache_gib or one sequence of --max_model_len takes.",
        group="Engine",
    )  # fmt: skip
    precompute_first_layer: bool = flag(
        False,
        "Keep the first layer's queries, keys and values, before rotary embedding, of every token of the vocabulary: "
        "steps look them up. Takes vocabulary x (query heads + 2 KV heads) x head size numbers. Without --enable_lora.",
        group="Engine",
    )  # fmt: skip
    guided_backend: Literal["llguidance", "fsm"] = flag(
        "llguidance", "What follows constraints; fsm: our own automata, for guided_regex and guided_choice alone.",
        group="Guided decoding",
    )  # fmt: skip
    guided_cache_mib: float = flag(
        256.0, "Memory for compiled constraints in MiB.", group="Guided decoding", low=0.001, high=2**20
    )
    guided_deadline: float = flag(
        5.0, "Seconds that a constraint may take to compile; more is refused.",
        group="Guided decoding", low=0.001, high=3600,
    )  # fmt: skip
    enable_json_warmup: bool = flag(
        False, "Get ready for JSON constraints at the start, not at the first one.", group="Guided decoding"
    )
    disable_frontend_multiprocessing: bool = flag(
        False, "Run the engine in a thread of the front end's process (tests, debugging).", group="Engine"
    )
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = flag(
        "INFO", "Least level that is logged.", group="Engine"
    )

    def __post_init__(self) -> None:
        check_fields(self)
        _check_encodable(self)
        for name in ("cuda_graph_batch_sizes", "cuda_graph_prefill_tokens"):
            sizes = getattr(self, name)
            if sizes != sorted(set(sizes)):
                raise ConfigError(f"--{name} must be ascending, each size once; got {' '.join(map(str, sizes))}")
        if self.enable_json_warmup and self.guided_backend == "fsm":
            raise ConfigError("--enable_json_warmup needs --guided_backend llguidance; fsm has no JSON constraints")

    @property
    def world_size(self) -> int:
        """Ranks in all."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def local_ranks(self) -> range:
        """The ranks of this host."""
        count = self.world_size // self.nnodes
        return range(self.node_rank * count, (self.node_rank + 1) * count)

    @property
    def result_rank(self) -> int:
        """The rank that reports what steps produced: the first one of the last stage."""
        return self.world_size - self.tensor_parallel_size

    @property
    def slots(self) -> int:
        """Requests that run at once."""
        return DEFAULT_SLOTS if self.max_running_requests is None else self.max_running_requests

    @property
    def micro_batches(self) -> int:
        """`pipeline_micro_batch`, or its default."""
        return self.pipeline_micro_batch or self.pipeline_parallel_size

    @property
    def steps_in_flight(self) -> int:
        """Steps planned whose results are not known, at most: one of each micro-batch, and one behind it."""
        return self.micro_batches + (not self.disable_overlap)

    @property
    def step_tokens(self) -> int:
        """`ragged_flash_max_batch_tokens`, or its default on a CPU."""
        return self.ragged_flash_max_batch_tokens or CPU_STEP_TOKENS


def _check_encodable(args: EngineArgs) -> None:
    """Flags go to other processes as UTF-8. Raises `ConfigError` for bytes of the command line that are not."""
    for item in fields(args):
        value = getattr(args, item.name)
        for one in value if isinstance(value, list) else [value]:
            try:
                str(one).encode()
            except UnicodeEncodeError:
                raise ConfigError(f"--{item.name} is not UTF-8 text; rename what it names, in UTF-8") from None


@dataclass(frozen=True)
class ServingArgs(EngineArgs):
    """`EngineArgs` and the HTTP server's own flags."""

    host: str = flag("127.0.0.1", "Address to listen on; 0.0.0.0 opens the server to the network.", group="Server")
    port: int = flag(8081, "Port to listen on; 0 picks a free one.", group="Server", low=0, high=65535)
    frontend_processes: int = flag(
        1,
        "Processes that answer HTTP on the port, each with its own detokenizer; more where one core is busy with it.",
        group="Server", low=1, high=64,
    )  # fmt: skip
    served_model_name: list[str] = flag([], "Names requests may use; default: the model as given.", group="Server")
    chat_template: str | None = flag(None, "File with a Jinja chat template; default: the tokenizer's.", group="Server")
    api_key: list[str] = flag([], "Bearer keys clients must present; prefer --api_key_file.", group="Server")
    api_key_file: str | None = flag(None, "File with one bearer key a line.", group="Server")
    admin_api_key_file: str | None = flag(
        None, "File with one bearer key a line for the routes that load and unload adapters; off by default.",
        group="Server",
    )  # fmt: skip
    lora_dir: str | None = flag(
        None, "Folder of adapters: requests may name any folder below it by its relative path.", group="LoRA"
    )
    lora_modules: list[str] = flag([], "Adapters that requests may name, each as name=path.", group="LoRA")
    max_queue_size: int = flag(
        1024,
        "Requests that may wait beyond the running ones; more are answered 429.",
        group="Server",
        low=0,
        high=10**6,
    )
    max_queue_time: float = flag(
        600.0, "Seconds a request may wait before it is answered 503.", group="Server", low=0.001, high=10**6
    )
    max_connections: int = flag(4096, "Open connections; more are refused.", group="Server", low=1, high=65000)
    max_body_mib: float = flag(
        8.0, "Largest request body in MiB; more is answered 413.", group="Server", low=0.001, high=1024
    )
    header_timeout: float = flag(
        10.0, "Seconds for a client to send headers, begin its body, or keep an idle connection.",
        group="Server", low=0.1, high=3600,
    )  # fmt: skip
    send_timeout: float = flag(
        60.0, "Seconds a client may leave a stream unread before its request is aborted.",
        group="Server", low=0.1, high=3600,
    )  # fmt: skip
    shutdown_timeout: float = flag(
        30.0, "Seconds running requests get to finish after SIGTERM.", group="Server", low=0.0, high=3600
    )
    engine_timeout: float = flag(
        60.0, "Seconds without a step or heartbeat before /health reports the engine stuck.",
        group="Server", low=0.5, high=3600,
    )  # fmt: skip
    strict_params: bool = flag(
        False, "Refuse unknown request fields with 400 instead of ignoring them.", group="Server"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.disable_frontend_multiprocessing and self.frontend_processes > 1:
            raise ConfigError(
                f"--frontend_processes {self.frontend_processes} cannot be used with "
                "--disable_frontend_multiprocessing, which makes one process of engine and front end"
            )


def check_parallel(args: EngineArgs) -> None:
    """Check the flags of ranks and hosts against each other, before anything is started. Raises `ConfigError`."""
    nodes = args.nnodes
    if args.pipeline_parallel_size == 1 and args.pipeline_micro_batch is not None:
        raise ConfigError("--pipeline_micro_batch is for --pipeline_parallel_size 2 or more; leave it out")
    if args.node_rank >= nodes:
        raise ConfigError(f"--node_rank {args.node_rank} must be below --nnodes {nodes}; the first host is 0")
    if args.world_size % nodes:
        raise ConfigError(
            f"--nnodes {nodes} hosts cannot share {args.world_size} ranks evenly; use a --tensor_parallel_size or "
            f"--pipeline_parallel_size that is a multiple of {nodes}"
        )
    if args.world_size > 1 and args.disable_frontend_multiprocessing:
        raise ConfigError(
            "--disable_frontend_multiprocessing cannot be used with --tensor_parallel_size or --pipeline_parallel_size "
            "above 1, which need an engine process"
        )
    for name in ("dist_init_addr", "dist_token_file"):
        if nodes > 1 and getattr(args, name) is None:
            raise ConfigError(f"--{name} is missing; --nnodes {nodes} needs the same one on every host")
        if nodes == 1 and getattr(args, name) is not None:
            raise ConfigError(f"--{name} is for several hosts; set --nnodes, or leave it out")
    if args.dist_init_addr is not None:
        split_address(args.dist_init_addr)


LORA_FLAGS = ("max_lora_rank", "max_loras", "max_cpu_loras", "lora_dtype")


def check_lora(args: EngineArgs) -> None:
    """Check the flags of adapters against each other, before anything is started. Raises `ConfigError`."""
    given = [name for name in LORA_FLAGS if getattr(args, name) != EngineArgs.__dataclass_fields__[name].default]
    if given and not args.enable_lora:
        name = given[0]
        raise ConfigError(f"--{name} {getattr(args, name)} is for LoRA adapters; add --enable_lora, or leave it out")
    if args.enable_lora and args.precompute_first_layer:
        raise ConfigError(
            "--precompute_first_layer serves no --enable_lora, whose adapters change that layer; leave out either one"
        )
    if args.max_cpu_loras < args.max_loras:
        raise ConfigError(
            f"--max_cpu_loras {args.max_cpu_loras} is below --max_loras {args.max_loras}; the host keeps a copy of "
            f"every adapter on the device: use {args.max_loras} or more"
        )


def split_address(address: str) -> tuple[str, int]:
    """Host and port of --dist_init_addr, with two ports behind it. Raises `ConfigError`."""
    host, colon, port = address.rpartition(":")
    if not (host and colon and port.isascii() and port.isdigit() and 1 <= int(port) < 65534):
        raise ConfigError(f"--dist_init_addr must be host:port with a port from 1 to 65533, got {address!r:.80}")
    return host.strip("[]"), int(port)
