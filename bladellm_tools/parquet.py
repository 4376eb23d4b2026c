"""Rows of a parquet file, by the `datasets` library."""

import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROWS = 1024
"""Read at a time. The library's default is the size of the first group of rows, which it refuses where that is none."""


def stream_rows(path: Path) -> Iterable[dict[str, Any]]:
    """The rows by name of column, read while they are asked for. Raises errors of many unrelated types, of several
    libraries, for a file that is damaged."""
    from datasets import load_dataset

    logging.getLogger("datasets").setLevel(logging.CRITICAL)  # it tells of what it raises
    rows: Iterable[dict[str, Any]] = load_dataset(
        "parquet", data_files=str(path), split="train", streaming=True, batch_size=ROWS
    )
    return rows
