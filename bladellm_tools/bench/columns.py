"""Request records as arrays, one row a request, and the metrics of each request."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from bladellm_tools.bench.records import Outcome, RequestRecord
from bladellm_tools.bench.stats import Floats, Ints, Samples

PER_REQUEST = ("ttfb", "ttft", "ttft_service", "tpot", "e2e", "e2e_service", "max_stall", "tokens_per_chunk")
"""Metrics with one value a request."""
LARGEST = 2.0**53
TIMES = ("ttft", "ttft_service", "ttfb", "tbt", "chunk_gap", "tpot", "e2e", "e2e_service", "max_stall")
"""Metrics in seconds: what a level's mean, deviation and percentiles are made of."""


@dataclass(frozen=True)
class RequestColumns:
    """Records in order of their intended times. Times are seconds of the level's clock; NaN is "did not happen".

    `left` is when the request stopped occupying the server, as far as the client knows. The `chunk_*` arrays hold one
    value a content chunk of any request; `chunk_row` is the row it belongs to, ascending.
    """

    index: Ints
    intended: Floats
    sent: Floats
    first_byte: Floats
    first: Floats
    last: Floats
    ended: Floats
    left: Floats
    ok: NDArray[np.bool_]
    tokens: Ints
    prompt: Ints
    cached: Ints
    asked: Ints
    chunk_row: Ints
    chunk_time: Floats
    chunk_tokens: Ints

    def __len__(self) -> int:
        return len(self.intended)


def columns(records: list[RequestRecord]) -> RequestColumns:
    """The arrays of a run's records."""
    records = sorted(records, key=lambda record: record.intended)
    chunks = np.array([len(record.times) for record in records], dtype=np.int64)
    chunk_time = np.fromiter(chain.from_iterable(record.times for record in records), np.float64, chunks.sum())
    chunk_tokens = _whole(chain.from_iterable(record.tokens for record in records))
    return RequestColumns(
        index=_whole(record.index for record in records),
        intended=_times(record.intended for record in records),
        sent=_times(record.sent for record in records),
        first_byte=_times(record.first_chunk for record in records),
        first=_times(record.times[0] if record.times else None for record in records),
        last=_times(record.times[-1] if record.times else None for record in records),
        ended=_times(record.ended for record in records),
        left=_times(_left(record) for record in records),
        ok=np.array([record.outcome is Outcome.OK for record in records], dtype=np.bool_),
        tokens=_whole(record.completion_tokens for record in records),
        prompt=_whole(record.prompt_tokens for record in records),
        cached=_whole(record.cached_tokens for record in records),
        asked=_whole(record.asked_tokens for record in records),
        chunk_row=np.repeat(np.arange(len(records)), chunks),
        chunk_time=chunk_time,
        chunk_tokens=chunk_tokens,
    )


def _times(values: Iterable[float | None]) -> Floats:
    """Optional times as floats; None is NaN."""
    return np.array([math.nan if value is None else value for value in values], dtype=np.float64)


def _whole(values: Iterable[int]) -> Ints:
    """Counts; nonsense of a server that no integer holds becomes the largest whole number that a float holds."""
    return np.minimum(np.fromiter(values, np.float64), LARGEST).astype(np.int64)


def _left(record: RequestRecord) -> float:
    """End of the body, or the last sign of life of a request that has none."""
    if record.ended is not None:
        return record.ended
    signs = (record.intended, record.sent, record.headers, record.first_chunk, *record.times[-1:])
    return max(sign for sign in signs if sign is not None)


@dataclass(frozen=True)
class Gaps:
    """Times between neighbouring chunks of a request, the tokens that came with the later one, and its row."""

    row: Ints
    seconds: Floats
    tokens: Ints


def chunk_gaps(table: RequestColumns) -> Gaps:
    """Every gap between two content chunks of a request that was answered in full."""
    return _gaps(table, table.ok[table.chunk_row])


def token_gaps(table: RequestColumns) -> Gaps:
    """As `chunk_gaps`, but a chunk without a token is no event: its wait belongs to the next token."""
    starts = np.ones(len(table.chunk_row), dtype=np.bool_)
    starts[1:] = table.chunk_row[1:] != table.chunk_row[:-1]
    return _gaps(table, table.ok[table.chunk_row] & (starts | (table.chunk_tokens > 0)))


def _gaps(table: RequestColumns, keep: NDArray[np.bool_]) -> Gaps:
    row, time, tokens = table.chunk_row[keep], table.chunk_time[keep], table.chunk_tokens[keep]
    follows = row[1:] == row[:-1]
    return Gaps(row[1:][follows], np.diff(time)[follows], tokens[1:][follows])


def request_metrics(table: RequestColumns) -> dict[str, Floats]:
    """The metrics of `PER_REQUEST`, one value a row; NaN where one does not apply, as for every failed request."""
    answered = np.where(table.ok, 0.0, math.nan)
    after_first = np.where(table.tokens > 1, table.tokens - 1, math.nan)
    return {
        "ttfb": table.first_byte - table.intended + answered,
        "ttft": table.first - table.intended + answered,
        "ttft_service": table.first - table.sent + answered,
        "tpot": (table.last - table.first) / after_first + answered,
        "e2e": table.ended - table.intended + answered,
        "e2e_service": table.ended - table.sent + answered,
        "max_stall": _longest(chunk_gaps(table), len(table)),
        "tokens_per_chunk": _tokens_per_chunk(table) + answered,
    }


def _longest(gaps: Gaps, rows: int) -> Floats:
    """The longest gap of each row; NaN for rows without one."""
    longest = np.full(rows, -np.inf)
    np.maximum.at(longest, gaps.row, gaps.seconds)
    return np.where(np.isinf(longest), math.nan, longest)


def _tokens_per_chunk(table: RequestColumns) -> Floats:
    chunks = np.bincount(table.chunk_row, minlength=len(table)).astype(np.float64)
    tokens = np.bincount(table.chunk_row, weights=table.chunk_tokens, minlength=len(table))
    return tokens / np.where(chunks > 0, chunks, math.nan)


def samples(table: RequestColumns, counted: NDArray[np.bool_]) -> dict[str, Samples]:
    """The values behind each metric of `TIMES`, of the rows in `counted` (a mask) only.

    TBT is a gap divided by the tokens that ended it, counted once a token; the others count once a request or gap.
    """
    number = np.cumsum(counted) - 1
    rows = int(np.count_nonzero(counted))
    found: dict[str, Samples] = {}
    for name, values in request_metrics(table).items():
        if name in TIMES:
            use = counted & ~np.isnan(values)
            found[name] = Samples.of(values[use], np.ones(int(use.sum())), number[use], rows)
    gaps = _of_rows(chunk_gaps(table), counted)
    found["chunk_gap"] = Samples.of(gaps.seconds, np.ones(len(gaps.seconds)), number[gaps.row], rows)
    if (table.chunk_tokens == 1).all():
        found["tbt"] = found["chunk_gap"]
    else:
        gaps = _of_rows(token_gaps(table), counted)
        weights = gaps.tokens.astype(np.float64)
        found["tbt"] = Samples.of(gaps.seconds / weights, weights, number[gaps.row], rows)
    return found


def _of_rows(gaps: Gaps, counted: NDArray[np.bool_]) -> Gaps:
    use = counted[gaps.row]
    return Gaps(gaps.row[use], gaps.seconds[use], gaps.tokens[use])
