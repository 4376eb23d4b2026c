"""Levels of load: as flags give them, as a probe suggests them, and the next one of a search for capacity."""

import math

from bladellm_runtime.errors import ConfigError
from bladellm_tools.bench.args import LevelArgs
from bladellm_tools.bench.records import Load

AUTO = "auto"
MAX_QPS, MAX_STREAMS = 1e6, 10**6
CAPACITY_TOLERANCE = 1.1
COARSE_STEPS = 5
FINE_STEPS = (0.9, 1.0, 1.1, 1.25, 1.5, 2.0)
"""Multiples of the estimated saturation rate, round the knee and beyond it."""


def split_commas(values: list[str]) -> list[str]:
    """`["2,4", "8"]` as `["2", "4", "8"]`."""
    return [part.strip() for value in values for part in value.split(",") if part.strip()]


def is_auto(level: LevelArgs) -> bool:
    """Whether the rates are to be found by a probe. Raises `ConfigError` where `auto` stands beside numbers."""
    values = split_commas(level.qps)
    if AUTO not in values or level.arrival == "closed":
        return False
    if values != [AUTO]:
        raise ConfigError(f"--qps takes either auto or numbers, got {' '.join(values)}")
    return True


def loads_of(level: LevelArgs) -> list[Load]:
    """The levels of `--concurrency` in a closed loop, else of `--qps`, rising. Raises `ConfigError`."""
    if level.arrival == "closed":
        texts = split_commas(level.concurrency)
        loads = {Load(concurrency=int(_number(text, "concurrency", 1, MAX_STREAMS, whole=True))) for text in texts}
    else:
        loads = {Load(qps=_number(text, "qps", 0.001, MAX_QPS)) for text in split_commas(level.qps)}
    if not loads:
        flag = "concurrency" if level.arrival == "closed" else "qps"
        raise ConfigError(f"--{flag} is empty; give at least one level, such as 4")
    return sorted(loads, key=amount)


def amount(load: Load) -> float:
    """The number that orders levels."""
    return load.qps if load.qps is not None else float(load.concurrency or 0)


def _number(text: str, flag: str, low: float, high: float, whole: bool = False) -> float:
    try:
        value = float(text) if len(text) <= 32 else math.nan
    except ValueError:
        value = math.nan
    if not low <= value <= high or (whole and not value.is_integer()):
        kind = "whole numbers" if whole else "numbers"
        word = "" if whole else ", or auto"
        raise ConfigError(f"--{flag} takes {kind} between {low:g} and {high:g}{word}, got {text!r}")
    return value


def geometric(low: float, high: float, count: int) -> list[float]:
    """`count` rates from low to high in equal ratios."""
    ratio = (high / low) ** (1 / (count - 1))
    return [low * ratio**step for step in range(count)]


def auto_loads(saturation: list[float]) -> list[Load]:
    """Levels for servers that saturate at these rates: 0.1 to 0.8 of the lowest, then close ones round every knee."""
    coarse = geometric(0.1 * min(saturation), 0.8 * min(saturation), COARSE_STEPS)
    fine = [step * rate for rate in saturation for step in FINE_STEPS]
    return [Load(qps=rate) for rate in sorted({rounded(rate) for rate in coarse + fine})]


def rounded(rate: float) -> float:
    """Two significant digits, so that axes and tables read well; at least 0.001."""
    return max(float(f"{rate:.2g}"), 0.001)


def next_rate(passed: list[float], failed: list[float]) -> float | None:
    """The rate to try next for the highest that passes; None once it is known to 10 % or out of reach.

    A rate that passed above one that failed is luck: only those below the lowest failure count.
    """
    if not failed:
        return 2 * max(passed) if passed and max(passed) < MAX_QPS / 2 else None
    high = min(failed)
    low = max((rate for rate in passed if rate < high), default=None)
    if low is None:
        return high / 2 if high > 0.01 else None
    return math.sqrt(low * high) if high / low > CAPACITY_TOLERANCE else None
