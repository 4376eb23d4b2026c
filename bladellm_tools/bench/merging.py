"""Several stored benchmarks as one, for `plot`."""

import dataclasses
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from bladellm_runtime.errors import ConfigError
from bladellm_tools.bench.records import Benchmark


def merged(stored: Sequence[tuple[Path, Benchmark]]) -> Benchmark:
    """One benchmark with all runs. Endpoints of one name in several folders are told apart by their folders' names."""
    if len(stored) == 1:
        return stored[0][1]
    owners = Counter(name for _, benchmark in stored for name in benchmark.endpoints)
    labels = folder_labels([folder.resolve() for folder, _ in stored])
    result = Benchmark(" and ".join(dict.fromkeys(benchmark.title for _, benchmark in stored)), {}, {})
    for label, (_, benchmark) in zip(labels, stored, strict=True):
        for run in benchmark.runs:
            name = run.endpoint if owners[run.endpoint] == 1 else f"{run.endpoint}@{label}"
            result.runs.append(dataclasses.replace(run, endpoint=name))
        result.flags |= {f"{label}: {name}": value for name, value in benchmark.flags.items()}
        result.environment |= {f"{label}: {name}": value for name, value in benchmark.environment.items()}
        result.notes += [f"{label}: {note}" for note in benchmark.notes]
    return result


def folder_labels(folders: Sequence[Path]) -> list[str]:
    """Names that tell folders apart: the last parts of their paths, as many as it takes.

    Raises `ConfigError` for a folder that is there twice: its runs would count twice, and every interval be too narrow.
    """
    for folder in folders:
        if folders.count(folder) > 1:
            raise ConfigError(f"--results names {folder} twice; give every folder once")
    parts = next(
        count
        for count in range(1, max(len(folder.parts) for folder in folders) + 1)
        if len({folder.parts[-count:] for folder in folders}) == len(folders)
    )
    return ["/".join(folder.parts[-parts:]) for folder in folders]
