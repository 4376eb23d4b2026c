"""Service-level objectives: what `--slo` limits say, and which requests keep them."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bladellm_runtime.errors import ConfigError
from bladellm_tools.bench.columns import RequestColumns, request_metrics, token_gaps

METRICS = ("ttft", "tbt", "tpot", "e2e")
PERCENTILES = {"p50": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99, "p99.9": 0.999}
UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
PATTERN = re.compile(r"(?P<metric>[a-z0-9]+)_(?P<percentile>p[0-9.]+)\s*=\s*(?P<number>[0-9.eE+-]+)\s*(?P<unit>[a-z]+)")


@dataclass(frozen=True, slots=True)
class SloLimit:
    """One limit: `percentile` (as "p99") of `metric` must not exceed `seconds`."""

    metric: str
    percentile: str
    seconds: float

    @property
    def figure(self) -> str:
        """Name of the figure that is limited, as in `LevelFigures.values`."""
        return f"{self.metric}_{self.percentile}"

    @property
    def share(self) -> float:
        """Share of requests (of tokens for TBT) that must be within the limit."""
        return PERCENTILES[self.percentile]

    @property
    def text(self) -> str:
        """As people write it: `TTFT p99 ≤ 500 ms`."""
        scale, unit = next(
            ((scale, unit) for unit, scale in reversed(UNITS.items()) if self.seconds >= scale), (1e-6, "us")
        )
        return f"{self.metric.upper()} {self.percentile} ≤ {self.seconds / scale:g} {unit}"


def parse_slo(limits: Sequence[str]) -> list[SloLimit]:
    """The limits of `--slo`, each METRIC_pNN=TIME; several may share one string, parted by commas.

    Raises:
        ConfigError: a limit that cannot be read, or one figure limited twice.
    """
    found = [_parse_limit(part.strip()) for text in limits for part in text.split(",") if part.strip()]
    names = [limit.figure for limit in found]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"--slo limits {name} twice; give it once.")
    return found


def _parse_limit(text: str) -> SloLimit:
    match = PATTERN.fullmatch(text)
    metrics, percentiles, units = ", ".join(METRICS), ", ".join(PERCENTILES), ", ".join(UNITS)
    usage = f"write METRIC_pNN=TIME with a metric of {metrics}, a percentile of {percentiles} and a unit of {units}"
    if not match or match["metric"] not in METRICS or match["percentile"] not in PERCENTILES:
        raise ConfigError(f"--slo {text!r} is not a limit: {usage}, as ttft_p99=500ms.")
    try:
        seconds = float(match["number"]) * UNITS[match["unit"]]
    except (ValueError, KeyError):
        raise ConfigError(f"--slo {text!r} has no usable time: {usage}, as ttft_p99=500ms.") from None
    if not (math.isfinite(seconds) and seconds > 0):
        raise ConfigError(f"--slo {text!r} must limit to a time above 0, as ttft_p99=500ms.")
    return SloLimit(match["metric"], match["percentile"], seconds)


def kept(table: RequestColumns, limits: Sequence[SloLimit]) -> NDArray[np.bool_]:
    """Which requests keep every limit by themselves; a failed request keeps none.

    A metric with one value a request must be within the limit (an answer of one token has no TPOT and keeps it); of a
    request's own tokens, the share that the percentile names must have TBT within it.
    """
    metrics = request_metrics(table)
    within = table.ok.copy()
    for limit in limits:
        if limit.metric == "tbt":
            within &= _tokens_within(table, limit)
        else:
            values = metrics[limit.metric]
            within &= (values <= limit.seconds) | (np.isnan(values) & (limit.metric == "tpot"))
    return within


def _tokens_within(table: RequestColumns, limit: SloLimit) -> NDArray[np.bool_]:
    gaps = token_gaps(table)
    inside = gaps.tokens * (gaps.seconds <= limit.seconds * gaps.tokens)
    kept_tokens = np.bincount(gaps.row, weights=inside, minlength=len(table))
    all_tokens = np.bincount(gaps.row, weights=gaps.tokens, minlength=len(table))
    return np.asarray(kept_tokens >= limit.share * all_tokens * (1 - 1e-12))
