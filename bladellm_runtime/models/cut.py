"""`Cut`: the part of one dimension of a stored tensor that a rank holds, with zeros where the rank is padded."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Run:
    """`count` neighbours of a dimension from `start` on, or `count` zeros where there is no start."""

    start: int | None
    count: int


@dataclass(frozen=True, slots=True)
class Cut:
    """What a rank holds of a dimension, run after run."""

    runs: tuple[Run, ...]

    @property
    def size(self) -> int:
        return sum(run.count for run in self.runs)

    @property
    def stored(self) -> int:
        """Places that are not padding."""
        return sum(run.count for run in self.runs if run.start is not None)

    def of_share(self) -> "Cut":
        """The same cut of a tensor that has nothing but these runs, one after the other."""
        runs, start = [], 0
        for run in self.runs:
            runs.append(run if run.start is None else Run(start, run.count))
            start += 0 if run.start is None else run.count
        return Cut(tuple(runs))

    def copy(self, source: torch.Tensor, target: torch.Tensor, dim: int) -> None:
        """Copy the runs of source to target, whose size along `dim` is that of the cut; cast on the way."""
        for run, part in zip(self.runs, target.split([run.count for run in self.runs], dim), strict=True):
            if run.start is None:
                part.zero_()
            else:
                part.copy_(source.narrow(dim, run.start, run.count))

    def index(self, device: torch.device) -> torch.Tensor:
        """int64 [size]: for each place that of the whole, -1 for a zero."""
        parts = [
            torch.full((run.count,), -1) if run.start is None else torch.arange(run.start, run.start + run.count)
            for run in self.runs
        ]
        return torch.cat(parts).to(device)


def make_cut(*parts: range | int) -> Cut:
    """A cut of ranges and, where a number is given, so many zeros. Neighbours become one run, empty parts none."""
    runs: list[Run] = []
    for part in parts:
        run = Run(None, part) if isinstance(part, int) else Run(part.start, len(part))
        last = runs[-1] if runs else None
        if last is not None and _continues(last, run):
            runs[-1] = Run(last.start, last.count + run.count)
        elif run.count:
            runs.append(run)
    return Cut(tuple(runs))


def _continues(last: Run, run: Run) -> bool:
    if last.start is None or run.start is None:
        return last.start is run.start
    return last.start + last.count == run.start
