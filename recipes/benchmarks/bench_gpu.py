"""The tables of speed, on random weights: `python recipes/benchmarks/bench_gpu.py --out results` (`make bench-gpu`).

Parts, each of the shapes that have it (`targets.py`): `decode` steps by batch, `prefill` of an idle engine, `offline`
throughput, `long` contexts by KV format, `start` from the command to ready, and a server `online`, once more with a
target for the first token, beside a peer where --peer gives its command line. What else a peer reached in the same
hour, --peer_figures, goes into the table, and the goals beside it are shares of that. Parts of one shape and KV format
share an engine. OUT/table.md has every figure beside its goals,
OUT/results.json the same, OUT/*.json what each script found; what is measured again replaces its rows.

    bench_gpu.py --out results --shapes llama31-8b --parts decode prefill offline
    bench_gpu.py --out results --parts online --peer "vllm serve {model} --load-format dummy --port {port}"
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from one_engine import PARTS, has
from shapes import SHAPES, TOKENIZER, write_shape
from targets import CASES, FLOAT12, MEASURED_QPS, OURS, TARGET_TTFT_MS, Row, carried, table

HERE = Path(__file__).parent
KV_FORMATS = ("no_quant", "int8", "int4", FLOAT12)
PARTS_OF = {"no_quant": PARTS, FLOAT12: ("decode", "offline")}
"""Parts that are measured with a KV format; with the others long contexts."""
STARTS = {"warm": "engine ready, warm", "dummy": "engine ready, random weights", "server": "server ready, warm"}


@dataclass(frozen=True)
class Job:
    """One script that runs on its own: parts of a shape that share an engine, or a part that starts its own."""

    shape: str
    parts: tuple[str, ...]
    kind: str = "no_quant"

    @property
    def name(self) -> str:
        """Of its file in the results."""
        return "-".join((self.shape, *self.parts, *([self.kind] if self.kind != "no_quant" else [])))


def jobs(args: argparse.Namespace) -> Iterator[Job]:
    """What is to run, in order."""
    for shape in args.shapes:
        for kind in args.kv_formats:
            wanted = [part for part in PARTS_OF.get(kind, ("long",)) if part in args.parts]
            if parts := tuple(part for part in wanted if has(CASES[shape], part, kind)):
                yield Job(shape, parts, kind)
        for part in ("start", "online"):
            if part in args.parts and getattr(CASES[shape], part):
                yield Job(shape, (part,))


def run_engine(job: Job, args: argparse.Namespace) -> list[Row]:
    """Parts of one engine."""
    file = args.out / f"{job.name}.json"
    words = ["one_engine.py", str(args.models), job.shape, "--parts", *job.parts, "--kv_cache_quant", job.kind]
    words += ["--device", args.device, "--tokenizer_dir", str(args.tokenizer_dir), "--json", str(file)]
    call([*words, *args.engine_flags.split()])
    return [Row(job.shape, **row) for row in json.loads(file.read_text())["rows"]]


def run_start(job: Job, args: argparse.Namespace) -> list[Row]:
    """Starts of the engine and the server with weights in files, which are removed again."""
    file, folder = args.out / f"{job.name}.json", args.models / f"{job.shape}-start"
    # A server that is given weights refuses a tokenizer of more tokens than they have.
    write_shape(args.models, job.shape).rename(folder)
    try:
        words = ["start_up.py", str(folder), "--device", args.device, "--starts", "first", *STARTS, "--json", str(file)]
        call([*words, "--options", *args.start_options.split()])
    finally:
        shutil.rmtree(folder)
    found = json.loads(file.read_text())
    return [Row(job.shape, case, "s", found[name]["ready"]) for name, case in STARTS.items()]


def run_online(job: Job, args: argparse.Namespace) -> list[Row]:
    """A server under load, and the peer's under the same."""
    folder = args.out / job.name
    shutil.rmtree(folder, ignore_errors=True)
    words = ["online.py", str(write_shape(args.models, job.shape, args.tokenizer_dir)), "--out", str(folder)]
    words += ["--qps", *map(str, MEASURED_QPS), "--target_ttft_ms", str(TARGET_TTFT_MS), "--device", args.device]
    call([*words, *([f"--peer={args.peer}"] if args.peer else []), *args.online_flags])
    found = json.loads((folder / "online.json").read_text())
    return list(online_rows(job.shape, found))


def online_rows(shape: str, found: dict[str, Any]) -> Iterator[Row]:
    """Figures of our server, those of the peer beside them."""
    theirs = {row["level"]: row for row in found["rows"] if row["endpoint"] == "peer"}
    for row in found["rows"]:
        if row["endpoint"] not in OURS:
            continue
        level, peer = row["level"] + OURS[row["endpoint"]], theirs.get(row["level"], {})
        if row["load"] == "closed":
            yield Row(shape, level, "requests/s", row["requests_per_s"], peer.get("requests_per_s"))
        for name in ("ttft_p50", "ttft_p90", "tbt_p50", "tbt_p99"):
            metric, statistic = name.upper().split("_")
            case = f"{level}, {metric} {statistic.lower()}"
            yield Row(shape, case, "ms", row[f"{name}_ms"], peer.get(f"{name}_ms"))
    for name in OURS:
        if name in found["carried_qps"]:
            yield Row(shape, carried(name), "requests/s", found["carried_qps"][name], found["carried_qps"].get("peer"))
    yield Row(shape, "server ready, random weights", "s", found["ready_s"]["ours"], found["ready_s"].get("peer"))


def read_figures(path: str) -> dict[str, dict[str, float]]:
    """A peer's figures by shape and case, from a JSON file."""
    try:
        figures = json.loads(Path(path).read_text())
        return {shape: {case: float(figure) for case, figure in cases.items()} for shape, cases in figures.items()}
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise argparse.ArgumentTypeError(f"{path} has no figures by shape and case: {error}") from None


def beside_peer(rows: list[Row], figures: dict[str, dict[str, float]]) -> list[Row]:
    """The rows with a peer's figures, by shape and case, where they have none."""
    return [
        row if row.peer is not None else replace(row, peer=figures.get(row.shape, {}).get(row.case)) for row in rows
    ]


def call(words: list[str]) -> None:
    """Run a script beside this one to its end. Raises `CalledProcessError` when it fails."""
    subprocess.run([sys.executable, str(HERE / words[0]), *words[1:]], check=True)


RUN = {"start": run_start, "online": run_online}


def keep(out: Path, rows: list[Row]) -> list[Row]:
    """Write the rows over those of the same cases in the folder; returns all that are there now."""
    file = out / "results.json"
    stored = [Row(**row) for row in json.loads(file.read_text())] if file.exists() else []
    new = {(row.shape, row.case) for row in rows}
    together = [row for row in stored if (row.shape, row.case) not in new] + rows
    file.write_text(json.dumps([asdict(row) for row in together], indent=2) + "\n")
    (out / "table.md").write_text(table(together) + "\n")
    return together


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = (*PARTS, *RUN)
    real = [name for name in SHAPES if name != "tiny"]
    parser.add_argument("--out", type=Path, default=Path("bench-gpu"), help="folder of the results")
    parser.add_argument(
        "--shapes", nargs="+", choices=list(SHAPES), default=real, metavar="SHAPE", help=", ".join(SHAPES)
    )
    parser.add_argument("--parts", nargs="+", choices=parts, default=list(parts), metavar="PART", help=", ".join(parts))
    parser.add_argument(
        "--kv_formats", nargs="+", choices=KV_FORMATS, default=list(KV_FORMATS), help="KV formats of engines"
    )
    parser.add_argument("--peer", help="command line of a server for the online part, with {model} and {port}")
    parser.add_argument(
        "--peer_figures",
        type=read_figures,
        default={},
        help='JSON of other figures of it, {"SHAPE": {"decode step, batch 1": 4.98}}',
    )
    parser.add_argument("--models", type=Path, help="where model folders go; default: a temporary folder")
    parser.add_argument(
        "--tokenizer_dir", type=Path, default=TOKENIZER, help="any folder with a tokenizer, for all parts but start"
    )
    parser.add_argument("--device", default="auto")
    parser.add_argument("--engine_flags", default="", help="more flags of one_engine.py, as one text")
    parser.add_argument("--start_options", default="max_model_len=8192", help="name=value engine options of the starts")
    parser.add_argument("--online_flags", nargs=argparse.REMAINDER, default=[], help="the rest goes to online.py")
    return parser.parse_args()


def main() -> int:
    args = arguments()
    args.out.mkdir(parents=True, exist_ok=True)
    failed, rows = [], []
    with tempfile.TemporaryDirectory() as folder:
        args.models = args.models or Path(folder)
        for job in jobs(args):
            print(f"## {job.name}", flush=True)
            try:
                rows = keep(args.out, beside_peer(RUN.get(job.parts[0], run_engine)(job, args), args.peer_figures))
            except subprocess.CalledProcessError as error:
                failed.append(job.name)
                print(f"{job.name} failed: {error}", file=sys.stderr, flush=True)
    print(table(rows))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
