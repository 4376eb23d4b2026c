"""A checkpoint whose tensors are streamed to a GPU while parameters are still being made."""

from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future

import torch

from bladellm_runtime.models.checkpoint import Checkpoint
from bladellm_runtime.models.quantized import Schemes
from bladellm_runtime.models.ranges import FileRange
from bladellm_runtime.models.rank_checkpoint import RankCheckpoint
from bladellm_runtime.models.sources import CheckpointSource, stored_keys
from bladellm_runtime.models.stream import TensorStream
from bladellm_runtime.models.weights import Part, WeightTable
from bladellm_runtime.quantization.format import CheckpointFormat
from bladellm_runtime.quantization.scheme import Scheme

AHEAD_BYTES = 256 * 2**20
"""Stored tensors of quantized layers that may be on the device before their turn to be packed comes."""


class StreamedSource(CheckpointSource):
    """Plain parameters are filled in the background until `finish`; of quantized layers, taken in the table's order,
    the next ones are read while one is packed."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        quantization: CheckpointFormat | None,
        stream: TensorStream,
        table: WeightTable,
        schemes: Schemes,
        shares: RankCheckpoint | None = None,
    ) -> None:
        super().__init__(checkpoint, quantization, shares)
        self._stream = stream
        self._pieces: list[Future[None]] = []
        quantized = (part for row in table.values() for part in row if part.module in schemes and 0 not in part.shape)
        self._upcoming = deque((part, schemes[part.module or ""]) for part in quantized)
        self._started: dict[str, tuple[dict[str, torch.Tensor], list[Future[None]]]] = {}
        self._ahead = 0

    def fill(self, parameter: torch.Tensor, parts: Sequence[Part]) -> None:
        """Start to copy what is held of each tensor to its rows, cast on the way; it is there after `finish`."""
        for rows, part in zip(parameter.split([part.held[0] for part in parts]), parts, strict=True):
            source = self._checkpoint.locate(part.key)
            if part.columns is not None:
                self._fill_columns(rows, part, source)
            else:
                self._fill_rows(rows, part, source)

    def _fill_rows(self, target: torch.Tensor, part: Part, source: FileRange) -> None:
        """Runs of rows lie one behind the other in the file: nothing else is read."""
        if part.rows is None:
            self._pieces += self._stream.fill(target, source)
            return
        for run, rows in zip(part.rows.runs, target.split([run.count for run in part.rows.runs]), strict=True):
            if run.start is None:
                rows.zero_()
            else:
                self._pieces += self._stream.fill(rows, source.rows(run.start, run.count))

    def _fill_columns(self, target: torch.Tensor, part: Part, source: FileRange) -> None:
        """Columns come from all over the file: the whole tensor is on the device for a moment."""
        whole = torch.empty(source.shape, dtype=source.dtype, device=target.device)
        if source.size:
            self._stream.wait(self._stream.fill(whole, source))
        part.take(whole, target)

    def finish(self) -> None:
        self._stream.wait(self._pieces)
        self._pieces.clear()

    def _stored(self, part: Part, scheme: Scheme, device: torch.device) -> dict[str, torch.Tensor]:
        while self._upcoming and (part.module not in self._started or self._ahead < AHEAD_BYTES):
            self._start(*self._upcoming.popleft(), device)
        tensors, pieces = self._started.pop(part.module or "")
        self._stream.wait(pieces)
        self._ahead -= sum(tensor.nbytes for tensor in tensors.values())
        return tensors

    def _start(self, part: Part, scheme: Scheme, device: torch.device) -> None:
        tensors, pieces = {}, []
        for suffix, key in stored_keys(self._format, part, scheme).items():
            if key in self._checkpoint.files:
                source = self._checkpoint.locate(key)
                tensors[suffix] = torch.empty(source.shape, dtype=source.dtype, device=device)
                pieces += self._stream.fill(tensors[suffix], source)
        self._started[part.module or ""] = tensors, pieces
        self._ahead += sum(tensor.nbytes for tensor in tensors.values())
