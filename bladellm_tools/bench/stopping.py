"""When a sweep ends: the rules of `--stop_when`."""

from dataclasses import dataclass

from bladellm_runtime.errors import ConfigError
from bladellm_tools.bench.loads import split_commas
from bladellm_tools.bench.metrics import LevelSummary


@dataclass(frozen=True)
class StopRule:
    """One rule: over-saturation, or a share of failed requests above `error_rate`."""

    text: str
    error_rate: float | None = None

    def is_broken(self, run: LevelSummary) -> bool:
        """Whether a run is what the rule stops at."""
        if self.error_rate is None:
            return run.oversaturated
        return run.failed > self.error_rate * run.requests


def parse_rules(values: list[str]) -> list[StopRule]:
    """The rules of `--stop_when`. Raises `ConfigError`."""
    texts = split_commas(values)
    if texts == ["none"]:
        return []
    return [parse_rule(text) for text in texts]


def parse_rule(text: str) -> StopRule:
    """`oversaturated`, or `error_rate=SHARE`."""
    if text == "oversaturated":
        return StopRule("over-saturated")
    name, _, value = text.partition("=")
    try:
        share = float(value)
    except ValueError:
        share = -1.0
    if name != "error_rate" or not 0 <= share <= 1:
        raise ConfigError(f"--stop_when takes oversaturated, error_rate=SHARE (0 to 1) or none, got {text!r}")
    return StopRule(f"more than {share:.0%} of the requests failed", share)
