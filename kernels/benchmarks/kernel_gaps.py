"""What a profiler sees of a captured step: how long its kernels take, and what lies between one and the next."""

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator
from itertools import pairwise

import torch
from gpu_timing import capture
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

Span = tuple[str, float, float]
"""Name of a kernel, start and end in microseconds."""

REPLAYS = 3


def kernel_gaps(step: Callable[[], object]) -> Iterator[str]:
    """A table of a step as one CUDA graph, by each kernel and the one behind it.

    With a gap below zero the latter starts before the former has ended, as programmatic dependent launch allows.
    """
    graph = capture([step])
    graph.replay()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(REPLAYS):
            graph.replay()
            torch.cuda.synchronize()
    events = [each for each in profiler.events() or [] if each.device_type == DeviceType.CUDA]
    return gap_table([(each.name, each.time_range.start, each.time_range.end) for each in events])


def gap_table(spans: list[Span]) -> Iterator[str]:
    """Medians, the pairs that take longest in all first; pairs that come less often than layers do are left out."""
    pairs: dict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)
    spans = sorted(spans, key=lambda span: span[1])
    for (name, start, end), (behind, next_start, _) in pairwise(spans):
        pairs[name, behind].append((end - start, next_start - end))
    yield "| kernel | behind it | times | µs | gap µs |\n| --- | --- | ---: | ---: | ---: |"
    for (name, behind), found in sorted(pairs.items(), key=lambda each: -sum(us for us, _ in each[1])):
        if len(found) > 2 * REPLAYS:
            micros, gap = (statistics.median(each) for each in zip(*found, strict=True))
            yield f"| {name[:60]} | {behind[:40]} | {len(found) / REPLAYS:.0f} | {micros:.2f} | {gap:.2f} |"
