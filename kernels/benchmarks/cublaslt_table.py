"""What `cublaslt.py` makes of its figures: the faster one of each layer and number of rows, lines, and a table."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from bladellm_kernels.linear_schedules import (
    CublasLtSchedule,
    Entry,
    LinearSchedule,
    ScheduleTable,
    default_schedule,
)
from linear_step import Shape

LEAST_GAIN = 0.01
"""Share of torch's time that another schedule must save: less may be noise."""
RULE_ROWS = (2, 8, 16)
"""The most rows of each schedule of `default_schedule`."""
REACH = 0.75
"""Of the rows an algorithm was measured with, from how many on it is taken: below, tiles of many rows are wasted."""


@dataclass(frozen=True, slots=True)
class Choice:
    """Microseconds of a layer with so many rows: torch_us, first_us of the heuristic's first algorithm, others by
    schedule; names: of algorithms; tried: how many; refused: how many for what reason."""

    shape: Shape
    rows: int
    torch_us: float
    first_us: float
    others: Mapping[LinearSchedule, float]
    names: Mapping[LinearSchedule, str]
    tried: int = 0
    refused: Mapping[str, int] = field(default_factory=dict)

    @property
    def best(self) -> LinearSchedule | None:
        """The fastest schedule, None where torch is about as fast."""
        best = min(self.others, key=lambda schedule: self.others[schedule], default=None)
        return best if best is not None and self.others[best] <= (1 - LEAST_GAIN) * self.torch_us else None

    @property
    def best_us(self) -> float:
        return self.torch_us if self.best is None else self.others[self.best]

    @property
    def line(self) -> str:
        name = "torch" if self.best is None else self.names.get(self.best, str(self.best))
        times = f"{self.torch_us:.2f} | {self.first_us:.2f} | {self.best_us:.2f}"
        tried = str(self.tried)
        tried += "".join(f"; {count} {reason}" for reason, count in self.refused.items())
        return f"| {self.rows} | {self.shape.name} | {times} | {gain(self.torch_us, self.best_us)} | {tried} | {name} |"


def gain(usual: float, best: float) -> str:
    """Percent."""
    return f"{100 * (1 - best / usual):.1f}"


def merged(base: ScheduleTable, choices: Sequence[Choice]) -> ScheduleTable:
    """The base with what was chosen for the rows measured; what it says of other numbers of rows stays.

    A shape that the base does not have keeps the rule's schedules below the fewest rows measured. Where more rows than
    `REACH` leaves lie between an algorithm and the entry before, the lower ones are cuBLAS's.
    """
    entries = dict(base.entries)
    measured: dict[tuple[int, int, bool], dict[int, LinearSchedule | None]] = {}
    for choice in choices:
        measured.setdefault((choice.shape.rows, choice.shape.inputs, False), {})[choice.rows] = choice.best
    for key, chosen in measured.items():
        known = entries.get(key) or [entry for entry in rule_entries() if entry.rows < min(chosen)]
        entries[key] = reached({entry.rows: entry.schedule for entry in known} | chosen)
    return ScheduleTable(entries, base.norm_rows)


def reached(schedules: Mapping[int, LinearSchedule | None]) -> list[Entry]:
    """An entry for each number of rows, and cuBLAS's where algorithms do not reach down to the entry before."""
    algorithms = [rows for rows, schedule in schedules.items() if isinstance(schedule, CublasLtSchedule)]
    filled = {below_reach(rows) for rows in algorithms}
    entries: list[Entry] = []
    for rows in sorted(rows for rows, schedule in schedules.items() if schedule is not None or rows not in filled):
        lower, before = below_reach(rows), entries[-1].rows if entries else 0
        if rows in algorithms and lower > before:
            entries.append(Entry(lower, None))
        entries.append(Entry(rows, schedules[rows]))
    return entries


def below_reach(rows: int) -> int:
    """The most rows that an algorithm measured with `rows` is not taken for."""
    return math.ceil(REACH * rows) - 1


def rule_entries() -> list[Entry]:
    """What `default_schedule` says of few rows."""
    return [Entry(rows, default_schedule(rows)) for rows in RULE_ROWS]


def step_lines(choices: Sequence[Choice], layers: int) -> str:
    """All linear layers of a model by the number of rows, head among them where it was measured."""
    lines = ["| rows | layers | torch ms | best ms | gain % |\n" + "| --- " * 5 + "|"]
    for rows in sorted({choice.rows for choice in choices}):
        of_rows = [(choice, 1 if choice.shape.name == "head" else layers) for choice in choices if choice.rows == rows]
        usual = sum(count * choice.torch_us for choice, count in of_rows) / 1e3
        best = sum(count * choice.best_us for choice, count in of_rows) / 1e3
        names = " ".join(choice.shape.name for choice, _ in of_rows)
        lines.append(f"| {rows} | {names} | {usual:.3f} | {best:.3f} | {gain(usual, best)} |")
    return "\n".join(lines)
