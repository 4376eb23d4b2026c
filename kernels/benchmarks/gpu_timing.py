"""Times on a CUDA GPU: by replays of a graph, by a queue of calls, and on the host; and what the GPU is."""

import datetime
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from itertools import pairwise

import torch

Work = Callable[[], object]
WARM_UPS = 3


@dataclass(frozen=True, slots=True)
class GpuTimer:
    """repeats: how many times each figure is taken; the median counts."""

    repeats: int

    def replayed(self, works: Sequence[Work]) -> float:
        """Seconds of all of works, one after another, captured as one CUDA graph: no launch gap of the host."""
        return self._spaced(capture(works).replay)

    def queued(self, work: Work, calls: int = 1) -> float:
        """Seconds of one call among calls that are launched without waiting; the host must be the faster side."""

        def several() -> None:
            for _ in range(calls):
                work()

        return self._spaced(several) / calls

    def host(self, work: Work, calls: int = 1) -> float:
        """Seconds the host spends in one call, of `calls` at a time, the GPU idle at first."""
        times = []
        for _ in range(WARM_UPS + self.repeats):
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(calls):
                work()
            times.append((time.perf_counter() - start) / calls)
        torch.cuda.synchronize()
        return statistics.median(times[WARM_UPS:])

    def _spaced(self, work: Work) -> float:
        """Median seconds between events around each of many works in one queue: the host launches ahead of them."""
        events = [torch.cuda.Event(enable_timing=True) for _ in range(WARM_UPS + self.repeats + 1)]
        torch.cuda.synchronize()
        events[0].record()
        for event in events[1:]:
            work()
            event.record()
        torch.cuda.synchronize()
        times = [float(start.elapsed_time(end)) / 1e3 for start, end in pairwise(events)]
        return statistics.median(times[WARM_UPS:])


def capture(works: Sequence[Work]) -> torch.cuda.CUDAGraph:
    """A graph of all works in order. Each runs once before: kernels are compiled, libraries have their handles."""
    graph = torch.cuda.CUDAGraph()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    # Not torch.cuda.graph, which returns all free memory to the driver at every capture.
    with torch.cuda.stream(side):
        for work in works:
            work()
        torch.cuda.synchronize()
        graph.capture_begin()
        try:
            for work in works:
                work()
        finally:
            graph.capture_end()
    torch.cuda.current_stream().wait_stream(side)
    return graph


def machine() -> dict[str, str]:
    """What the figures depend on: GPU, driver, versions, date."""
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    memory = f"{properties.total_memory / 2**30:.0f} GiB"
    return {
        "GPU": f"{properties.name}, {properties.multi_processor_count} SMs, {memory}",
        "driver": _query("driver_version"),
        "CUDA": str(torch.version.cuda),
        "torch": torch.__version__,
        "triton": _version("triton"),
        "cuDNN": str(torch.backends.cudnn.version()),
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
    }


def clocks() -> str:
    """SM and memory clock, power and temperature at the moment."""
    return _query("clocks.sm,clocks.mem,power.draw,temperature.gpu")


def _query(fields: str) -> str:
    if shutil.which("nvidia-smi") is None:
        return "unknown, no nvidia-smi"
    uuid = torch.cuda.get_device_properties(torch.cuda.current_device()).uuid
    line = ["nvidia-smi", f"--id=GPU-{uuid}", f"--query-gpu={fields}", "--format=csv,noheader"]
    done = subprocess.run(line, capture_output=True, text=True, check=False, timeout=30)
    return done.stdout.strip() if done.returncode == 0 else "unknown, nvidia-smi failed"


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "unknown"
