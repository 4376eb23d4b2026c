"""Compilation off the caller's thread: once each, in time, within bytes, live matchers kept."""

import json
import random
import resource
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from bladellm_runtime.guided.compiler import Compiler
from bladellm_runtime.guided.constraint import ConstraintError
from bladellm_runtime.guided.llguidance_backend import LlguidanceBackend
from bladellm_runtime.request import Constraint, ConstraintKind
from tests.guided.samples import write
from tests.support.live import until


class Compiled:
    byte_count = 100

    def matcher(self) -> "Matcher":
        return Matcher()


class Matcher:
    pass


class SlowBackend:
    """Compiles when told; `bad` is refused, `fault` raises what no back end should."""

    name = "slow"
    copies = 1

    def __init__(self) -> None:
        self.go, self.calls = threading.Event(), []

    def compile(self, constraint: Constraint, deadline: float) -> Compiled:
        self.calls.append(constraint.source)
        if constraint.source == "bad":
            raise ConstraintError("guided_regex is bad", "guided_regex")
        if constraint.source == "fault":
            raise ZeroDivisionError
        if constraint.source.startswith("slow"):
            self.go.wait(60)
        return Compiled()


def regex(source: str) -> Constraint:
    return Constraint(ConstraintKind.REGEX, source, "guided_regex")


@pytest.fixture
def backend():
    backend = SlowBackend()
    yield backend
    backend.go.set()


@pytest.fixture
def slow(backend: SlowBackend):
    """Its deadline and its memory of refusals are never reached, unless a test lowers them."""
    made = Compiler(backend, max_bytes=350, deadline=60, refusal_seconds=60)
    yield made
    backend.go.set()
    made.close()


def test_equal_constraints_are_compiled_once(backend: SlowBackend, slow: Compiler) -> None:
    with ThreadPoolExecutor(8) as pool:
        futures = [pool.submit(slow.submit, regex("slow")) for _ in range(8)]
        backend.go.set()
        assert len({future.result().result() for future in futures}) == 1
    assert slow.compile(regex("slow")) is futures[0].result().result()
    counts = slow.counts()
    assert backend.calls == ["slow"]
    assert (counts.misses, counts.hits + counts.joined, counts.entries, counts.byte_count) == (1, 8, 1, 100)


def test_past_the_deadline_only_the_slow_one_fails(backend: SlowBackend, slow: Compiler) -> None:
    slow.deadline, slow.refusal_seconds = 0.4, 0.0
    futures = [slow.submit(regex(f"slow {i}")) for i in range(3)]
    assert slow.submit(regex("quick")).result(30)
    for future in futures:
        with pytest.raises(ConstraintError, match="to compile"):
            future.result(30)
    assert slow.counts().expired == 3
    slow.deadline = 60
    backend.go.set()
    assert slow.compile(regex("slow 1"))


def test_threads_that_never_end_are_bounded(backend: SlowBackend, slow: Compiler) -> None:
    slow.deadline = 0.2
    for i in range(4):
        with pytest.raises(ConstraintError):
            slow.compile(regex(f"slow {i}"))
    slow.deadline = 60
    with pytest.raises(ConstraintError, match="try again"):
        slow.compile(regex("quick"))
    backend.go.set()
    assert until(lambda: slow.submit(regex("quick")).exception() is None)


def test_refusals_are_remembered_for_a_while(backend: SlowBackend, slow: Compiler) -> None:
    for _ in range(3):
        with pytest.raises(ConstraintError, match="bad"):
            slow.compile(regex("bad"))
    assert backend.calls == ["bad"]


def test_refusals_are_forgotten(backend: SlowBackend, slow: Compiler) -> None:
    slow.refusal_seconds = 0.01
    for _ in range(2):
        with pytest.raises(ConstraintError):
            slow.compile(regex("bad"))
        time.sleep(0.02)
    assert backend.calls == ["bad", "bad"]


def test_a_fault_of_a_back_end_ends_one_request(slow: Compiler) -> None:
    with pytest.raises(ConstraintError, match="ZeroDivisionError"):
        slow.compile(regex("fault"))
    assert slow.compile(regex("quick"))


def test_live_matchers_keep_their_constraint(slow: Compiler) -> None:
    held = slow.compile(regex("held"))
    matcher = slow.matcher(held)
    for i in range(50):
        slow.compile(regex(f"q{i}"))
        assert slow.counts().byte_count <= slow.max_bytes
    assert slow.compile(regex("held")) is held
    del matcher
    for i in range(50, 60):
        slow.compile(regex(f"q{i}"))
    assert slow.compile(regex("held")) is not held
    assert slow.counts().evicted >= 55


def test_what_is_discarded_is_compiled_anew(backend: SlowBackend, slow: Compiler) -> None:
    kept, other = slow.compile(regex("kept")), slow.compile(regex("other"))
    slow.discard(other)
    slow.discard(other)
    assert slow.counts().byte_count == 100
    assert slow.compile(regex("kept")) is kept
    assert slow.compile(regex("other")) is not other
    assert backend.calls == ["kept", "other", "other"]


def distinct(number: int) -> Constraint:
    """A schema unlike that of any other number, of several lexemes."""
    kinds = ({"type": "string", "maxLength": 5 + number % 40}, {"type": "integer", "minimum": number})
    properties = {f"field {number} {index}": kinds[index % 2] for index in range(6)}
    schema = {"type": "object", "properties": properties, "required": list(properties)[::2]}
    return Constraint(ConstraintKind.JSON, json.dumps(schema), "guided_json")


def resident() -> int:
    """Bytes of this process in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def check_many(llguidance: LlguidanceBackend, count: int) -> None:
    """Many schemas in a row, some followed for a while, three in use all the time."""
    compiler, rng = Compiler(llguidance, max_bytes=2**22), random.Random(count)
    held = [compiler.compile(distinct(-1 - number)) for number in range(3)]
    live, before = [compiler.matcher(ready) for ready in held], resident()
    for number in range(count):
        matcher = compiler.matcher(compiler.compile(distinct(number)))
        if number % 20 == 0:
            write(matcher, llguidance.vocabulary, rng, 40)
        assert compiler.counts().byte_count <= compiler.max_bytes
    del matcher
    assert resident() - before < 2**22 + 2**26
    assert [compiler.compile(distinct(-1 - number)) for number in range(3)] == held
    assert len(live) == 3
    counts = compiler.counts()
    assert counts.entries < 60
    assert counts.evicted > count - 60
    assert counts.seconds > 0
    compiler.close()


def test_many_schemas_stay_within_their_bytes(llguidance: LlguidanceBackend) -> None:
    check_many(llguidance, 150)


@pytest.mark.slow
def test_ten_thousand_schemas_stay_within_their_bytes(llguidance: LlguidanceBackend) -> None:
    check_many(llguidance, 10_000)
