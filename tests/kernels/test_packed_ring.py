"""The two rings of `packed_linear.cu` in Python: who waits for whom, in random order; and the loop as compiled."""

import random
import re
import subprocess
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from bladellm_kernels.cuda_compiler import compile_cuda
from bladellm_kernels.packed_linear import MAX_ROWS, PackedSchedule, schedule_for, source

from tests.kernels.packed_support import MODEL
from tests.kernels.ring_support import Barrier, take_turns
from tests.support.cases import drawn_of

IDLE = 3000
"""Turns in a row in which nobody can go on, of a few dozen that there are."""


class Ring:
    """Stages with their barriers, what they hold, and who reads them."""

    def __init__(self, stages: int, warps: int) -> None:
        self.stages = stages
        self.full = [Barrier(1) for _ in range(stages)]
        self.empty = [Barrier(warps) for _ in range(stages)]
        self.held: dict[tuple[int, int], int] = {}
        self.readers: list[set[int]] = [set() for _ in range(stages)]

    def places(self) -> Iterator[tuple[int, int]]:
        """Stage and phase."""
        phase = 0
        while True:
            yield from ((stage, phase) for stage in range(self.stages))
            phase ^= 1


class RingsRun:
    """The rings of one CTA: two producers, their copies and the consumers' warps, each a generator that says whether it
    went on. broken: the rule that is left out."""

    def __init__(
        self, stages: tuple[int, int], groups: int, tiles: int, count: int, broken: str = "", ahead: bool = True
    ) -> None:
        self.groups, self.tiles, self.count, self.broken, self.ahead = groups, tiles, count, broken, ahead
        self.x, self.weight = (Ring(each, 4 * groups) for each in stages)
        self.under_way: list[tuple[Ring, int, int, int]] = []
        self.inputs_ready = False

    def producer(self, ring: Ring, tiles: int) -> Iterator[bool]:
        places = ring.places()
        while ring is self.x and not self.inputs_ready:
            yield False
        for step in range(self.count):
            stage, phase = next(places)
            waited = phase if self.broken == "waits for the phase itself" else phase ^ 1
            barriers = ring.full if self.broken == "fills what was not read" else ring.empty
            while not barriers[stage].passed(waited):
                yield False
            ring.full[stage].change(1, tiles)
            for tile in range(tiles):
                self.under_way.append((ring, stage, tile, step))
                yield True

    def copies(self) -> Iterator[bool]:
        """Copies land in any order."""
        while True:
            if self.under_way:
                ring, stage, tile, step = self.under_way.pop(random.randrange(len(self.under_way)))
                assert not ring.readers[stage], "a tile is written that is still read"
                ring.held[stage, tile] = step
                ring.full[stage].change(0, -1)
                yield True
            else:
                yield False

    def come_nearer(self) -> None:
        """What the kernel in front writes may be there from some turn on."""
        self.inputs_ready |= random.random() < 0.1

    def run(self) -> None:
        consumers = [Consumer(self, warp) for warp in range(4 * self.groups)]
        parts = {"x": self.producer(self.x, 1), "weight": self.producer(self.weight, self.tiles)}
        parts |= {str(consumer.warp): consumer.run() for consumer in consumers}
        take_turns(parts, self.copies(), IDLE, self.come_nearer)
        assert not self.under_way, "a tile is on its way where the sums will lie"
        assert all(consumer.ended == list(range(self.count)) for consumer in consumers)


class Consumer:
    """A warp. products: those under way, step, pairs that they read, and stage of x; ended: steps of the others."""

    def __init__(self, rings: RingsRun, warp: int) -> None:
        self.rings, self.warp, self.group = rings, warp, warp // 4
        self.x_places, self.weight_places = rings.x.places(), rings.weight.places()
        self.pairs: dict[str, int] = {}
        self.products: list[tuple[int, str, int]] = []
        self.ended: list[int] = []
        self.widened = self.multiplied = 0

    def run(self) -> Iterator[bool]:
        return self.run_ahead() if self.rings.ahead else self.run_in_turn()

    def run_in_turn(self) -> Iterator[bool]:
        """`add_products_in_turn`."""
        for _ in range(self.rings.count):
            yield from self.widen("pairs")
            yield from self.multiply("pairs")
            yield from self.end_products(0)

    def run_ahead(self) -> Iterator[bool]:
        """`add_products_ahead`."""
        count = self.rings.count
        yield from self.widen("even")
        yield from self.multiply("even")
        for _ in range(1, count - 1, 2):
            yield from self.add("odd")
            yield from self.add("even")
        if count % 2 == 0:
            yield from self.add("odd")
        self.wait(0)

    def add(self, pairs: str) -> Iterator[bool]:
        yield from self.widen("even" if self.rings.broken == "widens what products read" else pairs)
        yield from self.multiply(pairs)
        yield from self.end_products(1)

    def end_products(self, under_way: int) -> Iterator[bool]:
        """`wait_products` and what follows, of all but the newest."""
        stage = self.products[0][2]
        if self.rings.broken == "frees x before its products end":
            self.rings.x.empty[stage].change(1)
            yield True
        self.wait(under_way)
        if self.rings.broken != "frees x before its products end":
            self.rings.x.empty[stage].change(1)
        yield True

    def widen(self, pairs: str) -> Iterator[bool]:
        ring, (stage, phase) = self.rings.weight, next(self.weight_places)
        while self.rings.broken != "reads without waiting" and not ring.full[stage].passed(phase):
            yield False
        assert pairs not in [each[1] for each in self.products], "registers are written that products read"
        if self.rings.broken == "frees the weight before it is read":
            ring.empty[stage].change(1)
        ring.readers[stage].add(self.warp)
        yield True
        # Groups of no tile read what is there.
        self.pairs[pairs] = ring.held.get((stage, self.group), -1) if self.group < self.rings.tiles else self.widened
        assert self.pairs[pairs] == self.widened, "another tile of the weight"
        ring.readers[stage].discard(self.warp)
        self.widened += 1
        if self.rings.broken != "frees the weight before it is read":
            ring.empty[stage].change(1)
        yield True

    def multiply(self, pairs: str) -> Iterator[bool]:
        ring, (stage, phase) = self.rings.x, next(self.x_places)
        while not ring.full[stage].passed(phase):
            yield False
        assert ring.held[stage, 0] == self.pairs[pairs] == self.multiplied, "another tile of x"
        ring.readers[stage].add(self.warp)
        self.products.append((self.multiplied, pairs, stage))
        self.multiplied += 1
        yield True

    def wait(self, under_way: int) -> None:
        """`wait_products`, of all but the newest."""
        while len(self.products) > under_way:
            step, _, stage = self.products.pop(0)
            self.rings.x.readers[stage].discard(self.warp)
            self.ended.append(step)


def random_run(count: int, broken: str = "", most_stages: int = 6) -> RingsRun:
    groups = random.randint(1, 2)
    stages = random.randint(2, most_stages), random.randint(2, most_stages)
    # Where products end before the next tile is widened there are no registers that these still read.
    ahead = broken == "widens what products read" or random.random() < 0.5
    return RingsRun(stages, groups, random.randint(1, groups), count, broken, ahead)


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 6, 11, 24, 25])
def test_the_rings_are_filled_and_read_in_order(count):
    for _ in range(20):
        random_run(count).run()


@pytest.mark.parametrize(
    ("broken", "noticed"),
    [
        ("fills what was not read", "still read|another tile|nobody goes on"),
        ("waits for the phase itself", "nobody goes on"),
        ("reads without waiting", "still read|another tile of the weight"),
        ("frees x before its products end", "still read"),
        ("frees the weight before it is read", "still read|another tile of the weight"),
        ("widens what products read", "registers are written"),
    ],
)
def test_a_rule_that_is_left_out_is_noticed(broken, noticed):
    def run_often() -> None:
        for _ in range(50):
            random_run(24, broken, most_stages=3).run()

    with pytest.raises(AssertionError, match=noticed):
        run_often()


def test_one_stage_of_x_is_too_few():
    """Where a tile is widened ahead its tile of x is free when the products behind it have begun."""
    with pytest.raises(AssertionError, match="nobody goes on"):
        RingsRun((1, 2), 1, 1, 2).run()


def chosen_kernels() -> list[tuple[PackedSchedule, bool, bool]]:
    """Schedule, whether gated, and with a residual, of the model's layers."""
    found = {}
    for name, shape in MODEL.items():
        for rows in range(1, MAX_ROWS + 1):
            found[schedule_for(rows, *shape), name == "gate-up", name in ("o", "down")] = None
    return list(found)


@pytest.mark.parametrize("kernel", drawn_of(chosen_kernels(), 3), ids=str)
def test_compiled_for_a_hopper(kernel, tmp_path):
    """Without registers in memory; the products of a step follow each other, with one step under way or, in turn, none,
    and registers for two CTAs on an SM then."""
    from tests.kernels.sass import INSTRUCTION

    triton = pytest.importorskip("triton")
    path, tools = tmp_path / "kernel.cubin", Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    try:
        path.write_bytes(compile_cuda(*source(*kernel)))
    except OSError as error:
        pytest.skip(str(error))
    line = [str(tools / "cuobjdump"), "--dump-resource-usage", str(path)]
    report = subprocess.run(line, capture_output=True, text=True, check=True).stdout
    assert set(re.findall(r"(?:STACK|LOCAL):(\d+)", report)) == {"0"}
    text = subprocess.run([str(tools / "nvdisasm"), "-c", str(path)], capture_output=True, text=True, check=True).stdout
    lines = [line for line in text.splitlines() if INSTRUCTION.search(line)]
    names = [INSTRUCTION.search(line)[1] for line in lines]
    products = [place for place, name in enumerate(names) if name.startswith("HGMMA")]
    # The first step, two of the loop, and the last one of an even number; or the loop's alone.
    ahead = kernel[0].ahead
    assert len(products) == (4 * 4 if ahead else 4)
    steps = [products[place : place + 4] for place in range(0, len(products), 4)]
    for step in steps:
        between = set(names[step[0] : step[-1]])
        assert not {name for name in between if name.startswith(("WARPGROUP", "BRA", "BAR", "SYNCS", "LD", "ST"))}
    waits = [(place, line) for place, line in enumerate(lines) if "WARPGROUP.DEPBAR" in line]
    assert [place > products[-1] for place, line in waits if "gsb0, 0x0" in line] == [True]
    assert sum("gsb0, 0x1" in line for _, line in waits) == len(waits) - 1 == (3 if ahead else 0)
    registers, warps = int(re.search(r"REG:(\d+)", report)[1]), 4 * kernel[0].groups + 2
    assert ahead or 2 * warps * -(-registers // 8) * 8 * 32 <= 65536
    held = [{re.search(r" R\d+, (R\d+), gdesc", lines[place])[1] for place in step} for step in steps]
    assert all(len(each) == 4 for each in held)
    assert not any(one & following for one, following in pairwise(held))
