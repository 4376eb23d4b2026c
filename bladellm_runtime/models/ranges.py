"""Where the tensors of a safetensors file lie: its header, read without mapping or reading the tensors.

The format: 8 bytes with the header's length (little endian), the header (JSON, for each key its dtype, shape and
data_offsets), then the data those offsets count in. Source: https://github.com/huggingface/safetensors, "Format".
"""

import json
import struct
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from bladellm_runtime.errors import CheckpointError

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


@dataclass(frozen=True, slots=True)
class FileRange:
    """The `size` bytes from `start` on of a file, which are a contiguous tensor of that shape and type."""

    key: str
    file: Path
    start: int
    size: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    def rows(self, start: int, count: int) -> "FileRange":
        """`count` rows of the tensor from row `start` on."""
        row = self.size // self.shape[0]
        return replace(self, start=self.start + start * row, size=count * row, shape=(count, *self.shape[1:]))


def read_ranges(path: Path) -> dict[str, FileRange]:
    """The ranges of a file that the safetensors package has opened, and so found whole. Raises `CheckpointError`."""
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(length))
    except (OSError, ValueError, struct.error) as error:
        raise CheckpointError(f"{path} is not a whole safetensors file ({error}); download it again") from error
    data = 8 + length
    ranges = {}
    for key, entry in header.items():
        if key != "__metadata__" and entry["dtype"] in DTYPES:
            first, last = entry["data_offsets"]
            shape, dtype = tuple(entry["shape"]), DTYPES[entry["dtype"]]
            ranges[key] = FileRange(key, path, data + first, last - first, shape, dtype)
    return ranges
