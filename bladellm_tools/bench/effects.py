"""Refuses flags that would change nothing beside the others: a benchmark must measure what it was told to."""

from collections.abc import Callable
from dataclasses import dataclass

from bladellm_runtime.errors import ConfigError
from bladellm_tools.bench.args import LevelArgs, WorkloadArgs


@dataclass(frozen=True)
class Condition:
    """Flags that act only where `holds`; `needs` says where that is."""

    flags: tuple[str, ...]
    holds: Callable[[WorkloadArgs, LevelArgs], bool]
    needs: str


CONDITIONS = (
    Condition(("burstiness",), lambda _, level: level.arrival == "gamma", "--arrival gamma"),
    Condition(("concurrency",), lambda _, level: level.arrival == "closed", "--arrival closed"),
    Condition(("qps",), lambda _, level: level.arrival != "closed", "an --arrival other than closed"),
    Condition(("prefix_len", "prefix_groups"), lambda work, _: work.dataset == "prefix", "--dataset prefix"),
    Condition(
        ("input_len", "len_dist"),
        lambda work, _: work.dataset in ("synthetic", "prefix"),
        "--dataset synthetic or prefix; other prompts have lengths of their own",
    ),
    Condition(("output_len",), lambda work, _: work.dataset != "trace", "a --dataset other than trace"),
    Condition(
        ("data",),
        lambda work, level: work.dataset in ("jsonl", "trace") or level.arrival == "trace",
        "--dataset jsonl, --dataset trace or --arrival trace",
    ),
)


def check_effects(workload: WorkloadArgs, level: LevelArgs) -> None:
    """Raises `ConfigError` for a flag that is set and has no effect."""
    usual = vars(WorkloadArgs()) | vars(type(level)())
    values = vars(workload) | vars(level)
    for condition in CONDITIONS:
        for name in condition.flags:
            if values[name] != usual[name] and not condition.holds(workload, level):
                raise ConfigError(f"--{name} has no effect here: it needs {condition.needs}")
