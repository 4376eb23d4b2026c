"""The ring of `wide_linear.cu` in Python, over the CTAs of a cluster and several tiles: who waits for whom."""

import random
from collections.abc import Iterator

import pytest

from tests.kernels.ring_support import Barrier, take_turns


class Block:
    """What a CTA has in shared memory: barriers, and of every stage what it holds and which warps read it."""

    def __init__(self, stages: int, arrivals: int) -> None:
        self.full = [Barrier(1) for _ in range(stages)]
        self.empty = [Barrier(arrivals) for _ in range(stages)]
        self.held: dict[tuple[object, int], tuple[int, int]] = {}
        self.reading: list[set[int]] = [set() for _ in range(stages)]
        self.ready = False


class ClusterRun:
    """A cluster's producers, copies and warps, each a generator that says when it can go on, in random order."""

    def __init__(self, cluster: int, stages: int, warps: int, tiles: int, steps: int) -> None:
        self.cluster, self.stages, self.warps, self.tiles, self.steps = cluster, stages, warps, tiles, steps
        self.blocks = [Block(stages, cluster * warps) for _ in range(cluster)]
        self.under_way: list[tuple[int, object, int, tuple[int, int]]] = []
        self.inputs_ready = False

    def producer(self, rank: int) -> Iterator[bool]:
        block, ahead = self.blocks[rank], min(self.steps, self.stages)
        for step in range(ahead):
            self.fetch_weight(rank, step, (0, step))
            yield True
        block.ready = True
        while not (self.inputs_ready and self.all_ready()):
            yield False
        stage, phase, step = 0, 0, 0
        for step in range(ahead):
            self.fetch_x(rank, stage, (0, step))
            yield True
            stage, phase = self.behind(stage, phase)
        step = ahead
        for tile in range(self.tiles):
            while step < self.steps:
                while not block.empty[stage].passed(phase ^ 1):
                    yield False
                self.fetch_weight(rank, stage, (tile, step))
                yield True
                self.fetch_x(rank, stage, (tile, step))
                yield True
                stage, phase = self.behind(stage, phase)
                step += 1
            step = 0

    def fetch_weight(self, rank: int, stage: int, what: tuple[int, int]) -> None:
        """And expect it and the shares of x of all CTAs."""
        self.blocks[rank].full[stage].change(1, 1 + self.cluster)
        self.under_way.append((rank, "weight", stage, what))

    def fetch_x(self, rank: int, stage: int, what: tuple[int, int]) -> None:
        self.under_way += [(other, rank, stage, what) for other in range(self.cluster)]

    def copies(self) -> Iterator[bool]:
        """Copies land in any order, also those of one multicast."""
        while True:
            if not self.under_way:
                yield False
                continue
            rank, part, stage, what = self.under_way.pop(random.randrange(len(self.under_way)))
            block = self.blocks[rank]
            assert part == "weight" or self.all_ready(), "a barrier is used before it is one"
            assert not block.reading[stage], "a stage is written that is still read"
            block.held[part, stage] = what
            block.full[stage].change(0, -1)
            yield True

    def consumer(self, rank: int, warp: int) -> Iterator[bool]:
        block, stage, phase = self.blocks[rank], 0, 0
        while not self.all_ready():
            yield False
        for tile in range(self.tiles):
            before = 0
            for step in range(self.steps):
                while not block.full[stage].passed(phase):
                    yield False
                parts = ["weight", *range(self.cluster)]
                assert {block.held.get((part, stage)) for part in parts} == {(tile, step)}, "a stage is not yet full"
                block.reading[stage].add(warp)
                yield True
                if step > 0:
                    yield from self.release(rank, before, warp)
                before = stage
                stage, phase = self.behind(stage, phase)
            yield from self.release(rank, before, warp)

    def release(self, rank: int, stage: int, warp: int) -> Iterator[bool]:
        """At the barriers of all CTAs, in any order and at different times."""
        self.blocks[rank].reading[stage].discard(warp)
        for other in random.sample(self.blocks, self.cluster):
            other.empty[stage].change(1)
            yield True

    def behind(self, stage: int, phase: int) -> tuple[int, int]:
        return (stage + 1, phase) if stage + 1 < self.stages else (0, phase ^ 1)

    def all_ready(self) -> bool:
        return all(block.ready for block in self.blocks)

    def come_nearer(self) -> None:
        """What the kernel in front writes may be there from some turn on."""
        self.inputs_ready |= random.random() < 0.1

    def run(self) -> None:
        """Until all wait for the cluster at the end; what were to come then would come too late."""
        parts = {f"producer {rank}": self.producer(rank) for rank in range(self.cluster)}
        for rank in range(self.cluster):
            parts |= {f"warp {warp} of {rank}": self.consumer(rank, warp) for warp in range(self.warps)}
        # Some are slower than others, in another way each time.
        speeds = {name: random.random() ** 2 + 0.01 for name in ["copies", *parts]}

        def choose(names: list[str]) -> str:
            return random.choices(names, [speeds[each] for each in names])[0]

        take_turns(parts, self.copies(), 20000, self.come_nearer, choose)
        assert not self.under_way


@pytest.mark.parametrize("turn", range(30))
def test_the_ring_of_a_cluster_is_filled_and_read_in_order(turn):
    stages, warps = random.randint(2, 5), random.randint(1, 4)
    ClusterRun(random.choice((1, 2, 2)), stages, warps, random.randint(1, 4), random.randint(1, 9)).run()


def test_a_stage_that_only_one_cta_has_released_would_be_overwritten(monkeypatch):
    """What the arrivals of the others are for."""

    def release(self, rank, stage, warp):
        self.blocks[rank].reading[stage].discard(warp)
        for _ in range(self.cluster):
            self.blocks[rank].empty[stage].change(1)
            yield True

    monkeypatch.setattr(ClusterRun, "release", release)
    found = []
    for _ in range(50):
        try:
            ClusterRun(2, 2, 2, 2, 8).run()
        except AssertionError as error:
            found.append(str(error))
    assert any("still read" in each for each in found)
