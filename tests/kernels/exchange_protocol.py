"""The protocol of `rank_exchange` as a state machine, a step each memory access, run in any order that may happen."""

import random
from collections.abc import Iterator
from dataclasses import dataclass, field

Word = tuple[int, int]
"""(call, rank) that sent it."""


class BrokenError(Exception):
    """A rank read words of another call, a word was lost, or one came where another still was."""


@dataclass
class SimulatedRank:
    """places[turn][rank][row] holds a word or None, empty; turns[row] the turn to come."""

    number: int
    places: list[list[list[Word | None]]]
    turns: list[int]
    call: int = 0
    programs: list[Iterator[str | None]] = field(default_factory=list)


@dataclass
class Simulation:
    """Ranks that make the same calls, call i of `calls[i]` rows. Words on their way arrive late and in any order."""

    ranks: int
    calls: list[int]
    seed: int
    kinds_of_turn: int
    empties: bool = True
    waits_for_end: bool = True

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        rows = max(self.calls)
        self.members = [
            SimulatedRank(
                number, [[[None] * rows for _ in range(self.ranks + 1)] for _ in range(self.kinds_of_turn)], [0] * rows
            )
            for number in range(self.ranks)
        ]
        self.underway: list[tuple[SimulatedRank, int, int, int, Word]] = []
        self.results: list[list[list[Word]]] = [[] for _ in range(self.ranks)]
        self.pace = [self.random.choice([1, 1, 5, 50]) for _ in range(self.ranks)]

    def run(self) -> None:
        """To the end of all calls. Raises BrokenError."""
        idle = 0
        while any(member.call < len(self.calls) or member.programs for member in self.members):
            idle = 0 if self.step() else idle + 1
            if idle > 20_000:
                raise BrokenError("all wait for words that never come")

    def step(self) -> bool:
        """One access by one program, or the arrival of one word. Returns whether anything but waiting was done."""
        if self.underway and self.random.random() < 0.3:
            self.arrive()
            return True
        member = self.random.choices(self.members, self.pace)[0]
        if not member.programs or (not self.waits_for_end and self.random.random() < 0.1):
            if member.call < len(self.calls):
                self.launch(member)
                return True
            if not member.programs:
                return False
        program = self.random.choice(member.programs)
        waiting = next(program, "ended")
        if waiting == "ended":
            member.programs.remove(program)
        return waiting != "waits"

    def launch(self, member: SimulatedRank) -> None:
        """Start a kernel: rows are dealt to programs, which may run in any order."""
        rows, programs = self.calls[member.call], self.random.randint(1, 3)
        for first in range(min(programs, rows)):
            member.programs.append(self.program(member, member.call, rows, first, programs))
        member.call += 1

    def arrive(self) -> None:
        target, turn, source, row, word = self.underway.pop(self.random.randrange(len(self.underway)))
        if target.places[turn][source][row] is not None:
            raise BrokenError("a word came where another still was")
        target.places[turn][source][row] = word

    def send(self, member: SimulatedRank, peer: SimulatedRank, turn: int, slot: int, row: int, word: Word) -> None:
        self.underway.append((peer, turn, slot, row, word))

    def empty(self, member: SimulatedRank, turn: int, slot: int, row: int) -> None:
        if self.empties:
            member.places[(turn - 1) % self.kinds_of_turn][slot][row] = None

    def wait(self, member: SimulatedRank, turn: int, slots: range, row: int) -> Iterator[str]:
        """Look until all words are there. Returns them."""
        words: list[Word | None] = [None]
        while None in words:
            words = []
            for slot in slots:
                words.append(member.places[turn][slot][row])
                yield "waits"
        return words

    def expect(self, found: list[Word | None], wanted: list[Word]) -> None:
        if found != wanted:
            raise BrokenError(f"read {found} in the place of {wanted}")

    def program(self, member: SimulatedRank, call: int, rows: int, first: int, programs: int) -> Iterator[str | None]:
        """What a program of `sum_ranks_kernel` or `gather_ranks_kernel` does, in its order."""
        for row in range(first, rows, programs):
            turn = member.turns[row]
            yield None
            for peer in self.members:
                self.send(member, peer, turn, member.number, row, (call, member.number))
                yield None
            for source in range(self.ranks):
                self.empty(member, turn, source, row)
                yield None
        for row in range(first, rows, programs):
            turn = member.turns[row]
            words = yield from self.wait(member, turn, range(self.ranks), row)
            self.expect(words, [(call, source) for source in range(self.ranks)])
            self.results[member.number].append(words)
            member.turns[row] = (turn + 1) % self.kinds_of_turn
            yield None


class TwoStepSimulation(Simulation):
    """The same of `sum_ranks_in_two_kernel`. The last slot of a rank is that of the sums."""

    def program(self, member: SimulatedRank, call: int, rows: int, first: int, programs: int) -> Iterator[str | None]:
        for row in range(first, rows, programs):
            turn = member.turns[row]
            yield None
            self.send(member, self.members[row % self.ranks], turn, member.number, row, (call, member.number))
            yield None
            self.empty(member, turn, self.ranks, row)
            yield None
        for row in range(first * self.ranks + member.number, rows, programs * self.ranks):
            turn = member.turns[row]
            yield None
            for source in range(self.ranks):
                self.empty(member, turn, source, row)
                yield None
            words = yield from self.wait(member, turn, range(self.ranks), row)
            self.expect(words, [(call, source) for source in range(self.ranks)])
            for peer in self.members:
                self.send(member, peer, turn, self.ranks, row, (call, member.number))
                yield None
        for row in range(first, rows, programs):
            turn = member.turns[row]
            words = yield from self.wait(member, turn, range(self.ranks, self.ranks + 1), row)
            self.expect(words, [(call, row % self.ranks)])
            self.results[member.number].append(words)
            member.turns[row] = (turn + 1) % self.kinds_of_turn
            yield None
