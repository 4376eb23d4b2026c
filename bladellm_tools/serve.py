"""`blade_llm serve`: start the server, and say on standard output what was started and how to ask it."""

import shlex
import sys

import msgspec

from bladellm_runtime import __version__
from bladellm_runtime.config import ServingArgs
from bladellm_runtime.errors import ConfigError
from bladellm_runtime.server.app import serve
from bladellm_runtime.wire.messages import EngineReady
from bladellm_tools.console import BOLD, gib, styled, table


def run(args: ServingArgs) -> int:
    """Serve until told to stop. Returns the exit code."""
    if not args.model:
        raise ConfigError("--model is missing; give a model folder or a hub id")
    return serve(args, lambda url, ready: print_banner(args, url, ready))


def print_banner(args: ServingArgs, url: str, ready: EngineReady) -> None:
    """Print the banner once the server answers requests."""
    print("\n".join(banner(args, url, ready)), flush=True)


def banner(args: ServingArgs, url: str, ready: EngineReady) -> list[str]:
    """The start-up banner: what runs, where the memory went, how long each phase took, and a first request."""
    name = args.served_model_name[0] if args.served_model_name else args.model
    concurrency = ready.kv_tokens / ready.max_model_len
    phases = [(phase, f"{seconds:.2f} s") for phase, seconds in ready.phases]
    memory = [(term, gib(size)) for term, size in ready.memory]
    return [
        styled(f"BladeLLM Open {__version__}", BOLD, sys.stdout),
        *table_left([("model", args.model), ("served as", name), ("dtype", ready.dtype), ("device", ready.device)]),
        "memory",
        *table([*memory, ("total", gib(sum(size for _, size in ready.memory)))]),
        f"KV cache of {ready.kv_tokens:,} tokens: {concurrency:.1f} requests at the full {ready.max_model_len:,}",
        "start",
        *table([*phases, ("total", f"{sum(seconds for _, seconds in ready.phases):.2f} s")]),
        f"serving at {styled(url, BOLD, sys.stdout)}",
        curl_line(url, name, bool(args.api_key or args.api_key_file)),
    ]


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
