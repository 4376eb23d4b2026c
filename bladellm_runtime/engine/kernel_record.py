"""The list of kernels that serving a model needs: every start writes what it compiled, for the next to compile at once.

A kernel is described by what triton compiles it from (function, types and values of its arguments, options) and not by
its result, so that a new version of its source is compiled ahead like the old one was.
"""

import dataclasses
import functools
import hashlib
import json
import logging
import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from bladellm_kernels.has_triton import has_triton

from bladellm_runtime.config import EngineArgs

FOLDER = Path("~/.cache/bladellm_open/kernels")
MAX_BYTES = 16 * 2**20
ELSEWHERE = (
    "model", "tokenizer_dir", "load_format", "dummy_seed",
    "guided_backend", "guided_cache_mib", "guided_deadline", "enable_json_warmup", "max_cpu_loras",
    "target_tbt_ms", "target_ttft_ms",
)  # fmt: skip
"""Options that no kernel depends on; what is in the model's folder counts by its config.json."""

logger = logging.getLogger(__name__)

Description = dict[str, Any]
"""A kernel as JSON: function, signature, constants, attributes, options."""


def record_path(args: EngineArgs, folder: Path, device: torch.device, home: Path = FOLDER) -> Path:
    """The file of the record for an engine: of its model's config, its options and its kind of GPU."""
    names = [field.name for field in dataclasses.fields(EngineArgs) if field.name not in ELSEWHERE]
    options = {name: getattr(args, name) for name in names}
    kind = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    known = [(folder / "config.json").read_bytes(), json.dumps(options, sort_keys=True).encode(), kind.encode()]
    return home.expanduser() / f"{hashlib.sha256(b'|'.join(known)).hexdigest()[:32]}.json"


def read_record(path: Path) -> list[Description]:
    """The kernels of a record; none where there is no usable one."""
    try:
        if path.stat().st_size > MAX_BYTES:
            return []
        kernels = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return []
    return kernels if isinstance(kernels, list) else []


def write_record(path: Path, kernels: Iterable[Description]) -> None:
    """Replace a record at once; a folder that cannot be written to is nothing that a start may fail for."""
    unique = {json.dumps(kernel, sort_keys=True) for kernel in kernels}
    partial = path.with_suffix(f".{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(f"[{','.join(sorted(unique))}]")
        partial.replace(path)
    except OSError as error:
        logger.debug("the list of kernels was not kept: %s", error)


def describe(src: Any, metadata: dict[str, Any]) -> Description | None:
    """The description of what triton's compilation listener is told of; None for what JSON cannot say."""
    tried = (_describe(src, metadata | {"num_warps": warps}) for warps in _warps_asked_for(metadata["num_warps"]))
    return next((described for described in tried if described is not None), None)


def _warps_asked_for(warps: int) -> list[int]:
    """What may have become so many: a kernel of specialised warps counts those of all its partitions afterwards."""
    return [2**power for power in reversed(range(warps.bit_length()))]


def _describe(src: Any, metadata: dict[str, Any]) -> Description | None:
    from triton.backends.nvidia.compiler import CUDAOptions

    described = {
        "function": _name(src.fn.fn),
        "signature": {name: _encode(kind) for name, kind in src.signature.items()},
        "constants": [[path, _encode(value)] for path, value in src.constants.items()],
        "attributes": [[path, value] for path, value in src.attrs.items()],
        "options": {field.name: metadata[field.name] for field in dataclasses.fields(CUDAOptions)},
    }
    try:
        restored = json.loads(json.dumps(described))
        # Sources of different languages may have one hash, and what is compiled ahead is found by the hash alone.
        same = type(source(restored)) is type(src)
        same = same and cache_hash(restored, metadata["target"]) == metadata["hash"]
    except Exception as error:  # whatever a kernel of a new kind does here, it is compiled in its turn
        logger.debug("kernel %s is not listed: %s", src.name, error)
        return None
    return described if same else None


def source(kernel: Description) -> Any:
    """What triton compiles a description from. Raises whatever importing a function or an outdated description does."""
    from triton.compiler import ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource

    function = _load(kernel["function"])
    kind = GluonASTSource if function.is_gluon() else ASTSource
    return kind(
        function,
        {name: _decode(kind) for name, kind in kernel["signature"].items()},
        {tuple(path): _decode(value) for path, value in kernel["constants"]},
        {tuple(path): value for path, value in kernel["attributes"]},
    )


def options(kernel: Description) -> dict[str, Any]:
    """triton's compile options of a description."""
    return {name: _tuples(value) for name, value in kernel["options"].items()}


def make_hashes_reproducible() -> None:
    """Make triton's hash of a function the same in every process; to be called before triton hashes any.

    In triton 3.6 the global constants of a function that a kernel calls count in the kernel's hash only where that
    function happens to have been hashed before, so that the order of the first launches decides what is found in the
    cache on disk. Here functions that are called are always hashed first.
    """
    from triton.runtime.jit import DependenciesFinder

    update = DependenciesFinder._update_hash
    if hasattr(update, "__wrapped__"):
        return

    @functools.wraps(update)
    def update_callee_first(self: Any, function: Any) -> None:
        _ = function.cache_key
        update(self, function)

    DependenciesFinder._update_hash = update_callee_first


@contextmanager
def hashing_triton(device: torch.device) -> Iterator[None]:
    """Have triton hash itself beside what is done inside.

    Its hash, of 400 MB, counts in that of every kernel and is made once in a process, mostly without Python's lock.
    """
    if device.type != "cuda" or not has_triton():
        yield
        return
    # In this thread: two that import what imports each other can meet half of it.
    from triton.runtime import cache

    with ThreadPoolExecutor(1, "triton-hash") as thread:
        # Where a version of triton has it elsewhere, or it fails, whoever needs the hash finds out.
        thread.submit(lambda: cache.triton_key())
        yield


def cache_hash(kernel: Description, target: Any) -> str:
    """What triton's on-disk cache has a kernel under, for a `GPUTarget`. Raises what `source` does."""
    from triton.compiler.compiler import get_cache_invalidating_env_vars, get_cache_key, make_backend

    backend = make_backend(target)
    chosen = backend.parse_options(options(kernel))
    key = get_cache_key(source(kernel), backend, chosen, get_cache_invalidating_env_vars())
    return hashlib.sha256(key.encode()).hexdigest()


def _name(thing: Any) -> str:
    return f"{thing.__module__}:{thing.__qualname__}"


def _load(name: str) -> Any:
    module, _, thing = name.partition(":")
    if not module.startswith("bladellm_"):
        raise ValueError(f"{name} is none of our kernels")
    return getattr(import_module(module), thing)


def _encode(value: Any) -> Any:
    import triton.language as tl
    from triton.runtime.jit import JITFunction

    if isinstance(value, tl.dtype):
        return {"dtype": value.name}
    if isinstance(value, JITFunction):
        return {"function": _name(value.fn)}
    if dataclasses.is_dataclass(value):
        items = [_encode(getattr(value, field.name)) for field in dataclasses.fields(value)]
        return {"class": _name(type(value)), "items": items}
    if not isinstance(value, tuple):
        return value
    items = [_encode(item) for item in value]
    return {"class": _name(type(value)), "items": items} if hasattr(value, "_fields") else items


def _decode(value: Any) -> Any:
    import triton.language as tl

    match value:
        case {"dtype": name}:
            return tl.dtype(name)
        case {"function": name}:
            return _load(name)
        case {"class": name, "items": items}:
            return _load(name)(*map(_decode, items))
        case list():
            return tuple(map(_decode, value))
    return value


def _tuples(value: Any) -> Any:
    """JSON has lists for tuples; among options triton has only the latter."""
    return tuple(_tuples(item) for item in value) if isinstance(value, list) else value
