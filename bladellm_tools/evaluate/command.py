"""`blade_llm eval`: perplexity of a model on text files and, beside a baseline, KL divergence, agreement and size."""

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from bladellm_runtime.errors import CheckpointError, UserError
from bladellm_runtime.models.hub import resolve_model
from bladellm_tools.console import is_terminal
from bladellm_tools.evaluate.args import EvaluateArgs
from bladellm_tools.evaluate.evaluation import EvaluationJob, Watcher, evaluate
from bladellm_tools.evaluate.report import table, to_json, write_json
from bladellm_tools.evaluate.windows import read_text

STANDARD = "-"


def run(args: EvaluateArgs) -> int:
    """Evaluate and print; returns 0."""
    if args.json is not None:
        check_writable(args.json)
    job = make_job(args)
    with progress() as watcher:
        evaluation = evaluate(job, watcher)
    print(to_json(evaluation) if args.json == STANDARD else table(evaluation))
    if args.json not in (None, STANDARD):
        write_json(Path(str(args.json)), to_json(evaluation))
    return 0


def make_job(args: EvaluateArgs) -> EvaluationJob:
    """The flags as a job: files read, models found."""
    return EvaluationJob(
        texts=tuple(read_text(path) for path in args.data),
        model=resolve_model(args.model),
        baseline=None if args.baseline is None else find_baseline(args.baseline),
        tokenizer=None if args.tokenizer_dir is None else Path(args.tokenizer_dir),
        window=args.window,
        max_windows=args.max_windows,
        batch=args.batch_size,
        device=args.device,
        dtype=args.dtype,
    )


def find_baseline(name: str) -> Path:
    """The folder of --baseline, which its errors name."""
    try:
        return resolve_model(name)
    except CheckpointError as error:
        raise CheckpointError(str(error).replace("--model", "--baseline", 1)) from error


def check_writable(name: str) -> None:
    """Raise `UserError` before the work for a --json file that could not be written after it."""
    path = Path(name)
    if name == STANDARD:
        return
    if path.is_dir():
        raise UserError(f"--json {name} is a folder; give a file")
    if not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
        raise UserError(f"--json {name} cannot be written: {path.parent} is not a folder that can be written to")


@contextlib.contextmanager
def progress() -> Iterator[Watcher]:
    """On a terminal a bar with the time left, elsewhere nothing."""
    if not is_terminal(sys.stderr):
        yield Watcher()
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("windows"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("windows", total=None)

        class Bar(Watcher):
            def plan(self, windows: int) -> None:
                bar.update(task, total=windows)

            def windows(self, count: int) -> None:
                bar.advance(task, count)

        yield Bar()
