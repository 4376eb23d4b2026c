"""Probe CUDA virtual memory as the KV cache uses it: what calls cost, and whether what it relies on holds.

python kernels/benchmarks/virtual_memory.py [--gib 16] [--json FILE]
"""

import argparse
import importlib
import json
import statistics
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from bladellm_kernels.kv_format import NO_QUANT

from bladellm_runtime.kv.arena import KvShape
from bladellm_runtime.kv.cuda_arena import CudaArena
from bladellm_runtime.kv.cuda_driver import CudaDriver, probe
from bladellm_runtime.kv.dlpack import bytes_at
from bladellm_runtime.kv.factory import BLOCK_BYTES
from bladellm_runtime.kv.operations import Copy, Hide, MemoryPlan, Show
from bladellm_runtime.kv.sizing import kv_groups, plan_spec
from bladellm_runtime.kv.spec import KvSpec

MIB = 1 << 20
HANDLE_SIZES = (2, 16, 32, 64)
SHAPE_8B = KvShape(kv_heads=8, head_dim=128, dtype=torch.bfloat16, format=NO_QUANT)
LAYERS, LAYERS_PER_GROUP = 32, 4
PROMPT = 32768
TARGET_MS = 8.0
"""For mapping the granules of `PROMPT` tokens."""


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table. `ok`: whether it is as the KV cache needs it, where that is a question."""

    what: str
    value: float
    unit: str
    ok: bool | None = None


class CallTimer:
    """The module cuda.bindings.driver, with the seconds of every call noted by name."""

    def __init__(self, bindings: Any) -> None:
        self._bindings = bindings
        self.seconds: dict[str, list[float]] = defaultdict(list)

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._bindings, name)
        if not name.startswith("cu"):
            return found

        def timed(*arguments: Any) -> Any:
            start = time.perf_counter()
            result = found(*arguments)
            self.seconds[name].append(time.perf_counter() - start)
            return result

        return timed

    def rows(self, prefix: str) -> Iterator[Row]:
        """Median and worst of every call since the last time."""
        for name, seconds in self.seconds.items():
            yield Row(f"{prefix}: {name}, median of {len(seconds)}", statistics.median(seconds) * 1e6, "us")
            yield Row(f"{prefix}: {name}, worst", max(seconds) * 1e6, "us")
        self.seconds.clear()


@dataclass(frozen=True, slots=True)
class Machine:
    device: torch.device
    driver: CudaDriver
    calls: CallTimer
    gib: float

    def arena(self, block_bytes: int = BLOCK_BYTES) -> tuple[KvSpec, CudaArena]:
        """An arena of the 8B shape for four sequences of up to 128K tokens."""
        groups = kv_groups(LAYERS, SHAPE_8B.payload_bytes, LAYERS_PER_GROUP)
        budget = int(self.gib * 2**30)
        page = self.driver.granularity
        spec = plan_spec(groups, budget, 4, 131072, 16, page, block_bytes=block_bytes)
        return spec, CudaArena(spec, SHAPE_8B, self.device, self.driver)


@contextmanager
def mapped(driver: CudaDriver, size: int, count: int = 1) -> Iterator[int]:
    """Addresses with `count` handles of `size` bytes mapped one after the other."""
    with ExitStack() as undo:
        start = driver.reserve(size * count)
        undo.callback(driver.free, start, size * count)
        for address in range(start, start + size * count, size):
            handle = driver.create(size)
            undo.callback(driver.release, handle)
            driver.map(address, size, handle)
            undo.callback(driver.unmap, address, size)
        yield start


def call_costs(machine: Machine) -> Iterator[Row]:
    """Every call by size of the handle."""
    yield Row("granularity", machine.driver.granularity / MIB, "MiB")
    for size in HANDLE_SIZES:
        with mapped(machine.driver, size * MIB, 32):
            pass
        yield from machine.calls.rows(f"{size} MiB")


def correctness(machine: Machine) -> Iterator[Row]:
    """Aliases, and tensors over terabytes of addresses of which one piece has memory."""
    probe(machine.driver, machine.device)
    yield Row("one handle at two addresses reads the same", 1, "", ok=True)
    driver, page = machine.driver, machine.driver.granularity
    size = 4 << 40
    start = driver.reserve(size)
    begin = time.perf_counter()
    numbers = bytes_at(start, size, machine.device).view(torch.bfloat16)
    yield Row("tensor over 4 TiB of addresses", (time.perf_counter() - begin) * 1e6, "us")
    handle, offset = driver.create(page), size - 3 * page
    driver.map(start + offset, page, handle)
    rows = numbers.as_strided((size // 4096, 2, 8, 128), (2048, 128, 256, 1))
    index = torch.tensor([offset // 4096 + 1, offset // 4096 + 255], device=machine.device)
    values = torch.randn(2, 2, 8, 128, device=machine.device).bfloat16()
    rows[index] = values
    right = torch.equal(rows.index_select(0, index), values) and torch.equal(rows[offset // 4096 + 255], values[1])
    yield Row("writing and reading rows beyond 2^31 elements", 1, "", ok=right)
    torch.cuda.synchronize()
    driver.unmap(start + offset, page)
    driver.release(handle)
    driver.free(start, size)


def arena_costs(machine: Machine) -> Iterator[Row]:
    """What a long prompt, a tail and a conversion cost through the arena."""
    begin = time.perf_counter()
    spec, arena = machine.arena()
    seconds = time.perf_counter() - begin
    size = spec.num_granules * spec.granule_bytes / 2**30
    yield Row(f"arena of {size:.3g} GiB, {spec.num_granules} granules in blocks of {spec.block_granules}", seconds, "s")
    machine.calls.seconds.clear()
    granules = min(spec.granules(PROMPT), spec.num_granules)
    tokens = granules * spec.granule_tokens
    whole = _shows(spec, 0, granules)
    hide: list[Show | Hide] = [Hide(0, 0)]
    times = [_milliseconds(arena, MemoryPlan(views)) for views in (whole, hide, whole, hide)]
    yield Row(f"map {tokens} tokens by blocks", times[0], "ms", ok=times[0] <= TARGET_MS)
    yield Row(f"map {tokens} tokens by blocks, again", times[2], "ms", ok=times[2] <= TARGET_MS)
    yield Row(f"unmap {tokens} tokens by blocks", times[3], "ms")
    yield Row("the same granules where they are mapped already", _again(arena, whole), "ms")
    yield from machine.calls.rows("blocks")
    yield from _ahead(arena, spec, whole)
    yield from conversions(machine, arena, spec)
    arena.close()


def conversions(machine: Machine, arena: CudaArena, spec: KvSpec) -> Iterator[Row]:
    last = spec.num_granules - spec.block_granules
    machine.calls.seconds.clear()
    split = _milliseconds(arena, MemoryPlan([Show(1, 0, [last])]))
    single = _milliseconds(arena, MemoryPlan([Show(1, 1, [last + 1])]))
    rest = list(range(last + 2, last + spec.block_granules))
    many = _milliseconds(arena, MemoryPlan([Show(1, 2, rest)]))
    block = list(range(last, last + spec.block_granules))
    joined = _milliseconds(arena, MemoryPlan([Show(2, 0, block, whole=True)]))
    yield Row("show one granule of a whole block, splitting it", split, "ms")
    yield Row("show one granule", single, "ms")
    yield Row(f"show {len(rest)} granules", many, "ms")
    yield Row("show a split block whole, joining it", joined, "ms")
    zero = bool((arena.layer(0).payload[arena.base_row(2) : arena.base_row(2) + 100] == 0).all())
    yield Row("joined memory is zero", 1, "", ok=zero)
    yield from machine.calls.rows("conversions")


def replaced_memory(machine: Machine) -> Iterator[Row]:
    """A CUDA graph that reads addresses whose memory is replaced, and a granule copied at its home."""
    spec, arena = machine.arena(block_bytes=0)
    tokens = spec.granule_tokens
    for slot in (1, 2):
        _milliseconds(arena, MemoryPlan([Show(slot, 0, [slot])]))
        arena.layer(5).payload[arena.base_row(slot) : arena.base_row(slot) + tokens] = float(slot)
    _milliseconds(arena, MemoryPlan([Show(0, 0, [1])]))
    rows = arena.layer(5).payload[:tokens]
    out = rows.float().sum()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out.copy_(rows.float().sum())
    seen = []
    for granule in (2, 1):
        torch.cuda.synchronize()
        _milliseconds(arena, MemoryPlan([Show(0, 0, [granule])]))
        graph.replay()
        seen.append(float(out) / rows.numel())
    yield Row("a graph reads what its addresses show now", 1, "", ok=seen == [2.0, 1.0])
    arena.move([Copy(2, 1, tokens)])
    yield Row("a copy at home is seen by the slot", 1, "", ok=bool((rows == 2.0).all()))
    torch.cuda.synchronize()
    arena.close()


def beside_python(machine: Machine) -> Iterator[Row]:
    """Whether calls let other Python threads run, and what a busy one costs them."""
    stop, counted = threading.Event(), [0]

    def count() -> None:
        while not stop.is_set():
            counted[0] += 1

    calls, seconds = _map_for(machine, 0.3)
    yield Row("map and unmap, alone", seconds / calls * 1e6, "us")
    counter = threading.Thread(target=count, daemon=True)
    counter.start()
    time.sleep(0.3)
    alone, counted[0] = counted[0] / 0.3, 0
    calls, seconds = _map_for(machine, 0.3)
    beside = counted[0] / seconds
    stop.set()
    counter.join()
    yield Row("map and unmap, beside a busy Python thread", seconds / calls * 1e6, "us")
    yield Row("speed of the Python thread meanwhile", beside / alone * 100, "%", ok=beside > 0.2 * alone)
    machine.calls.seconds.clear()


def beside_matmul(machine: Machine) -> Iterator[Row]:
    """Whether mapping slows kernels, and kernels mapping."""
    a = torch.randn(8192, 8192, device=machine.device, dtype=torch.bfloat16)

    def matmuls(work: Callable[[], object]) -> float:
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        for _ in range(100):
            a @ a
        last.record()
        work()
        last.synchronize()
        return float(first.elapsed_time(last))

    matmuls(lambda: None)
    alone = min(matmuls(lambda: None) for _ in range(3))
    yield Row("100 matmuls, alone", alone, "ms")
    machine.calls.seconds.clear()
    beside = min(matmuls(lambda: _map_for(machine, alone * 0.8e-3)) for _ in range(3))
    yield Row("100 matmuls, beside mapping", beside, "ms", ok=beside < 1.05 * alone)
    yield from machine.calls.rows("beside matmuls")


def _shows(spec: KvSpec, slot: int, granules: int) -> list[Show | Hide]:
    """A slot's first granules by whole blocks, from granule 0 on."""
    block = spec.block_granules
    firsts = range(0, granules // block * block, block)
    return [Show(slot, first, list(range(first, first + block)), whole=True) for first in firsts]


def _milliseconds(arena: CudaArena, plan: MemoryPlan) -> float:
    start = time.perf_counter()
    arena.submit(plan)
    arena.wait()
    return (time.perf_counter() - start) * 1e3


def _again(arena: CudaArena, views: list[Show | Hide]) -> float:
    """Show views a second time."""
    _milliseconds(arena, MemoryPlan(views))
    return _milliseconds(arena, MemoryPlan(views))


def _ahead(arena: CudaArena, spec: KvSpec, whole: list[Show | Hide]) -> Iterator[Row]:
    """What a step pays for views it does not need yet."""
    ahead = [show._replace(slot=3) for show in whole if isinstance(show, Show)]
    yield Row("submit and wait, the blocks ahead", _milliseconds(arena, MemoryPlan(ahead=ahead)), "ms")
    yield Row("wait for them in the next plan", _milliseconds(arena, MemoryPlan()), "ms")


def _map_for(machine: Machine, seconds: float) -> tuple[int, float]:
    """Map and unmap one page for a time; how often, and the seconds."""
    driver, page = machine.driver, machine.driver.granularity
    address, handle = driver.reserve(page), driver.create(page)
    start, calls = time.perf_counter(), 0
    while time.perf_counter() - start < seconds:
        driver.map(address, page, handle)
        driver.unmap(address, page)
        calls += 1
    spent = time.perf_counter() - start
    driver.release(handle)
    driver.free(address, page)
    return calls, spent


SECTIONS = (call_costs, correctness, arena_costs, replaced_memory, beside_python, beside_matmul)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gib", type=float, default=16.0, help="size of the KV caches to make")
    parser.add_argument("--json", type=Path, help="file for the rows")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("virtual_memory.py measures a CUDA device, and there is none")
    torch.cuda.init()
    device = torch.device("cuda", torch.cuda.current_device())
    calls = CallTimer(importlib.import_module("cuda.bindings.driver"))
    machine = Machine(device, CudaDriver(device.index, calls), calls, args.gib)
    calls.seconds.clear()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}\n")
    print("| what | value | | |\n| --- | --- | --- | --- |")
    rows = []
    for section in SECTIONS:
        for row in section(machine):
            verdict = {None: "", True: "ok", False: "NOT OK"}[row.ok]
            print(f"| {row.what} | {row.value:,.4g} | {row.unit} | {verdict} |", flush=True)
            rows.append(asdict(row))
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
