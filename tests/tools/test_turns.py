"""Families of long tests take turns: a run leaves half of each out, and in time all of them run."""

import pytest

from tests.support import cases
from tests.support.cases import resting


class Item:
    """What is looked at of a test, which has a text that is the same in all processes."""

    def __init__(self, name: str, *marks: pytest.MarkDecorator) -> None:
        self.name, self.nodeid = name, f"test.py::{name}"
        self._marks = {mark.name: mark.mark for mark in marks}

    def __repr__(self) -> str:
        return f"<Function {self.name}>"

    def get_closest_marker(self, name: str) -> pytest.Mark | None:
        return self._marks.get(name)


def names_of_resting(items: list[Item]) -> set[str]:
    return {found.name for found in resting(items)}


def family(name: str, count: int) -> list[Item]:
    return [Item(f"{name} {number}", pytest.mark.turns(name)) for number in range(count)]


@pytest.mark.parametrize(("count", "left_out"), [(1, 0), (2, 1), (5, 2)])
def test_half_of_a_family_rests_and_never_a_test_that_is_asked_for_alone(count: int, left_out: int) -> None:
    others = [Item("without"), Item("slow anyway", pytest.mark.turns("family"), pytest.mark.slow)]
    rest = names_of_resting([*others, *family("family", count), *family("another", 4)])
    assert len([name for name in rest if name.startswith("family")]) == left_out
    assert len([name for name in rest if name.startswith("another")]) == 2
    assert len(rest) == left_out + 2


def test_cases_of_a_test_are_a_family() -> None:
    items = [Item(f"{test}[{number}]", pytest.mark.turns) for test in ("one", "two") for number in range(6)]
    rest = names_of_resting(items)
    assert [sum(name.startswith(test) for name in rest) for test in ("one", "two")] == [3, 3]


def test_all_processes_of_a_run_draw_alike_and_runs_differ(monkeypatch) -> None:
    found = []
    for run in range(40):
        monkeypatch.setattr(cases, "RUN", str(run))
        drawn = names_of_resting(family("family", 4))
        assert drawn == names_of_resting(family("family", 4))
        found.append(frozenset(drawn))
    assert set().union(*found) == {f"family {number}" for number in range(4)}
    assert len(set(found)) > 3
