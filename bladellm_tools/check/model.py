"""Probe of a model folder: complete, supported, and small enough. Reads headers and configs, never weights."""

from dataclasses import dataclass
from pathlib import Path

import torch

from bladellm_runtime.distributed.manifest import is_split, read_manifest
from bladellm_runtime.engine.device import pick_device, pick_dtype
from bladellm_runtime.models.config import ModelSpec, read_model_spec
from bladellm_runtime.models.parallel import make_plan
from bladellm_runtime.models.quantized import Schemes, weight_bytes
from bladellm_runtime.models.split_folder import open_whole
from bladellm_runtime.models.weights import WeightTable, weight_table
from bladellm_runtime.text.tokenizer import Tokenizer
from bladellm_tools.check.args import CheckArgs
from bladellm_tools.check.finding import Finding, failed, passed, warned
from bladellm_tools.check.limits import available_memory
from bladellm_tools.console import gib

USABLE_SHARE = 0.9
RULE_OF_THUMB = 1.7
"""BladeLLM's documents ask for GPU memory of at least 1.7 × the model's size."""


@dataclass(frozen=True)
class Demand:
    """What a model asks of one device: bytes of weights, bytes of KV a token, and its longest sequence in tokens."""

    weights: int
    token_bytes: int
    max_model_len: int


def check_model(args: CheckArgs) -> Finding:
    """Everything about --model that can be known before it is loaded."""
    folder = Path(args.model or "").expanduser()
    if not folder.is_dir():
        return warned(f"{args.model} is no folder here, so nothing was checked", "download it, then name its folder")
    spec = read_model_spec(folder)
    check_degree(folder, args.tensor_parallel_size)
    table = weight_table(spec)
    with open_whole(folder) as checkpoint:
        schemes = checkpoint.check(table, spec)
        files = len(set(checkpoint.files.values()))
    tokenizer = Tokenizer.load(folder)
    tokenizer.check_vocabulary(spec.vocab_size)
    device = pick_device("auto")
    dtype = pick_dtype("auto", spec.dtype, device)
    need = demand(spec, table, dtype, device, args.tensor_parallel_size, schemes)
    head = f"{spec.architecture}, {files} weight file{'s' * (files != 1)}, complete"
    if not tokenizer.has_chat_template:
        head += ", without a chat template"
    free = free_memory(device, args.tensor_parallel_size)
    return judge_fit(head, need, free, f"{device.type}, {args.tensor_parallel_size} device(s)")


def check_degree(folder: Path, degree: int) -> None:
    """Raise `ConfigError` for a degree that the server refuses for this model, or for the one it was split for."""
    if degree > 1:
        make_plan(folder, degree, read_manifest(folder).pipeline_parallel_size if is_split(folder) else 1)


def demand(
    spec: ModelSpec,
    table: WeightTable,
    dtype: torch.dtype,
    device: torch.device,
    degree: int,
    schemes: Schemes | None = None,
) -> Demand:
    """One device's part of `degree`. KV heads are whole: beyond their number they are replicated.

    `schemes`: those of quantized linear layers, by module.
    """
    weights = -(-weight_bytes(table, schemes or {}, dtype, device) // degree)
    kv_heads = -(-spec.kv_heads // degree)
    token_bytes = 2 * spec.layers * kv_heads * spec.head_dim * dtype.itemsize
    return Demand(weights, token_bytes, spec.max_position_embeddings)


def free_memory(device: torch.device, degree: int) -> int:
    """Bytes that each of `degree` new processes can take: of a GPU of its own, or of the host's memory."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return available_memory() // degree


def judge_fit(head: str, need: Demand, free: int, where: str) -> Finding:
    """FAILED when the weights do not fit; WARNING when one sequence of the full length does not fit beside them."""
    room = int(free * USABLE_SHARE) - need.weights
    tokens = max(room, 0) // need.token_bytes
    rows = (
        (f"free memory ({where})", gib(free)),
        (f"usable ({USABLE_SHARE:.0%})", gib(free * USABLE_SHARE)),
        ("weights", gib(need.weights)),
        (f"weights x {RULE_OF_THUMB}, the rule of thumb", gib(need.weights * RULE_OF_THUMB)),
        ("KV cache, 1,000 tokens", gib(1000 * need.token_bytes)),
        ("KV cache, room", gib(max(room, 0))),
        ("KV cache, tokens", f"{tokens:,}"),
        (f"requests at the full {need.max_model_len:,} tokens", f"{tokens / need.max_model_len:.1f}"),
    )
    if room <= 0:
        return failed(f"{head}, but its weights do not fit", "use more devices or a smaller model", rows)
    if tokens < need.max_model_len:
        detail = f"{head}; {tokens:,} KV tokens fit, less than its length of {need.max_model_len:,}"
        return warned(detail, f"serve it with --max_model_len {max(tokens, 8)}", rows)
    return passed(f"{head}; {tokens:,} KV tokens fit", rows)
