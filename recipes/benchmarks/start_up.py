"""What a start takes, phase by phase: `python recipes/benchmarks/start_up.py FOLDER`.

FOLDER gets config.json, the demo's tokenizer and random safetensors, in shards, unless it has them. Then engines start
on it, each in a new process: on a machine that has never served it (`first`), with the list of its kernels and nothing
compiled (`cold`), again with all there (`warm`), and with dummy weights; the first two with the files dropped from the
page cache. Each answers requests of many lengths: no kernel may be compiled by then. At last the whole server starts,
from its command to `/ready`.
"""

import argparse
import json
import os
import resource
import shutil
import site
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from shapes import SHAPES, TOKENIZER, copy_tokenizer

NOISE = 2**24


def write_folder(folder: Path, shard_bytes: int) -> None:
    """Complete a model folder: what it lacks of config, tokenizer and weights. Random bf16 weights, norms 1."""
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "config.json").exists():
        config = SHAPES["llama31-8b"] | {"max_position_embeddings": 8192}
        (folder / "config.json").write_text(json.dumps(config))
    if not (folder / "tokenizer.json").exists():
        copy_tokenizer(TOKENIZER, folder)
    if not list(folder.glob("*.safetensors")):
        start = time.monotonic()
        size = write_weights(folder, shard_bytes)
        print(f"wrote {size / 1e9:.1f} GB in {time.monotonic() - start:.1f} s", flush=True)


def write_weights(folder: Path, shard_bytes: int) -> int:
    """Random safetensors for the folder's config.json; returns their bytes."""
    import torch

    from bladellm_runtime.models.config import read_model_spec
    from bladellm_runtime.models.weights import weight_table

    shapes = {part.key: part.shape for parts in weight_table(read_model_spec(folder)).values() for part in parts}
    noise = (torch.randn(NOISE) * 0.02).bfloat16().view(torch.uint8).numpy().data
    shards: list[dict[str, tuple[int, ...]]] = [{}]
    size = 0
    for key, shape in shapes.items():
        if size > shard_bytes:
            shards.append({})
            size = 0
        shards[-1][key] = shape
        size += 2 * count(shape)
    names = [f"model-{index + 1:05}-of-{len(shards):05}.safetensors" for index in range(len(shards))]
    for name, shard in zip(names, shards, strict=True):
        write_shard(folder / name, shard, noise)
    weight_map = {key: name for name, shard in zip(names, shards, strict=True) for key in shard}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return sum(2 * count(shape) for shape in shapes.values())


def write_shard(path: Path, shapes: dict[str, tuple[int, ...]], noise: memoryview) -> None:
    """One safetensors file of bf16 tensors, written piece by piece."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for key, shape in shapes.items():
        start, end = end, end + 2 * count(shape)
        header[key] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for key, shape in shapes.items():
            left = 2 * count(shape)
            while left:
                piece = min(left, len(noise))
                # bf16 1.0 is 0x3F80.
                file.write(b"\x80\x3f" * (piece // 2) if key.endswith("norm.weight") else noise[:piece])
                left -= piece


def count(shape: tuple[int, ...]) -> int:
    """Numbers in a tensor of this shape."""
    product = 1
    for size in shape:
        product *= size
    return product


def drop_from_page_cache(folder: Path) -> None:
    """Ask the kernel to forget the weights, as after a boot."""
    os.sync()
    for path in folder.glob("*.safetensors"):
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def run_engine(args: argparse.Namespace) -> None:
    """In a process of its own: start an engine, let it answer, print what that took as JSON."""
    from bladellm_runtime.config import EngineArgs
    from bladellm_runtime.engine.build import build_engine
    from bladellm_runtime.engine.kernel_compiles import KERNEL_COMPILES

    imported = time.time() - args.started
    given = dict(option.split("=", 1) for option in args.options)
    engine = build_engine(
        EngineArgs(model=str(args.folder), load_format=args.load_format, device=args.device, **typed(given))
    )
    ready = time.time() - args.started
    at_ready = {"compiled": KERNEL_COMPILES.compiled, "loaded": KERNEL_COMPILES.loaded}
    answer(engine, args.lengths)
    found = {
        "imports": imported, "ready": ready, "phases": engine.ready.phases, "memory": dict(engine.ready.memory),
        "host_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, "kernels": at_ready,
        "compile_seconds": KERNEL_COMPILES.seconds,
        "late": KERNEL_COMPILES.late_names,
    }  # fmt: skip
    print(json.dumps(found))
    engine.core.close()


def typed(options: dict[str, str]) -> dict[str, Any]:
    """Values of engine options: numbers and true or false by their look, else text."""

    def value(text: str) -> Any:
        try:
            return json.loads(text)
        except ValueError:
            return text

    return {name: value(text) for name, text in options.items()}


def answer(engine: Any, lengths: list[int]) -> None:
    """One request of each prompt length, then all at once."""
    from bladellm_runtime.request import SamplingParams
    from bladellm_runtime.wire.messages import AddRequest

    core, longest = engine.core, engine.ready.max_model_len - 8
    for batch in [*([length] for length in lengths), lengths]:
        for index, length in enumerate(batch):
            params = SamplingParams(max_tokens=6, temperature=index % 2, seed=index, ignore_eos=True)
            core.add(AddRequest(index, list(range(2, 2 + min(length, longest))), params, 0, time.monotonic()))
        while not core.idle:
            core.step()


def start(args: argparse.Namespace, load_format: str, home: str) -> dict[str, Any]:
    """Run `run_engine` in a new process with kernels and their list below `home`."""
    command = [sys.executable, __file__, str(args.folder), "--child", "--load_format", load_format, "--device",
               args.device, "--started", repr(time.time()), "--lengths", *map(str, args.lengths),
               "--options", *args.options]  # fmt: skip
    done = subprocess.run(command, env=environment(home), stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def environment(home: str) -> dict[str, str]:
    """This process's, with another home: compiled kernels and their list are kept there."""
    return {**os.environ, "HOME": home, "TRITON_HOME": home, "PYTHONUSERBASE": site.getuserbase()}


@contextmanager
def server(args: argparse.Namespace, home: str) -> Iterator[tuple[str, float]]:
    """A server that is ready, its address and the seconds that took."""
    port, started = args.port, time.monotonic()
    given = [f"--{option}" for option in args.options]
    command = [sys.executable, "-c", "import sys; from bladellm_tools.cli import server; sys.exit(server())",
               "--model", str(args.folder), "--device", args.device, "--port", str(port), *given]  # fmt: skip
    process = subprocess.Popen(command, env=environment(home))
    url = f"http://127.0.0.1:{port}"
    try:
        while not answers(f"{url}/ready"):
            if process.poll() is not None:
                raise SystemExit(f"the server ended with {process.returncode}")
            time.sleep(0.02)
        yield url, time.monotonic() - started
    finally:
        process.terminate()
        process.wait(30)


def answers(url: str) -> bool:
    """Whether a GET is answered 200."""
    try:
        with urllib.request.urlopen(url, timeout=1):
            return True
    except (urllib.error.URLError, OSError):
        return False


def report(rows: dict[str, dict[str, Any]]) -> None:
    """A column a start, a line a phase."""
    phases = list(dict.fromkeys(name for row in rows.values() for name, _ in row["phases"]))
    lines = {"imports": [f"{row['imports']:.2f} s" for row in rows.values()]}
    for phase in phases:
        lines[phase] = [f"{dict(row['phases']).get(phase, 0.0):.2f} s" for row in rows.values()]
    lines["ready"] = [f"{row['ready']:.2f} s" for row in rows.values()]
    lines["weights, GB/s"] = [f"{rate(row):.1f}" for row in rows.values()]
    lines["peak host memory"] = [f"{row['host_bytes'] / 2**30:.2f} GiB" for row in rows.values()]
    for name, label in (("compiled", "kernels compiled"), ("loaded", "kernels from the cache")):
        lines[label] = [str(row["kernels"][name]) for row in rows.values()]
    lines["seconds of compiling in the engine"] = [f"{row['compile_seconds']:.1f}" for row in rows.values()]
    lines["kernels after ready"] = [", ".join(row["late"]) or "none" for row in rows.values()]
    print("| | " + " | ".join(rows) + " |\n|" + " --- |" * (len(rows) + 1))
    for label, cells in lines.items():
        print(f"| {label} | " + " | ".join(cells) + " |")


def rate(row: dict[str, Any]) -> float:
    """Gigabytes of weights a second."""
    return float(row["memory"]["weights"] / 1e9 / dict(row["phases"])["load weights"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="model folder, completed where something is missing")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--shard_gb", type=float, default=5.0)
    parser.add_argument("--lengths", nargs="+", type=int, default=[1, 2, 7, 64, 300, 1000, 2049, 4000])
    parser.add_argument("--options", nargs="*", default=[], help="engine options, name=value")
    parser.add_argument("--starts", nargs="+", default=["first", "cold", "warm", "dummy", "server"])
    parser.add_argument("--port", type=int, default=18081)
    parser.add_argument("--json", type=Path)
    for name, kind in (("load_format", str), ("started", float)):
        parser.add_argument(f"--{name}", type=kind, help=argparse.SUPPRESS)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        return run_engine(args)
    write_folder(args.folder, int(args.shard_gb * 1e9))
    rows = {}
    with tempfile.TemporaryDirectory() as home:
        for name in args.starts:
            if name in ("first", "cold"):
                drop_from_page_cache(args.folder)
                shutil.rmtree(Path(home) / ".triton", ignore_errors=True)
            if name != "server":
                rows[name] = start(args, "dummy" if name == "dummy" else "auto", home)
        report(rows)
        if "server" in args.starts:
            with server(args, home) as (url, seconds):
                page = urllib.request.urlopen(f"{url}/metrics").read().decode()
            late = next(line for line in page.splitlines() if line.startswith("blade_llm:kernel_compiles_after_ready"))
            print(f"server ready after {seconds:.2f} s; {late.rsplit(' ', 1)[1]} kernels compiled since")
            rows["server"] = {"ready": seconds}
    if args.json:
        args.json.write_text(json.dumps(rows))
    return None


if __name__ == "__main__":
    main()
