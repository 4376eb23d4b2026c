"""The exchange of words between ranks: its protocol in every order that may happen, and its kernels, interpreted."""

import math
import random
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from bladellm_kernels.all_reduce import all_reduce_reference
from bladellm_kernels.rank_exchange import EMPTY, SUM_UNITS, TURNS, Exchange, TwoShots, gather_units
from bladellm_kernels.rms_norm import rms_norm_reference

from tests.kernels.conditions import assert_close
from tests.kernels.exchange_protocol import BrokenError, Simulation, TwoStepSimulation
from tests.kernels.hopper import compiled_launches, spilled, waits_before_it_writes
from tests.kernels.rank_processes import run_forked_ranks
from tests.support.cases import examples

ROWS, COLUMNS = 3, 74
"""Units of 8 and 12 words, of which the last are short or empty."""

KINDS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def calls_of(seed: int, count: int) -> list[int]:
    return [random.Random(seed + index).randint(1, 4) for index in range(count)]


@pytest.mark.parametrize("kind", [Simulation, TwoStepSimulation])
@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_no_order_of_events_breaks_the_protocol(kind, ranks):
    for seed in random.sample(range(10_000), examples(40) // ranks):
        print("seed", seed)
        simulation = kind(ranks, calls_of(seed, 12), seed, TURNS)
        simulation.run()
        assert [len(found) for found in simulation.results] == [sum(simulation.calls)] * ranks


@pytest.mark.turns
@pytest.mark.parametrize(
    ("kind", "missing"),
    [
        (Simulation, {"kinds_of_turn": 2}),  # which would do for two steps
        (Simulation, {"empties": False}),
        (Simulation, {"waits_for_end": False}),
        (TwoStepSimulation, {"empties": False}),
        (TwoStepSimulation, {"waits_for_end": False}),
    ],
)
def test_the_simulation_finds_what_each_part_of_the_protocol_is_for(kind, missing):
    found = 0
    for seed in range(60):
        try:
            kind(2, calls_of(seed, 12), seed, **{"kinds_of_turn": TURNS, **missing}).run()
        except BrokenError:
            found += 1
    assert found > 5


def shared_exchange(folder: Path, rank: int, ranks: int, slots: int, words: int, units: int) -> Exchange:
    """Files in the place of the GPUs' memory, mapped by every process."""
    shape = (TURNS, slots, ROWS, words)
    files = [str(folder / f"{peer}") for peer in range(ranks)]
    memory = [torch.from_file(file, shared=True, size=math.prod(shape), dtype=torch.int32) for file in files]
    return Exchange(tuple(each.view(shape) for each in memory), torch.zeros(ROWS, units, dtype=torch.int32), rank)


@dataclass
class Exchanges:
    """Those of rows of one type, in folders named after them."""

    sums: Exchange
    gathers: Exchange
    two: TwoShots

    @classmethod
    def shared(cls, folder: Path, rank: int, ranks: int, words: int) -> "Exchanges":
        made = [
            shared_exchange(folder / name, rank, ranks, slots, words, units)
            for name, slots, units in (
                ("sums", ranks, SUM_UNITS), ("gathers", ranks, gather_units(words)), ("parts", ranks, 1), ("two", 1, 1)
            )
        ]  # fmt: skip
        return cls(made[0], made[1], TwoShots(made[2], made[3]))


def rounded(x: torch.Tensor, kind: torch.dtype) -> torch.Tensor:
    """float32 in that type, as the interpreter does it: it cuts bfloat16 off."""
    return (x.view(torch.int32) & -(1 << 16)).view(torch.float32).bfloat16() if kind == torch.bfloat16 else x.to(kind)


def slow_stores() -> None:
    """Let each store of the interpreter come late now and then, by chance."""
    from triton.runtime.interpreter import InterpreterBuilder

    store = InterpreterBuilder.create_masked_store

    def late_store(*arguments):
        if random.random() < 0.05:
            time.sleep(random.random() / 200)
        return store(*arguments)

    InterpreterBuilder.create_masked_store = late_store


def be_rank(rank: int, ranks: int, name: str, calls: int, seed: int, folder: str) -> None:
    """One of the processes: random calls, each result compared with what all ranks' inputs, known to all, give."""
    from bladellm_kernels import rank_gather_triton, rank_sums_triton, rank_two_shots_triton

    rank_sums_triton.multiprocessors = rank_gather_triton.multiprocessors = lambda device: 3
    # Programs are interpreted one after another, and those that add rows wait for others to send them.
    rank_two_shots_triton.multiprocessors = lambda device: 1
    slow_stores()
    chance, kind = random.Random(seed), KINDS[name]
    exchanges = Exchanges.shared(Path(folder), rank, ranks, COLUMNS * kind.itemsize // 4)
    for _ in range(calls):
        torch.manual_seed(chance.randrange(2**40))
        parts = list(torch.randn(ranks, chance.randint(1, ROWS), COLUMNS).to(kind))
        for part in parts:  # all kinds of zeros, and what only looks like an empty place
            part[torch.rand(part.shape) < 0.1] = -0.0
            part[torch.rand(part.shape) < 0.1] = 0.0
        check_call(chance.choice(["all_reduce", "norm", "delayed", "gather"]), chance, parts, exchanges)


def check_call(what: str, chance: random.Random, parts: list[torch.Tensor], exchanges: Exchanges) -> None:
    from bladellm_kernels.rank_gather_triton import launch_gather_ranks
    from bladellm_kernels.rank_sums_triton import launch_sum_ranks
    from bladellm_kernels.rank_two_shots_triton import launch_sum_ranks_in_two

    own, kind, split = parts[exchanges.sums.rank].clone(), parts[0].dtype, chance.choice([1, 2, 8])
    two = chance.random() < 0.5
    split = 1 if two or what == "norm" else split
    launch = partial(launch_sum_ranks_in_two, exchanges.two) if two else partial(launch_sum_ranks, exchanges.sums)
    residual, weight = torch.randn(own.shape).to(kind), torch.randn(COLUMNS).to(kind)
    out, polls, more = torch.full_like(own, torch.nan), 10**5, () if two else (split,)
    if what == "gather":
        out = own.new_full((len(own), len(parts) * COLUMNS), torch.nan)
        launch_gather_ranks(exchanges.gathers, own, out, polls)
        assert torch.equal(out, torch.cat(parts, 1))
        return
    if what == "all_reduce":
        launch(own, own, *more, polls=polls)
        assert torch.equal(own, rounded(all_reduce_reference(parts), kind))
        return
    expected = rounded(all_reduce_reference(parts) + residual.float(), kind)
    squares = torch.full((len(own), split), torch.nan) if what == "delayed" else None
    launch(own, residual, *more, residual, weight, 1e-5, out, squares, polls)
    if squares is not None:
        torch.testing.assert_close(squares.sum(1), expected.float().square().sum(1))
        factor = torch.rsqrt(squares.sum(1, keepdim=True) / COLUMNS + 1e-5)
        out = (out.float() * factor).to(kind)
    assert torch.equal(residual, expected)
    assert_close(out, rms_norm_reference(expected, weight, 1e-5), kind)


def run_interpreted_ranks(ranks: int, kind: str, calls: int, folder: Path) -> None:
    for name, slots in (("sums", ranks), ("gathers", ranks), ("parts", ranks), ("two", 1)):
        (folder / name).mkdir()
        words = TURNS * slots * ROWS * COLUMNS * KINDS[kind].itemsize // 4
        for rank in range(ranks):
            np.full(words, EMPTY, np.int32).tofile(folder / name / str(rank))
    arguments = (kind, calls, random.randrange(2**30), str(folder))
    run_forked_ranks("tests.kernels.test_rank_exchange", "be_rank", ranks, *arguments, interpreted=True)


def test_ranks_in_processes_agree(tmp_path):
    pytest.importorskip("triton")
    run_interpreted_ranks(2, "bfloat16", 6, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_in_processes_agree_for_long(ranks, kind, tmp_path):
    pytest.importorskip("triton")
    run_interpreted_ranks(ranks, kind, 25, tmp_path)


def exchange_of(ranks: int, rows: int, words: int, units: int, slots: int | None = None) -> Exchange:
    peers = tuple(torch.empty(TURNS, slots or ranks, rows, words, dtype=torch.int32) for _ in range(ranks))
    return Exchange(peers, torch.zeros(rows, units, dtype=torch.int32), ranks - 1)


@pytest.mark.parametrize(("ranks", "parts"), [(2, 1), (8, 8)])
def test_the_kernels_compile_for_hopper(ranks, parts):
    """16 bytes at a time, what others write read from memory each time, no spills, and no store before the wait."""
    pytest.importorskip("triton")
    from bladellm_kernels.rank_gather_triton import launch_gather_ranks
    from bladellm_kernels.rank_sums_triton import launch_sum_ranks
    from bladellm_kernels.rank_two_shots_triton import launch_sum_ranks_in_two

    y, weight = torch.empty(16, 4096, dtype=torch.bfloat16), torch.empty(4096, dtype=torch.bfloat16)
    squares = torch.empty(16, parts) if parts > 1 else None
    with compiled_launches() as compiled:
        launch_sum_ranks(exchange_of(ranks, 64, 2048, SUM_UNITS), y, y, parts, y, weight, 1e-5, y, squares)
        units = gather_units(4096)
        launch_gather_ranks(exchange_of(ranks, 64, 4096, units), torch.empty(8, 4096), torch.empty(8, ranks * 4096))
        two = TwoShots(exchange_of(ranks, 64 // ranks, 2048, 1), exchange_of(ranks, 64, 2048, 1, slots=1))
        launch_sum_ranks_in_two(two, y, y, y, weight, 1e-5, y)
    assert len(compiled) == 3
    for name, kernel in compiled.items():
        ptx = kernel.asm["ptx"]
        assert ptx.count("ld.volatile.global.v4") == ptx.count("ld.volatile.global") >= 2 * ranks, name
        assert ptx.count("st.global.v4") >= 2 * ranks, name
        assert "st.global.b16" not in ptx, name
        assert "trap;" in ptx, name
        assert waits_before_it_writes(ptx), name
        assert spilled(ptx) == 0, name
