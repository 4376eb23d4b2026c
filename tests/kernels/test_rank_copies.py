"""Sums of two ranks whose rows copy engines send: their protocol in any order, and their kernels, interpreted."""

import random
from collections.abc import Iterator
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from bladellm_kernels import rank_copies
from bladellm_kernels.all_reduce import all_reduce_reference
from bladellm_kernels.rank_copies import RankCopies, signed
from bladellm_kernels.rank_exchange import EMPTY, TURNS, Exchange
from bladellm_kernels.rms_norm import rms_norm_reference

from tests.kernels.conditions import assert_close
from tests.kernels.hopper import compiled_launches, spilled, waits_before_it_writes
from tests.kernels.interpreted import run_interpreted

PARTS = 2


class BrokenError(Exception):
    """A rank read other rows than those it waited for."""


class Rank:
    """A GPU's two streams, which go on by themselves. places[turn][part]: whose rows are there; None while they come.

    Products and copies take a while: a step of theirs each, between which anything else may happen.
    """

    def __init__(self, turns: int, waits: bool) -> None:
        self.turns, self.waits = turns, waits
        self.places = [[(-1, -1)] * PARTS for _ in range(turns)]
        self.count = self.products = self.sent = 0

    def main(self, layers: int) -> Iterator[None]:
        for layer in range(layers):
            for _ in range(PARTS):
                self.products += 1
                yield
            for part in range(PARTS):
                number = layer * PARTS + part + 1
                while self.waits and (self.sent < number or self.count < number):
                    yield
                for _ in range(2):
                    if self.places[layer % self.turns][part] != (layer, part):
                        raise BrokenError
                    yield

    def copies(self, other: "Rank", layers: int) -> Iterator[None]:
        for number in range(1, layers * PARTS + 1):
            layer, part = divmod(number - 1, PARTS)
            while self.products < number:
                yield
            other.places[layer % self.turns][part] = None
            yield
            other.places[layer % self.turns][part] = (layer, part)
            yield
            other.count = number
            yield
            self.sent = number


def run_in_some_order(seed: int, turns: int, waits: bool = True, layers: int = 9) -> None:
    chance = random.Random(seed)
    ranks = [Rank(turns, waits), Rank(turns, waits)]
    streams = [rank.main(layers) for rank in ranks]
    streams += [ranks[one].copies(ranks[1 - one], layers) for one in (0, 1)]
    pace = {id(stream): chance.choice([1, 1, 5, 50]) for stream in streams}
    for _ in range(100_000):
        if not streams:
            return
        stream = chance.choices(streams, [pace[id(each)] for each in streams])[0]
        if next(stream, "ended") == "ended":
            streams.remove(stream)
    raise BrokenError("all wait for rows that never come")


def test_no_order_of_streams_breaks_the_protocol():
    for seed in range(60):
        run_in_some_order(seed, TURNS)


@pytest.mark.parametrize("missing", [{"turns": 1}, {"turns": TURNS, "waits": False}])
def test_the_simulation_finds_what_turns_and_counts_are_for(missing):
    found = 0
    for seed in range(60):
        try:
            run_in_some_order(seed, **missing)
        except BrokenError:
            found += 1
    assert found > 5


def test_counts_go_round_all_bits():
    assert [signed(sends) for sends in (1, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**32 + 5)] == [
        1, 2**31 - 1, -(2**31), -1, 0, 5
    ]  # fmt: skip


class StreamOfCpu:
    """Does everything at once."""

    def wait_stream(self, other: "StreamOfCpu") -> None: ...

    def wait_event(self, event: None) -> None: ...

    def record_event(self) -> None: ...


def write_at_once(count: torch.Tensor, sends: int) -> None:
    count.fill_(signed(sends))


def interpreted() -> None:
    """Both ranks in one process: what they start, and add up when both have."""
    stream = StreamOfCpu()
    cuda = SimpleNamespace(
        Stream=lambda *given: stream, current_stream=lambda *given: stream, stream=nullcontext, Event=object
    )
    rank_copies.torch = SimpleNamespace(cuda=cuda, int32=torch.int32, Tensor=torch.Tensor)
    rank_copies.write_count = write_at_once
    for dtype, hidden in ((torch.float32, 70), (torch.float16, 128)):
        words = hidden * dtype.itemsize // 4
        peers = tuple(torch.full((TURNS, 1, 12, words), EMPTY, dtype=torch.int32) for _ in range(2))
        ranks = [RankCopies(Exchange(peers, torch.zeros(12, 1, dtype=torch.int32), rank), dtype) for rank in (0, 1)]
        for copies in ranks:
            copies._sends = 2**32 - 5
        for _ in range(TURNS + 2):
            check_layer(ranks, random.randint(2, 11), hidden, dtype)


def check_layer(ranks: list[RankCopies], rows: int, hidden: int, dtype: torch.dtype) -> None:
    assert [ranks[0].takes(torch.zeros(each, hidden, dtype=dtype), 0) for each in (11, 12)] == [True, False]
    assert not ranks[0].takes(torch.zeros(1, 2 * hidden, dtype=dtype), 0)
    cut = random.randint(1, rows - 1)
    y, residual, weight = (torch.randn(size).to(dtype) for size in ((2, rows, hidden), (rows, hidden), (hidden,)))
    started = [
        [copies.start(y[rank][part], part.start) for part in (slice(0, cut), slice(cut, rows))]
        for rank, copies in enumerate(ranks)
    ]
    expected = (all_reduce_reference(list(y)) + residual.float()).to(dtype)
    for sums in started:
        total, normed = residual.clone(), torch.full_like(residual, torch.nan)
        for pending, part in zip(sums, (slice(0, cut), slice(cut, rows)), strict=True):
            pending.add_norm(total[part], weight, 1e-5, normed[part])
        assert torch.equal(total, expected)
        assert_close(normed, rms_norm_reference(expected, weight, 1e-5), dtype)


def test_interpreted():
    pytest.importorskip("triton")
    run_interpreted("tests.kernels.test_rank_copies", "interpreted")


def test_the_kernels_compile_for_hopper():
    """16 bytes at a time, the count read from memory each time, no spills, and no store before the wait."""
    pytest.importorskip("triton")
    from bladellm_kernels.rank_copies_triton import launch_add_both_norm, launch_wait_for_rows

    y, weight = torch.empty(1024, 4096, dtype=torch.bfloat16), torch.empty(4096, dtype=torch.bfloat16)
    with compiled_launches() as compiled:
        for number in (1, -5):
            launch_wait_for_rows(torch.zeros(1, dtype=torch.int32), number)
        launch_add_both_norm(y, y, y, weight, 1e-5, y)
    wait, add = (compiled[name].asm["ptx"] for name in ("wait_for_rows_kernel", "add_both_norm_kernel"))
    assert "ld.volatile.global" in wait
    assert "trap;" in wait
    assert wait.find("griddepcontrol.wait") < wait.find("ld.volatile.global")
    assert add.count("st.global.v4") == add.count("st.global") >= 2
    assert add.count("ld.global.v4") >= 4
    assert waits_before_it_writes(add)
    assert spilled(wait) == spilled(add) == 0
