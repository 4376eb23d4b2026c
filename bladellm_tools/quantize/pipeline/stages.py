"""Seconds spent in each stage of the work."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch


class Stages:
    """Adds up wall-clock seconds by stage; the devices are waited for at the end of a stage, and only there."""

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self.seconds: dict[str, float] = {}
        self._devices = [device for device in devices if device.type == "cuda"]

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
            for device in self._devices:
                torch.cuda.synchronize(device)
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - began
