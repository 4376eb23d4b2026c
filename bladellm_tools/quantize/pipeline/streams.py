"""The residual stream of every calibration window, shared out over devices and carried from layer to layer."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from bladellm_runtime.models.config import ModelSpec
from bladellm_tools.quantize.algorithms.layer import LayerWeights
from bladellm_tools.quantize.pipeline.forward import Tables, rotary_tables_of


@dataclass(slots=True)
class _Share:
    """One device's windows: hidden [samples, T, H], on the device or in host memory, and the tables of T positions."""

    device: torch.device
    hidden: torch.Tensor
    tables: Tables


Step = Callable[[int, torch.Tensor, Tables], torch.Tensor | None]
"""(number of the share, x [B, T, H] on its device, tables) -> the new x, or None to leave the stream as it is."""


class Streams:
    """The hidden states of windows, int64 [samples, T].

    They begin as rows of `embedding` [vocab, H]. Each device has its windows, at most `batch` of which are worked on
    at a time; the devices work side by side. `offload`: the states wait in host memory between batches.
    """

    def __init__(
        self,
        spec: ModelSpec,
        windows: torch.Tensor,
        embedding: torch.Tensor,
        devices: Sequence[torch.device],
        *,
        dtype: torch.dtype,
        batch: int,
        offload: bool = False,
    ) -> None:
        self.batch = batch
        count = min(len(devices), windows.shape[0])
        parts = windows.tensor_split(count)
        self._shares = [
            _Share(device, _embed(part, embedding, device, dtype, batch, offload), _tables(spec, part, device))
            for device, part in zip(devices, parts, strict=False)
        ]

    @property
    def devices(self) -> list[torch.device]:
        """Those that have windows, in the order of the shares."""
        return [share.device for share in self._shares]

    def run(self, step: Step) -> None:
        """Call `step` for all batches of every share, without gradients; shares run in threads of their own."""
        if len(self._shares) == 1:
            self._run_share(0, step)
            return
        with ThreadPoolExecutor(len(self._shares), "calibrate") as pool:
            for future in [pool.submit(self._run_share, number, step) for number in range(len(self._shares))]:
                future.result()

    def replicas(self, weights: LayerWeights, dtype: torch.dtype) -> list[LayerWeights]:
        """A layer's weights as `dtype` on the device of every share."""
        return [{name: tensor.to(device, dtype) for name, tensor in weights.items()} for device in self.devices]

    def hidden(self) -> torch.Tensor:
        """The states of all windows, [samples, T, H], on the CPU."""
        for device in self.devices:
            if device.type == "cuda":
                torch.cuda.synchronize(device)
        return torch.cat([share.hidden.cpu() for share in self._shares])

    def _run_share(self, number: int, step: Step) -> None:
        share = self._shares[number]
        on_device = torch.cuda.device(share.device) if share.device.type == "cuda" else nullcontext()
        with torch.no_grad(), on_device:
            for first in range(0, share.hidden.shape[0], self.batch):
                states = share.hidden[first : first + self.batch]
                x = step(number, states.to(share.device, non_blocking=True), share.tables)
                if x is not None:
                    states.copy_(x, non_blocking=True)


def _embed(
    windows: torch.Tensor, embedding: torch.Tensor, device: torch.device, dtype: torch.dtype, batch: int, offload: bool
) -> torch.Tensor:
    table = embedding.to(device, dtype)
    shape = (*windows.shape, embedding.shape[1])
    on_host = offload or device.type == "cpu"
    pin = on_host and device.type == "cuda"
    hidden = torch.empty(shape, dtype=dtype, device="cpu" if on_host else device, pin_memory=pin)
    for first in range(0, windows.shape[0], batch):
        rows = windows[first : first + batch].to(device)
        hidden[first : first + batch].copy_(F.embedding(rows, table))
    return hidden


def _tables(spec: ModelSpec, windows: torch.Tensor, device: torch.device) -> Tables:
    return rotary_tables_of(spec, windows.shape[1], device)
