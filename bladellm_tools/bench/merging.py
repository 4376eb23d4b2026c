"""Several stored benchmarks as one, for `plot`."""

import dataclasses
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from bladellm_tools.bench.records import Benchmark


def merged(stored: Sequence[tuple[Path, Benchmark]]) -> Benchmark:
    """One benchmark with all runs. Endpoints of one name in several folders are told apart by their folders' names."""
    if len(stored) == 1:
        return stored[0][1]
    owners = Counter(name for _, benchmark in stored for name in benchmark.endpoints)
    result = Benchmark(" and ".join(dict.fromkeys(benchmark.title for _, benchmark in stored)), {}, {})
    for folder, benchmark in stored:
        label = folder.resolve().name
        for run in benchmark.runs:
            name = run.endpoint if owners[run.endpoint] == 1 else f"{run.endpoint}@{label}"
            result.runs.append(dataclasses.replace(run, endpoint=name))
        result.flags |= {f"{label}: {name}": value for name, value in benchmark.flags.items()}
        result.environment |= {f"{label}: {name}": value for name, value in benchmark.environment.items()}
        result.notes += [f"{label}: {note}" for note in benchmark.notes]
    return result
