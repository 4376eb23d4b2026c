"""In which order endpoints, levels and repeats are measured."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from bladellm_tools.bench.endpoints import Endpoint
from bladellm_tools.bench.records import Load

Order = Literal["abab", "random"]


@dataclass(frozen=True)
class Turn:
    """One repeat of one level at one endpoint."""

    endpoint: Endpoint
    load: Load
    repeat: int


def make_turns(
    endpoints: Sequence[Endpoint], loads: Sequence[Load], repeats: int, order: Order, seed: int
) -> list[Turn]:
    """All turns, endpoints one after the other so that none has the quieter hour of the machine.

    Servers that run already are compared level by level: A B, B A, A B. Servers of command lines may need the same GPU
    and are started and stopped by turns, so their turns are whole sweeps: A B B A A B, two in a row with one start.
    """
    if len(endpoints) > 1 and any(endpoint.command for endpoint in endpoints):
        rounds = takes_turns(endpoints, repeats, order, seed)
        return [
            Turn(endpoint, load, repeat)
            for repeat, row in enumerate(rounds)
            for endpoint in row
            for load in loads
        ]  # fmt: skip
    rounds = takes_turns(endpoints, len(loads) * repeats, order, seed)
    return [
        Turn(endpoint, load, repeat) for load in loads for repeat in range(repeats) for endpoint in next(rounds)
    ]  # fmt: skip


def takes_turns(endpoints: Sequence[Endpoint], rounds: int, order: Order, seed: int) -> Iterator[list[Endpoint]]:
    """The order of the endpoints in every round: forwards and backwards by turns, or shuffled."""
    shuffle = random.Random(seed).shuffle
    for number in range(rounds):
        row = list(endpoints) if number % 2 == 0 else list(reversed(endpoints))
        if order == "random":
            shuffle(row)
        yield row
