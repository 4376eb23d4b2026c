"""`blade_llm serve`: start the server, and say on standard output what was started and how to ask it."""

import logging
import os
import shlex
import sys
import time
from dataclasses import replace
from typing import TYPE_CHECKING

import msgspec

from bladellm_runtime import __version__
from bladellm_runtime.config import ServingArgs, check_lora, check_parallel
from bladellm_runtime.errors import ConfigError
from bladellm_runtime.logs import log_to_stderr
from bladellm_runtime.models.folder import file_in
from bladellm_runtime.models.hub import resolve_model
from bladellm_runtime.wire.engine_process import engine_process
from bladellm_tools.console import BOLD, gib, styled, table

if TYPE_CHECKING:
    from bladellm_runtime.wire.client import EngineClient
    from bladellm_runtime.wire.messages import EngineReady

logger = logging.getLogger(__name__)


def run(args: ServingArgs) -> int:
    """Serve until told to stop; on other hosts than the first run its ranks. Returns the exit code.

    What serves is imported while the engine's process imports torch.
    """
    if not args.model:
        raise ConfigError("--model is missing; give a model folder or a hub id")
    check_parallel(args)
    check_lora(args)
    log_to_stderr(args.log_level, "server")
    started = time.monotonic()
    folder = resolve_model(args.model)
    # Looked for here, so that a folder that is no model's is called that, whoever would read which file first.
    file_in(folder, "config.json")
    if args.node_rank:
        from bladellm_runtime.ranks.node import run_node

        return run_node(replace(args, model=str(folder)), folder)

    def on_ready(url: str, client: "EngineClient") -> None:
        show(banner(args, url, client.ready, time.monotonic() - started), url)

    with engine_process(args) as engine:
        from bladellm_runtime.server.lifecycle import serve

        return serve(args, folder, on_ready=on_ready, engine=engine)


def show(lines: list[str], url: str) -> None:
    """Print the banner. Nobody need read it: where it cannot be written, the server serves all the same."""
    try:
        print("\n".join(lines), flush=True)
    except OSError as error:
        logger.warning("standard output cannot be written (%s); serving at %s", error.strerror, url)
        # What is left in its buffer would fail again at the end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def banner(args: ServingArgs, url: str, ready: "EngineReady", seconds: float) -> list[str]:
    """The start-up banner: what runs, where the memory went, how long each phase took, and a first request.

    `seconds` is the whole start; what the engine's phases leave of it went into processes and imports.
    """
    names = args.served_model_name or [args.model]
    concurrency = ready.kv_tokens / ready.max_model_len
    rest = max(seconds - sum(spent for _, spent in ready.phases), 0.0)
    phases = [*ready.phases, ("processes, imports", rest), ("total", seconds)]
    memory = [(term, gib(size)) for term, size in ready.memory]
    return [
        styled(f"BladeLLM Open {__version__}", BOLD, sys.stdout),
        *table_left(
            [
                ("model", args.model),
                ("served as", ", ".join(names)),
                ("dtype", ready.dtype),
                ("device", ready.device),
                ("KV cache", ready.kv_cache),
                *([("front ends", f"{args.frontend_processes} processes")] if args.frontend_processes > 1 else []),
            ]
        ),
        "memory",
        *table([*memory, ("total", gib(sum(size for _, size in ready.memory)))]),
        f"KV cache of {ready.kv_tokens:,} tokens: {concurrency:.1f} requests at the full {ready.max_model_len:,}",
        "start",
        *table([(phase + _rate(phase, spent, ready), f"{spent:.2f} s") for phase, spent in phases]),
        f"serving at {styled(url, BOLD, sys.stdout)}",
        curl_line(url, names[0], bool(args.api_key or args.api_key_file)),
    ]


def _rate(phase: str, seconds: float, ready: "EngineReady") -> str:
    """How fast the weights came, beside the name of their phase; nothing for other phases."""
    size = dict(ready.memory).get("weights", 0) if phase == "load weights" else 0
    return f", {size / seconds / 1e9:.1f} GB/s" if size and seconds else ""


def table_left(rows: list[tuple[str, str]]) -> list[str]:
    """Names and values, both to the left."""
    width = max(len(name) for name, _ in rows)
    return [f"  {name:<{width}}  {value}" for name, value in rows]


def curl_line(url: str, name: str, with_key: bool) -> str:
    """A first request, to be pasted into a shell. The key itself is not shown."""
    body = {"model": name, "messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 32}
    key = ' -H "Authorization: Bearer $API_KEY"' if with_key else ""
    data = shlex.quote(msgspec.json.encode(body).decode())
    return f"curl {url}/v1/chat/completions -H 'Content-Type: application/json'{key} -d {data}"
