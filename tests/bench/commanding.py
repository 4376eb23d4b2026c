"""`blade_llm_bench` run inside the test, with its results read back."""

import contextlib
import io
from dataclasses import dataclass
from pathlib import Path

from bladellm_tools import cli
from bladellm_tools.bench.records import Benchmark
from bladellm_tools.bench.storage import load

SHORT = "--input_len 8 --output_len 8 --warmup 0.1 --drain_limit 5 --min_requests 10"


@dataclass(frozen=True)
class Outcome:
    """What a command did: exit code, both outputs, the folder of its results."""

    code: int
    out: str
    err: str
    folder: Path

    @property
    def benchmark(self) -> Benchmark:
        return load(self.folder)

    @property
    def html(self) -> str:
        return (self.folder / "report.html").read_text()


def bench(command: str, *arguments: str, folder: Path) -> Outcome:
    """Run `blade_llm_bench COMMAND` with the results in `folder`."""
    words = [command, *arguments, "--out", str(folder)]
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        code = cli.guarded(lambda: cli.dispatch("blade_llm_bench", words, "bench"), debug=False)
    return Outcome(code, out.getvalue(), err.getvalue(), folder)


def short(*more: str, quiet: bool = True) -> list[str]:
    """Flags of a quick level."""
    return [*SHORT.split(), *(["--quiet"] if quiet else []), *more]
