"""A server under Poisson arrivals and a closed loop, and a peer beside it: `python recipes/benchmarks/online.py MODEL`.

Starts this project's server on MODEL (random weights by default), measures it with recipes/bench_online.yaml (1,024
tokens in, 128 out, 8/16/24 QPS) and recipes/bench_streams.yaml (512 in, 128 out, 32/128/256 streams), stops it, then
does the same with the peer's command line, if one is given, with the same requests in the same order:

    online.py MODELS/llama31-8b --out results --peer "vllm serve {model} --load-format dummy --port {port} ..."

`{model}` and `{port}` are filled in. With --target_ttft_ms this project's server runs once more, under random arrivals
alone, as `ours_target_ttft`. The comparison of each recipe is in OUT/poisson and OUT/closed, everything in
OUT/online.json, also the load that each carries within the limits of the recipe. MODEL needs a tokenizer that knows
all its ids: one that it lacks has no text, and is not seen to come.
"""

import argparse
import asyncio
import json
import shlex
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from bladellm_runtime.errors import UserError
from bladellm_tools.bench.capacity import Crossing, capacity
from bladellm_tools.bench.endpoints import Endpoint, Server, parse_endpoint
from bladellm_tools.bench.figures import LevelFigures, level_figures
from bladellm_tools.bench.slo import parse_slo
from bladellm_tools.bench.storage import load

RECIPES = Path(__file__).parents[1]
LOADS = {"poisson": RECIPES / "bench_online.yaml", "closed": RECIPES / "bench_streams.yaml"}
FIGURES = ("ttft_p50", "ttft_p90", "tbt_p50", "tbt_p99")
RATES = ("requests_per_s", "output_tokens_per_s")


def program(name: str) -> list[str]:
    """The command line of a function of `bladellm_tools.cli`, whether or not the project is installed."""
    return [sys.executable, "-c", f"import sys; from bladellm_tools.cli import {name}; sys.exit({name}())"]


def our_server(args: argparse.Namespace, name: str = "ours", *more: str) -> Endpoint:
    """The endpoint that starts this project's server, with more flags."""
    flags = {
        "model": args.model, "device": args.device, "load_format": args.load_format, "port": "{port}",
        "max_model_len": args.max_model_len, "max_running_requests": args.max_running_requests,
    }  # fmt: skip
    words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    words += ["--disable_prompt_cache", *shlex.split(args.flags), *more]
    return Endpoint(name, command=(*program("server"), *words))


def peer_server(args: argparse.Namespace) -> Endpoint:
    """The endpoint that starts the peer's server. Raises `ConfigError` for a command line that cannot be read."""
    return parse_endpoint(f"peer=cmd:{args.peer.replace('{model}', args.model)}")


@dataclass(frozen=True)
class Sweep:
    """One recipe on one server."""

    load: str
    endpoint: str
    folder: Path

    def words(self, args: argparse.Namespace, url: str) -> list[str]:
        """The command that measures it."""
        given = ["--config", str(LOADS[self.load]), "--endpoint", f"{self.endpoint}={url}", "--out", str(self.folder)]
        given += ["--quiet", "--repeats", str(args.repeats), "--tokenizer", args.tokenizer or args.model]
        given += ["--title", f"{Path(args.model).name}, {self.load}"]
        return [*program("bench"), "sweep", *given, *shlex.split(args.bench_flags), *self._levels(args)]

    def _levels(self, args: argparse.Namespace) -> list[str]:
        name, levels = ("qps", args.qps) if self.load == "poisson" else ("concurrency", args.concurrency)
        return [f"--{name}", *map(str, levels)] if levels else []


def servers(args: argparse.Namespace) -> list[tuple[Endpoint, list[str]]]:
    """What is measured, one after the other, and under which loads. Raises `ConfigError` as `peer_server`."""
    found = [(our_server(args), args.loads)]
    if args.target_ttft_ms and "poisson" in args.loads:
        target = ("--target_ttft_ms", f"{args.target_ttft_ms:g}")
        found.append((our_server(args, "ours_target_ttft", *target), ["poisson"]))
    return [*found, *([(peer_server(args), args.loads)] if args.peer else [])]


async def measure(endpoint: Endpoint, loads: Sequence[str], args: argparse.Namespace) -> tuple[list[Sweep], float]:
    """Recipes on one server; what they left, and the seconds of the server's start."""
    server, sweeps, started = Server(endpoint, args.out, args.start_timeout), [], time.monotonic()
    try:
        await server.start()
        seconds = time.monotonic() - started
        print(f"{endpoint.name}: ready after {seconds:.1f} s", flush=True)
        for kind in loads:
            sweeps.append(Sweep(kind, endpoint.name, args.out / f"{kind}-{endpoint.name}"))
            await call(sweeps[-1].words(args, server.url))
    finally:
        await server.stop()
    return sweeps, seconds


async def call(words: list[str]) -> None:
    """Run a command to its end, or until this task is cancelled. Raises `UserError` when it fails."""
    process = await asyncio.create_subprocess_exec(*words)
    try:
        code = await process.wait()
    except asyncio.CancelledError:
        process.terminate()
        await process.wait()
        raise
    if code:
        raise UserError(f"blade_llm_bench ended with {code}")


async def run(args: argparse.Namespace) -> dict[str, Any]:
    """Measure both servers one after the other, and set them side by side. SIGTERM ends it as Ctrl-C does: no server
    stays."""
    if (task := asyncio.current_task()) is not None:
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    args.out.mkdir(parents=True, exist_ok=True)
    sweeps: list[Sweep] = []
    starts: dict[str, float] = {}
    for endpoint, loads in servers(args):
        done, starts[endpoint.name] = await measure(endpoint, loads, args)
        sweeps += done
    rows = [row for sweep in sweeps for row in figures(sweep)]
    for kind in args.loads:
        folders = [str(sweep.folder) for sweep in sweeps if sweep.load == kind]
        if len(folders) > 1:
            given = ["--title", f"{Path(args.model).name}, {kind}", "--slo", *limits(kind)]
            await call([*program("bench"), "plot", "--results", *folders, "--out", str(args.out / kind), *given])
    carried = {sweep.endpoint: carried_qps(sweep) for sweep in sweeps if sweep.load == "poisson"}
    return {"ready_s": starts, "rows": rows, "carried_qps": carried}


def limits(kind: str) -> list[str]:
    """The limits of a recipe, as `--slo` takes them."""
    found: list[str] = yaml.safe_load(LOADS[kind].read_text())["slo"]
    return found


def carried_qps(sweep: Sweep) -> float | None:
    """Requests a second that a server carries within all limits of the recipe; None where its levels do not tell."""
    levels = level_figures(load(sweep.folder))
    return least_crossing([capacity(levels, limit) for limit in parse_slo(limits(sweep.load))])


def least_crossing(crossings: Sequence[Crossing]) -> float | None:
    """Where the first of several limits is crossed; None where none is, or one may have been crossed before."""
    least = min((each.qps for each in crossings if each.kind == "at" and each.qps is not None), default=None)
    if least is None:
        return None
    kept = (
        each.kind == "at" or (each.kind == "above" and each.qps is not None and each.qps >= least) for each in crossings
    )
    return least if all(kept) else None


def figures(sweep: Sweep) -> list[dict[str, Any]]:
    """A row a level: milliseconds, requests and tokens a second; None where too few requests were completed."""
    return [
        {"load": sweep.load, "endpoint": sweep.endpoint, "level": level.load.label} | values(level)
        for level in level_figures(load(sweep.folder))
    ]


def values(level: LevelFigures) -> dict[str, Any]:
    """The figures of the tables, and what tells whether the level counts."""
    times = {f"{name}_ms": None if (time := level.value(name)) is None else 1e3 * time for name in FIGURES}
    return times | {name: level.value(name) for name in RATES} | {"failed": level.failed, "marks": level.marks}


def table(rows: list[dict[str, Any]]) -> str:
    """The rows in Markdown."""
    titles = ["load", "endpoint", "TTFT p50 ms", "p90", "TBT p50 ms", "p99", "requests/s", "tokens/s", "failed", ""]
    lines = [f"| {' | '.join(titles)} |", "|" + " --- |" * len(titles)]
    for row in rows:
        measured = [row[f"{name}_ms"] for name in FIGURES] + [row[name] for name in RATES]
        cells = ["" if value is None else f"{value:.4g}" for value in measured]
        cells = [row["level"], row["endpoint"], *cells, str(row["failed"]), row["marks"]]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="model folder, see shapes.py")
    parser.add_argument("--peer", help="command line of a server to compare with; {model} and {port} are filled in")
    parser.add_argument("--out", type=Path, default=Path("online"), help="new folder for the results")
    parser.add_argument("--loads", nargs="+", choices=list(LOADS), default=list(LOADS))
    parser.add_argument("--qps", nargs="*", type=float, help="rates instead of the recipe's")
    parser.add_argument("--concurrency", nargs="*", type=int, help="streams instead of the recipe's")
    parser.add_argument("--repeats", type=int, default=1, help="runs of every level")
    parser.add_argument("--tokenizer", help="folder of the tokenizer that counts prompt tokens; default: the model's")
    parser.add_argument("--flags", default="", help="more flags of this project's server, as one text")
    parser.add_argument(
        "--target_ttft_ms", type=float, default=0.0, help="measure this project's server with this target, too"
    )
    parser.add_argument("--bench_flags", default="", help="more flags of blade_llm_bench, as one text")
    parser.add_argument("--max_model_len", type=int, default=8192)
    parser.add_argument("--max_running_requests", type=int, default=256)
    parser.add_argument("--start_timeout", type=float, default=300.0)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--load_format", default="dummy")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    try:
        found = asyncio.run(run(args))
    except UserError as error:
        raise SystemExit(f"error: {error}") from error
    except asyncio.CancelledError:
        raise SystemExit(128 + signal.SIGTERM) from None
    (args.out / "online.json").write_text(json.dumps(found, indent=2) + "\n")
    print(table(found["rows"]))


if __name__ == "__main__":
    main()
