"""The ring of `cluster_linear.cu` in Python: who waits for whom, in random order."""

import random
from collections.abc import Iterator

import pytest

from tests.kernels.ring_support import Barrier, take_turns


class RingRun:
    """The ring of one CTA: its producer, its copies and its warps, each a generator that says when it can go on."""

    def __init__(self, stages: int, warps: int, count: int) -> None:
        self.stages, self.warps, self.count = stages, warps, count
        self.full = [Barrier(1) for _ in range(stages)]
        self.empty = [Barrier(warps) for _ in range(stages)]
        self.held: dict[tuple[str, int], int] = {}
        self.reading: dict[int, set[int]] = {stage: set() for stage in range(stages)}
        self.under_way: list[tuple[str, int, int]] = []
        self.inputs_ready = False

    def producer(self) -> Iterator[bool]:
        for step in range(min(self.count, self.stages)):
            self.fetch_weight(step, step)
            yield True
        while not self.inputs_ready:
            yield False
        for step in range(min(self.count, self.stages)):
            self.under_way.append(("x", step, step))
            yield True
        stage, phase = 0, 0
        for step in range(self.stages, self.count):
            while not self.empty[stage].passed(phase):
                yield False
            self.fetch_weight(stage, step)
            self.under_way.append(("x", stage, step))
            yield True
            stage, phase = (stage + 1, phase) if stage + 1 < self.stages else (0, phase ^ 1)

    def fetch_weight(self, stage: int, step: int) -> None:
        self.full[stage].change(1, 2)
        self.under_way.append(("weight", stage, step))

    def copies(self) -> Iterator[bool]:
        """Copies land in any order."""
        while True:
            if not self.under_way:
                yield False
                continue
            what, stage, step = self.under_way.pop(random.randrange(len(self.under_way)))
            assert not self.reading[stage], "a tile is written that is still read"
            self.held[what, stage] = step
            self.full[stage].change(0, -1)
            yield True

    def consumer(self, warp: int) -> Iterator[bool]:
        stage, phase, before = 0, 0, 0
        for step in range(self.count):
            while not self.full[stage].passed(phase):
                yield False
            assert self.held["weight", stage] == self.held["x", stage] == step
            self.reading[stage].add(warp)
            yield True
            if step > 0:
                self.reading[before].discard(warp)
                self.empty[before].change(1)
            before = stage
            stage, phase = (stage + 1, phase) if stage + 1 < self.stages else (0, phase ^ 1)
        self.reading[before].discard(warp)

    def come_nearer(self) -> None:
        """What the kernel in front writes may be there from some turn on."""
        self.inputs_ready |= random.random() < 0.1

    def run(self) -> None:
        parts = {"producer": self.producer(), **{str(warp): self.consumer(warp) for warp in range(self.warps)}}
        take_turns(parts, self.copies(), 2000, self.come_nearer)
        assert not self.under_way


@pytest.mark.parametrize("turn", range(20))
def test_the_ring_is_filled_and_read_in_order(turn):
    RingRun(random.randint(2, 6), 4 * random.randint(1, 3), random.choice((0, 1, 2, 3, 5, 11, 24))).run()
