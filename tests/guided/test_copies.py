"""Copies of a constraint that many requests have: as many as pay, matchers spread over them, the same masks."""

import random
import threading
import time

import numpy as np
import pytest

from bladellm_runtime.guided.backend import Matcher
from bladellm_runtime.guided.compiled_cache import MATCHERS_A_COPY
from bladellm_runtime.guided.compiler import COPY_SECONDS, Compiler
from bladellm_runtime.guided.constraint import ConstraintError
from bladellm_runtime.guided.fsm.backend import FsmBackend
from bladellm_runtime.guided.llguidance_backend import LlguidanceBackend
from bladellm_runtime.request import Constraint, ConstraintKind
from tests.guided.samples import write

PEOPLE = Constraint(
    ConstraintKind.JSON,
    '{"type":"array","minItems":9,"items":{"type":"object","properties":{"name":{"type":"string","maxLength":7},'
    '"age":{"type":"integer"}},"required":["name","age"]}}',
    "guided_json",
)
WAIT_S = 30


class Copied:
    """What `CopyingBackend` compiles: it knows its number."""

    byte_count = 100

    def __init__(self, number: int) -> None:
        self.number = number

    def matcher(self) -> "CopiedMatcher":
        return CopiedMatcher(self.number)


class CopiedMatcher:
    def __init__(self, number: int) -> None:
        self.number = number


class CopyingBackend:
    """Compiles at once, or in `seconds`; past `most` it refuses."""

    name = "copying"

    def __init__(self, copies: int, seconds: float = 0.0, most: int = 1000) -> None:
        self.copies, self.seconds, self.most, self.made = copies, seconds, most, 0
        self._lock = threading.Lock()

    def compile(self, constraint: Constraint, deadline: float) -> Copied:
        time.sleep(self.seconds)
        with self._lock:
            self.made += 1
            if self.made > self.most:
                raise ConstraintError("guided_json is compiled no more", "guided_json")
            return Copied(self.made)


def matchers_of(compiler: Compiler, count: int) -> list[Matcher]:
    """For so many requests at once, as the engine asks for them."""
    futures, matchers = [compiler.submit(PEOPLE) for _ in range(count)], []
    for future in futures:
        if compiler.is_full(future.result(WAIT_S)):
            future = compiler.submit(PEOPLE)
        matchers.append(future)
    # Second answers come while others still ask: all of them are waited for only now.
    return [compiler.matcher(future.result(WAIT_S)) for future in matchers]


def one_after_another(compiler: Compiler, count: int) -> list[Matcher]:
    """Requests of which each begins when the one before it has its matcher."""
    return [compiler.matcher(compiler.compile(PEOPLE)) for _ in range(count)]


def loads(matchers: list[Matcher]) -> list[int]:
    numbers = [matcher.number for matcher in matchers if isinstance(matcher, CopiedMatcher)]
    return sorted(numbers.count(number) for number in set(numbers))


@pytest.fixture
def copying(request: pytest.FixtureRequest):
    backend = CopyingBackend(**request.param)
    compiler = Compiler(backend, max_bytes=2000, deadline=60)
    yield backend, compiler
    compiler.close()


@pytest.mark.parametrize("copying", [{"copies": 4}], indirect=True)
def test_matchers_are_spread_over_as_many_copies_as_they_fill(copying) -> None:
    backend, compiler = copying
    few = one_after_another(compiler, MATCHERS_A_COPY)
    assert (backend.made, loads(few)) == (1, [MATCHERS_A_COPY])
    more = one_after_another(compiler, 1)
    assert (backend.made, loads(few + more)) == (2, [1, MATCHERS_A_COPY])
    many = one_after_another(compiler, 10 * MATCHERS_A_COPY - len(few + more))
    assert (backend.made, compiler.counts().copies, compiler.counts().misses) == (4, 3, 1)
    assert loads(few + more + many) == [10, 10, 10, 10]
    assert (compiler.counts().entries, compiler.counts().byte_count) == (1, 400)
    del few, more, many
    again = one_after_another(compiler, 4)
    assert (backend.made, loads(again)) == (4, [1, 1, 1, 1])


@pytest.mark.parametrize("copying", [{"copies": 16, "seconds": 0.002}], indirect=True)
def test_requests_that_come_at_once_do_not_share_one(copying) -> None:
    backend, compiler = copying
    futures = [compiler.submit(PEOPLE) for _ in range(64)]
    (compiled,) = {future.result(WAIT_S) for future in futures}
    assert backend.made == 1
    first = [compiler.matcher(compiled) for _ in range(MATCHERS_A_COPY)]
    rest = [compiler.submit(PEOPLE, again=True) for _ in range(64 - MATCHERS_A_COPY)]
    rest_matchers = [compiler.matcher(future.result(WAIT_S)) for future in rest]
    assert loads(first + rest_matchers) == [4] * 16
    counts = compiler.counts()
    assert (counts.hits, counts.joined, counts.misses, counts.copies) == (0, 63, 1, 15), "each request counts once"


@pytest.mark.parametrize("copying", [{"copies": 8}], indirect=True)
def test_however_requests_come_all_get_a_matcher(copying) -> None:
    backend, compiler = copying
    held: list[Matcher] = []
    rng = random.Random()
    for _ in range(40):
        held += matchers_of(compiler, rng.randint(1, 40))
        rng.shuffle(held)
        del held[: rng.randint(0, len(held))]
        assert compiler.counts().byte_count == 100 * backend.made <= 800


@pytest.mark.parametrize("copying", [{"copies": 4, "seconds": 1.2 * COPY_SECONDS}], indirect=True)
def test_nobody_waits_for_a_copy_that_takes_long(copying) -> None:
    backend, compiler = copying
    matchers = one_after_another(compiler, 20)
    assert (backend.made, loads(matchers)) == (1, [20])


@pytest.mark.parametrize("copying", [{"copies": 8, "most": 3}], indirect=True)
def test_where_a_copy_cannot_be_made_its_requests_share(copying) -> None:
    backend, compiler = copying
    matchers = one_after_another(compiler, 40)
    assert (backend.made, len(loads(matchers)), sum(loads(matchers))) == (4, 3, 40)
    assert compiler.counts().refused == 0


@pytest.mark.parametrize("copying", [{"copies": 64}], indirect=True)
def test_copies_stay_within_the_bytes(copying) -> None:
    backend, compiler = copying
    matchers = one_after_another(compiler, 200)
    assert compiler.counts().byte_count == 2000
    assert backend.made == 21  # the last found no room, and no more were tried
    assert len(loads(matchers)) == 21


@pytest.mark.parametrize("copying", [{"copies": 4}], indirect=True)
def test_all_copies_are_discarded_together(copying) -> None:
    backend, compiler = copying
    matchers = one_after_another(compiler, 16)
    compiler.discard(compiler.compile(PEOPLE))
    assert (compiler.counts().entries, compiler.counts().byte_count) == (0, 0)
    assert len(matchers) == 16
    compiler.compile(PEOPLE)
    assert backend.made == 5


def test_masks_of_copies_are_those_of_one(llguidance: LlguidanceBackend, fsm: FsmBackend) -> None:
    """Matchers of several copies, at places of their own, in one call: each row is what its matcher alone says."""
    assert llguidance.copies >= fsm.copies == 1
    rng = random.Random()
    copies = [llguidance.compile(PEOPLE, time.monotonic() + WAIT_S) for _ in range(3)]
    order = [rng.randrange(3) for _ in range(11)]
    seed, lengths = rng.random(), [rng.randint(0, 30) for _ in order]
    matchers = [copies[index].matcher() for index in order]
    alone = [copies[0].matcher() for _ in order]
    for group in (matchers, alone):
        for matcher, length in zip(group, lengths, strict=True):
            write(matcher, llguidance.vocabulary, random.Random(f"{seed} {length}"), length)
    masks = np.empty((20, llguidance.vocabulary.words), np.int32)
    rows = rng.sample(range(20), len(order))
    assert llguidance.fill_masks(matchers, masks, rows) == [None] * len(order)
    for matcher, row in zip(alone, rows, strict=True):
        expected = np.empty(llguidance.vocabulary.words, np.int32)
        matcher.fill_mask(expected)
        assert (masks[row] == expected).all()
