"""Times under sustained load, and the clock and the power of the GPU meanwhile."""

import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from gpu_timing import capture

SAMPLE_MS = 20


@dataclass(frozen=True, slots=True)
class Figures:
    """seconds: of all works once; clock: MHz and W meanwhile, as text."""

    seconds: float
    clock: str


class ClockWatch:
    """Samples of SM clock and power by nvidia-smi, beside what runs; none where it is missing."""

    def __init__(self) -> None:
        self._samples: list[tuple[float, float, float]] = []
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> "ClockWatch":
        if shutil.which("nvidia-smi") is not None:
            uuid = torch.cuda.get_device_properties(torch.cuda.current_device()).uuid
            query = ["--query-gpu=clocks.sm,power.draw.instant", "--format=csv,noheader,nounits"]
            line = ["nvidia-smi", f"--id=GPU-{uuid}", *query, f"--loop-ms={SAMPLE_MS}"]
            self._process = subprocess.Popen(line, stdout=subprocess.PIPE, text=True)
            threading.Thread(target=self._read, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.terminate()
            self._process.wait()

    def mean(self, began: float, ended: float) -> str:
        """Of the samples between two times of `time.monotonic`."""
        found = [sample[1:] for sample in self._samples if began <= sample[0] <= ended]
        return ", ".join(f"{sum(values) / len(values):.0f}" for values in zip(*found, strict=True)) or "no samples"

    def _read(self) -> None:
        assert self._process is not None
        assert self._process.stdout is not None
        for line in self._process.stdout:
            try:
                clock, power = map(float, line.split(","))
            except ValueError:
                continue
            self._samples.append((time.monotonic(), clock, power))


def sustained(works: Sequence[Callable[[], object]], least_ms: float, watch: ClockWatch) -> Figures:
    """All works as a graph that is replayed for `least_ms`: the mean of the second half, as the power limit has it."""
    replay = capture(works).replay
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    events[0].record()
    replay()
    events[1].record()
    events[1].synchronize()
    count = 2 * max(2, round(least_ms / 2 / events[0].elapsed_time(events[1])))
    events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
    events[0].record()
    for event in events[1:]:
        replay()
        event.record()
    events[count // 2].synchronize()
    began = time.monotonic()
    events[-1].synchronize()
    times = [first.elapsed_time(second) / 1e3 for first, second in pairwise(events)][count // 2 :]
    return Figures(sum(times) / len(times), watch.mean(began, time.monotonic()))
