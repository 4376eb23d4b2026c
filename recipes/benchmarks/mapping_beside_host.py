"""What mapping ahead costs the host of a decode step, without a GPU: `mapping_beside_host.py`.

A step is some small copies of tensors, each of which lets go of Python's lock, with Python between them; then the host
waits, as for a GPU. Beside it the mapping thread makes calls that keep a processor busy without the lock, as the
driver's do. Printed are microseconds of the host a step: with nothing to map, with all calls made as they come, and
with the thread held back while a step is launched (`Mapper.hold`).
"""

import argparse
import time
import zlib
from collections.abc import Callable, Iterator

import numpy as np
import torch

from bladellm_runtime.kv.mapper import Mapper

CALLS = 8
"""Calls of a job: a granule has one in each layer group."""


def busy_for(seconds: float) -> Callable[[], object]:
    """A call that takes about so long, and does not need Python's lock."""
    sample = bytes(1 << 20)
    zlib.crc32(sample)
    start = time.perf_counter()
    zlib.crc32(sample)
    rate = len(sample) / (time.perf_counter() - start)
    data = bytes(int(rate * seconds))
    return lambda: zlib.crc32(data)


def granule(call: Callable[[], object]) -> Iterator[bool]:
    """The work of one job."""
    for _ in range(CALLS):
        call()
        yield False


def launch(copies: int, source: torch.Tensor, target: torch.Tensor) -> int:
    """About what a launch does."""
    done = 0
    for _ in range(copies):
        target.copy_(source)
        for number in range(60):
            done += number
    return done


def measure(args: argparse.Namespace, granules: int, held: bool) -> list[float]:
    """Microseconds of the host, step by step."""
    mapper, seconds = Mapper(lambda: None), []
    call, wait = busy_for(1e-6 * args.call_us), busy_for(1e-3 * args.step_ms)
    source, target = torch.ones(64), torch.zeros(64)
    for step in range(args.steps):
        start = time.perf_counter()
        if held:
            mapper.hold()
        for slot in range(granules):
            mapper.submit(granule(call), [("slot", step * granules + slot)])
        launch(args.copies, source, target)
        if held:
            mapper.resume()
        seconds.append(1e6 * (time.perf_counter() - start))
        wait()
    mapper.close()
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--granules", nargs="+", type=int, default=[1, 2, 4, 8], help="mapped a step")
    parser.add_argument("--call_us", type=float, default=27.0)
    parser.add_argument("--copies", type=int, default=40, help="of a launch")
    parser.add_argument("--step_ms", type=float, default=8.0)
    parser.add_argument("--steps", type=int, default=200)
    args = parser.parse_args()
    print("| granules a step | mapping | median µs | 90 % within |\n| --- | --- | --- | --- |")
    cases = [(0, False), *((granules, held) for granules in args.granules for held in (False, True))]
    for granules, held in cases:
        found = np.percentile(measure(args, granules, held), (50, 90))
        mapping = "none" if not granules else "held back" if held else "at once"
        print(f"| {granules} | {mapping} | {found[0]:.0f} | {found[1]:.0f} |", flush=True)


if __name__ == "__main__":
    main()
