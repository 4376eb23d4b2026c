"""Accuracy of every quantization method on one model: the table of the documentation.

    python recipes/quantize/accuracy.py MODEL --data FILE ... --output FOLDER [--calib_data_file FILE] [--seed 0 1 2]

Each row is what a user gets: `blade_llm quantize` with these flags, then `blade_llm eval` against the float model on
the same windows. Calibrated methods run once a seed. W8A8 is also measured on the variant of the model that
make_outliers.py makes. FOLDER keeps results.json, from which an interrupted run goes on, table.md and log.txt.
"""

import argparse
import contextlib
import itertools
import shutil
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

import make_outliers
import msgspec
from script import INTERRUPTED, exit_code

from bladellm_runtime.errors import ConfigError
from bladellm_tools.evaluate.evaluation import EvaluationJob, disk_bytes, evaluate
from bladellm_tools.evaluate.summary import Summary
from bladellm_tools.evaluate.windows import EvaluationText, read_text
from bladellm_tools.quantize import command
from bladellm_tools.quantize.args import QuantizeArgs

FOUR_BIT = ("minmax", "gptq", "awq", "smoothquant+")
WITHOUT_DATA = "minmax"
BOTH = {"quant_mode": "act_and_weight_quant"}


@dataclass(frozen=True)
class Method:
    """A row of the table: how it is called, and the flags of `blade_llm quantize` that make it."""

    scheme: str
    algorithm: str
    flags: dict[str, Any] = field(default_factory=dict)
    outliers: bool = False

    @property
    def name(self) -> str:
        return f"{self.scheme} {self.algorithm}{' on outliers' if self.outliers else ''}"


@dataclass(frozen=True)
class Row:
    """One quantized model, measured. `seed` is None where nothing was calibrated; `size` is a share of the float's."""

    method: str
    seed: int | None
    seconds: float
    size: float
    summary: Summary


@dataclass
class Results:
    """What results.json holds; rows of other settings do not belong in one table."""

    settings: dict[str, Any]
    rows: list[Row] = field(default_factory=list)


def arguments(given: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="folder of the float model")
    parser.add_argument("--data", nargs="+", required=True, help="texts to evaluate on")
    parser.add_argument("--output", type=Path, required=True, help="folder for the results")
    parser.add_argument("--calib_data_file", help="calibration text; default: the one built in")
    parser.add_argument("--seed", type=int, nargs="+", default=[0, 1, 2], help="seeds of the calibration samples")
    parser.add_argument("--max_samples", type=int, default=32, help="calibration windows")
    parser.add_argument("--max_length", type=int, default=512, help="tokens of a calibration window")
    parser.add_argument("--group_size", type=int, nargs="+", default=[128, 64], help="of the 4-bit schemes")
    parser.add_argument("--asym", action="store_true", help="4 bits with zero points")
    parser.add_argument("--only", nargs="+", help="run these rows alone, by name; --list shows the names")
    parser.add_argument("--list", action="store_true", help="show the names of the rows and exit")
    parser.add_argument("--window", type=int, default=2048, help="tokens of an evaluation window")
    parser.add_argument("--max_windows", type=int, default=10, help="evaluation windows of each text")
    parser.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda"], help="where to run")
    parser.add_argument("--dtype", default="auto", choices=["auto", "float32", "bfloat16"], help="of the activations")
    parser.add_argument("--channels", type=int, default=8, help="outlier channels, for make_outliers.py")
    parser.add_argument("--factor", type=int, default=64, help="of the outliers, for make_outliers.py")
    return parser.parse_args(given)


def methods(args: argparse.Namespace) -> list[Method]:
    """Every row, those of `--only` where it is given."""
    rows = [
        Method(f"W4A16 g{size}", algorithm, {"bit": "4", "group_size": size, "sym": not args.asym})
        for size in args.group_size
        for algorithm in FOUR_BIT
    ]
    rows += [Method("W8A16", WITHOUT_DATA), Method("W8A8", WITHOUT_DATA, BOTH)]
    rows += [Method("W8A8", name, BOTH, outliers=True) for name in (WITHOUT_DATA, "smoothquant", "smoothquant_gptq")]
    rows += [Method("fp8 W8A16", WITHOUT_DATA, {"quant_dtype": "fp8"})]
    rows += [Method("fp8 W8A8", WITHOUT_DATA, {"quant_dtype": "fp8", **BOTH})]
    unknown = set(args.only or ()) - {row.name for row in rows}
    if unknown:
        raise ConfigError(f"--only {sorted(unknown)[0]!r} is no row; --list shows the names")
    return [row for row in rows if not args.only or row.name in args.only]


def measure(args: argparse.Namespace, method: Method, seed: int | None, texts: tuple[EvaluationText, ...]) -> Row:
    """Quantize into a folder that is removed again, and evaluate. The float model is the baseline, whatever was
    quantized: the variant with outliers computes the same."""
    source = outlier_variant(args) if method.outliers else args.model
    target = args.output / "quantized"
    shutil.rmtree(target, ignore_errors=True)
    settings = {name: getattr(args, name) for name in ("max_samples", "max_length", "device", "dtype")}
    if seed is not None:
        settings |= {"seed": seed, "calib_data_file": args.calib_data_file}
    started = time.monotonic()
    quantize(
        QuantizeArgs(
            model=str(source), output_dir=str(target), quant_algo=method.algorithm, **method.flags, **settings
        ),
        args.output / "log.txt",
    )
    seconds = time.monotonic() - started
    evaluation = evaluate(
        EvaluationJob(
            model=target,
            baseline=args.model,
            texts=texts,
            window=args.window,
            max_windows=args.max_windows,
            device=args.device,
            dtype=args.dtype,
        )
    )
    size = disk_bytes(target) / disk_bytes(args.model)
    shutil.rmtree(target)
    return Row(method.name, seed, seconds, size, evaluation.overall)


def quantize(flags: QuantizeArgs, log: Path) -> None:
    """The command itself, what it prints kept in a file."""
    with log.open("a") as file, contextlib.redirect_stdout(file), contextlib.redirect_stderr(file):
        code = command.run(flags)
    if code == INTERRUPTED:
        raise KeyboardInterrupt


def outlier_variant(args: argparse.Namespace) -> Path:
    """The model with outliers, made when first needed."""
    folder: Path = args.output / "outliers"
    if not (folder / "config.json").exists():
        shutil.rmtree(folder, ignore_errors=True)
        flags = ["--channels", str(args.channels), "--factor", str(args.factor)]
        make_outliers.run([str(args.model), str(folder), *flags])
    return folder


def settings_of(args: argparse.Namespace) -> dict[str, Any]:
    """Flags that all rows of a table must share."""
    names = ("data", "calib_data_file", "max_samples", "max_length", "asym", "window", "max_windows", "dtype")
    values = {name: getattr(args, name) for name in (*names, "channels", "factor")}
    return {"model": str(args.model), **values}


def read_results(args: argparse.Namespace) -> Results:
    """The results so far. Raises `ConfigError` where they were made with other flags."""
    file, settings = args.output / "results.json", settings_of(args)
    if not file.exists():
        args.output.mkdir(parents=True, exist_ok=True)
        return Results(settings)
    results = msgspec.json.decode(file.read_bytes(), type=Results)
    if results.settings != settings:
        changed = ", ".join(f"--{name}" for name in settings if results.settings.get(name) != settings[name])
        raise ConfigError(f"{file} was made with other values of {changed}; give another --output")
    return results


def write_results(results: Results, output: Path) -> None:
    """results.json, whole or as it was, and table.md."""
    partial = output / "results.json.partial"
    partial.write_bytes(msgspec.json.format(msgspec.json.encode(results)))
    partial.replace(output / "results.json")
    (output / "table.md").write_text(markdown(results.rows))


def markdown(rows: list[Row]) -> str:
    """One line a method, means over its seeds; the least and the largest perplexity beside."""
    header = ("method", "seeds", "perplexity", "least – most", "against float", "KL", "top-1", "size", "seconds")
    lines = ["| " + " | ".join(header) + " |", "| --- |" + " ---: |" * (len(header) - 1)]
    if rows and rows[0].summary.baseline is not None:
        lines.append(f"| float | | {rows[0].summary.baseline.perplexity.value:.3f} |" + " |" * (len(header) - 3))
    for name, group in itertools.groupby(rows, key=lambda row: row.method):
        lines.append(_line(name, list(group)))
    return "\n".join(lines) + "\n"


def _line(name: str, rows: list[Row]) -> str:
    perplexities = [row.summary.perplexity.value for row in rows]
    pairs = [row.summary.baseline for row in rows if row.summary.baseline is not None]
    spread = f"{min(perplexities):.3f} – {max(perplexities):.3f}" if len(rows) > 1 else ""
    cells = (
        name,
        " ".join(str(row.seed) for row in rows if row.seed is not None),
        f"{fmean(perplexities):.3f}",
        spread,
        f"{(fmean(pair.ratio.value for pair in pairs) - 1) * 100:+.2f} %",
        f"{fmean(pair.kl_mean.value for pair in pairs):.5f}",
        f"{fmean(pair.agreement.value for pair in pairs) * 100:.2f} %",
        f"{fmean(row.size for row in rows):.3f}",
        f"{fmean(row.seconds for row in rows):.1f}",
    )
    return "| " + " | ".join(cells) + " |"


def verdicts(rows: list[Row]) -> Iterator[str]:
    """What should hold and whether it does, each seed by itself."""
    for row in rows:
        scheme, _, algorithm = row.method.rpartition(" ")
        plain = next((other for other in rows if other.method == f"{scheme} {WITHOUT_DATA}"), None)
        pair = row.summary.baseline
        if pair is None:
            continue
        if scheme.startswith("W4") and algorithm != WITHOUT_DATA and plain is not None:
            holds = pair.perplexity.value <= row.summary.perplexity.value < plain.summary.perplexity.value
            yield f"{_said(holds)}: float ≤ {row.method} (seed {row.seed}) < {WITHOUT_DATA}"
        if row.method == f"W8A8 {WITHOUT_DATA} on outliers":
            yield f"{_said(pair.ratio.value > 1.05)}: {row.method} loses more than 5 %"
        elif row.method.startswith("W8A8 smoothquant"):
            yield f"{_said(pair.ratio.value <= 1.005)}: {row.method} (seed {row.seed}) within 0.5 % of float"


def _said(holds: bool) -> str:
    return "holds" if holds else "DOES NOT HOLD"


def run(given: list[str]) -> None:
    args = arguments(given)
    chosen = methods(args)
    if args.list:
        print("\n".join(method.name for method in chosen))
        return
    texts = tuple(read_text(path) for path in args.data)
    results = read_results(args)
    order = [method.name for method in methods(argparse.Namespace(**{**vars(args), "only": None}))]
    for method, seed in missing(chosen, args.seed, results.rows):
        row = measure(args, method, seed, texts)
        results.rows.append(row)
        results.rows.sort(key=lambda row: (order.index(row.method), row.seed or 0))
        write_results(results, args.output)
        calibrated = "" if seed is None else f", seed {seed}"
        print(
            f"{row.method}{calibrated}: perplexity {row.summary.perplexity.value:.3f}, {row.seconds:.1f} s", flush=True
        )
    print("\n" + markdown(results.rows) + "\n" + "\n".join(verdicts(results.rows)))


def missing(chosen: list[Method], seeds: list[int], rows: list[Row]) -> list[tuple[Method, int | None]]:
    """What is still to be measured; a method without calibration has one row, whatever the seeds."""
    wanted = [(one, seed) for one in chosen for seed in ([None] if one.algorithm == WITHOUT_DATA else seeds)]
    done = {(row.method, row.seed) for row in rows}
    return [(method, seed) for method, seed in wanted if (method.name, seed) not in done]


def main() -> int:
    again = "interrupted; the same command goes on from the rows that are done"
    return exit_code(lambda: run(sys.argv[1:]), again)


if __name__ == "__main__":
    sys.exit(main())
