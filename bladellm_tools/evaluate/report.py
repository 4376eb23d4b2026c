"""An evaluation as a table for people and as JSON for programs."""

from pathlib import Path
from typing import Any

import msgspec

from bladellm_runtime.errors import UserError
from bladellm_tools.bench.tables import aligned
from bladellm_tools.console import gib
from bladellm_tools.evaluate.evaluation import Evaluation, ModelSize
from bladellm_tools.evaluate.summary import Estimate, Summary

HEADER = ("text", "windows", "perplexity")
PAIR_HEADER = ("baseline", "ratio", "KL mean", "KL p99", "top-1")


def table(evaluation: Evaluation) -> str:
    """One row a text and one for all, then the sizes; intervals in brackets."""
    rows = [[Path(text.name).name, *_cells(text.summary)] for text in evaluation.texts]
    if len(rows) > 1:
        rows.append(["all", *_cells(evaluation.overall)])
    header = HEADER if evaluation.baseline is None else HEADER + PAIR_HEADER
    about = f"Windows of {evaluation.window:,} tokens, {evaluation.dtype} on {evaluation.device}; [95 % interval]"
    kl = "" if evaluation.baseline is None else "; KL(baseline ‖ model) in nats a token"
    return "\n\n".join((about + kl, aligned(header, rows), _sizes(evaluation)))


def to_json(evaluation: Evaluation) -> str:
    """The fields of `Evaluation`, indented."""
    return msgspec.json.format(msgspec.json.encode(evaluation), indent=2).decode() + "\n"


def as_dict(evaluation: Evaluation) -> dict[str, Any]:
    """The same as plain values, to put into another report."""
    fields: dict[str, Any] = msgspec.to_builtins(evaluation)
    return fields


def write_json(path: Path, text: str) -> None:
    """Write a whole file or none. Raises `UserError` naming it."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise UserError(f"{path} cannot be written: {error.strerror}") from error


def _cells(summary: Summary) -> list[str]:
    cells = [f"{summary.windows:,}", _estimate(summary.perplexity, 3)]
    pair = summary.baseline
    if pair is None:
        return cells
    return [
        *cells,
        _estimate(pair.perplexity, 3),
        _estimate(pair.ratio, 4),
        _estimate(pair.kl_mean, 5),
        f"{pair.kl_p99:.4f}",
        _share(pair.agreement),
    ]


def _estimate(estimate: Estimate, digits: int) -> str:
    text = f"{estimate.value:,.{digits}f}"
    if estimate.low is None or estimate.high is None:
        return text
    return f"{text} [{estimate.low:,.{digits}f}, {estimate.high:,.{digits}f}]"


def _share(estimate: Estimate) -> str:
    text = f"{estimate.value * 100:.2f}%"
    if estimate.low is None or estimate.high is None:
        return text
    return f"{text} [{max(estimate.low, 0) * 100:.2f}, {min(estimate.high, 1) * 100:.2f}]"


def _sizes(evaluation: Evaluation) -> str:
    rows = [["model", *_bytes(evaluation.size)]]
    if evaluation.baseline_size is not None:
        size, other = evaluation.size, evaluation.baseline_size
        shares = (size.disk_bytes / other.disk_bytes, size.memory_bytes / other.memory_bytes)
        rows += [["baseline", *_bytes(other)], ["ratio", *(f"{share:.3f}" for share in shares)]]
    return aligned(("size", "on disk", "in memory"), rows)


def _bytes(size: ModelSize) -> list[str]:
    return [gib(size.disk_bytes), gib(size.memory_bytes)]
