"""Which tiles of a linear layer of many rows, and which steps of them, each cluster takes: `wide_work.cu` in Python."""

import random
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain

import pytest
from bladellm_kernels.wide_linear import LEAST_STEPS, WideSchedule, plan, tile_outputs

from tests.kernels.wide_support import PROCESSORS, random_schedule


@dataclass(frozen=True, slots=True)
class Part:
    """First row of x and first output of a tile, and the steps of it that a CTA takes; others: the clusters, in order,
    whose sums of its other steps it adds."""

    token: int
    output: int
    steps: range
    others: tuple[int, ...] = ()


class Work:
    """What `Work` and `Parts` say, by their names."""

    def __init__(self, schedule: WideSchedule, rows: int, outputs: int, inputs: int, grid: int) -> None:
        self.schedule, self.clusters, self.steps = schedule, grid // schedule.cluster, -(-inputs // 64)
        self.tall = -(-rows // schedule.tokens)
        self.wide = -(-outputs // (schedule.cluster * tile_outputs(schedule)))
        self.tiles = self.tall * self.wide
        divides = schedule.stream_k and self.tiles % self.clusters
        self.whole = max(self.tiles // self.clusters - 1, 0) * self.clusters if divides else self.tiles

    def tile(self, place: int, rank: int) -> tuple[int, int]:
        most, divided, across = self.schedule.band, place - self.whole, (self.tiles - self.whole) // self.tall
        if divided >= 0 and self.tall <= most and self.whole % self.tall == 0:
            column = self.whole // self.tall + divided % across
            return divided // across * self.schedule.tokens, self.output(column, rank)
        band = place // (most * self.wide)
        inside, height = place - band * most * self.wide, min(self.tall - band * most, most)
        return (band * most + inside % height) * self.schedule.tokens, self.output(inside // height, rank)

    def output(self, column: int, rank: int) -> int:
        return (column * self.schedule.cluster + rank) * tile_outputs(self.schedule)

    def first_step(self, cluster: int) -> int:
        step = (self.tiles - self.whole) * self.steps * (self.clusters - 1 - cluster) // self.clusters
        inside = step % self.steps
        if inside < LEAST_STEPS:
            return step - inside
        return step - inside + self.steps if inside > self.steps - LEAST_STEPS else step

    def others(self, cluster: int, tile_end: int) -> Iterator[int]:
        for other in reversed(range(cluster)):
            if self.first_step(other) < min(tile_end, self.first_step(other - 1)):
                yield other

    def parts(self, block: int) -> list[Part]:
        cluster, rank = divmod(block, self.schedule.cluster)
        whole = range(cluster, self.whole, self.clusters)
        found = [Part(*self.tile(place, rank), range(self.steps)) for place in whole]
        step, end = self.first_step(cluster), self.first_step(cluster - 1)
        while step < end:
            before, first = divmod(step, self.steps)
            last = min(first + end - step, self.steps)
            adds = first == 0 and last < self.steps
            others = tuple(self.others(cluster, (before + 1) * self.steps)) if adds else ()
            found.append(Part(*self.tile(self.whole + before, rank), range(first, last), others))
            step += last - first
        return found


@pytest.mark.parametrize("turn", range(40))
def test_every_step_of_a_tile_is_taken_once_and_by_clusters_in_step(turn):
    """Odd numbers of tiles, fewer tiles than clusters; the CTAs of a cluster have the same rows of x and steps."""
    schedule = random_schedule()
    rows, outputs = random.choice((1, 257, 512, 577, 2000, 8192)), 8 * random.randint(1, 1000)
    inputs = random.choice((64, 200, 4096, random.randint(1, 4000)))
    planned = plan(rows, outputs, inputs, schedule, random.choice((2, 4, PROCESSORS)))
    assert planned.grid % schedule.cluster == 0
    work = Work(schedule, rows, outputs, inputs, planned.grid)
    found = [work.parts(block) for block in range(planned.grid)]
    for first in range(0, planned.grid, schedule.cluster):
        together = found[first : first + schedule.cluster]
        assert len({tuple((part.token, part.steps, part.others) for part in block) for block in together}) == 1
    taken: dict[tuple[int, int], list[int]] = defaultdict(list)
    for part in chain.from_iterable(found):
        taken[part.token, part.output] += part.steps
    assert all(sorted(steps) == list(range(work.steps)) for steps in taken.values())
    inside = {tile for tile in taken if tile[0] < rows and tile[1] < outputs}
    across, down = range(0, outputs, tile_outputs(schedule)), range(0, rows, schedule.tokens)
    assert inside == {(token, output) for token in down for output in across}
    assert len(taken) - len(inside) <= len(down) * (schedule.cluster - 1)


@pytest.mark.parametrize("turn", range(40))
def test_sums_of_divided_tiles_reach_the_cluster_that_began_them(turn):
    """Each CTA leaves sums at most once and before it adds any, to a later cluster that does so last of all: none waits
    for one which waits for it. All have as much to do, but for ends of tiles."""
    schedule = replace(random_schedule(), stream_k=True)
    rows, outputs, inputs = random.randint(1, 3000), 8 * random.randint(1, 1000), random.randint(1, 8000)
    work = Work(schedule, rows, outputs, inputs, plan(rows, outputs, inputs, schedule, PROCESSORS).grid)
    blocks = range(0, work.clusters * schedule.cluster, schedule.cluster)
    left, added = {}, {}
    for cluster, block in enumerate(blocks):
        for place, part in enumerate(parts := work.parts(block)):
            if part.steps.start > 0:
                assert place == work.whole // work.clusters
                left[cluster] = part.token, part.output
            for other in part.others:
                assert other < cluster
                assert part is parts[-1]
                assert other not in added
                added[other] = part.token, part.output
    assert left == added
    most = max(sum(len(part.steps) for part in work.parts(block)) for block in blocks)
    assert most <= work.tiles * work.steps / work.clusters + 2 * LEAST_STEPS + 1


def test_gate_up_of_256_rows_takes_the_time_of_fewer_tiles():
    """Without it two rounds of 64 steps; each cluster leaves sums once."""
    schedule = WideSchedule(stream_k=True)
    work = Work(schedule, 256, 14336, 4096, plan(256, 14336, 4096, schedule, PROCESSORS).grid)
    assert max(sum(len(part.steps) for part in work.parts(block)) for block in range(PROCESSORS)) <= 112
    assert max(len(part.others) for block in range(PROCESSORS) for part in work.parts(block)) == 1


def test_clusters_read_a_weight_of_divided_tiles_together():
    """Of 512 rows two by two, all the time."""
    schedule = WideSchedule(cluster=1, stream_k=True)
    work = Work(schedule, 512, 14336, 4096, plan(512, 14336, 4096, schedule, PROCESSORS).grid)
    shared = [[part for part in work.parts(block) if part.token == row] for row in (0, 256) for block in range(132)]
    divided = [[(part.output, part.steps) for part in parts[-2:]] for parts in shared if parts]
    assert sum(other in divided[:place] for place, other in enumerate(divided)) >= 60


def test_a_wave_reads_a_band_of_x_and_little_of_the_weight():
    work = Work(WideSchedule(band=8), 8192, 14336, 4096, PROCESSORS)
    first = [work.parts(block)[0] for block in range(PROCESSORS)]
    assert {part.token for part in first} == set(range(0, 8 * 256, 256))
    assert len({part.output for part in first}) <= 18
