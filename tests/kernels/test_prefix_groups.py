"""Groups of sequences that share their first granules, against a search through all sets that begin alike."""

import random
from itertools import product

import pytest
from bladellm_kernels.prefix_groups import PrefixGroup, PrefixTree


def saved(group: PrefixGroup, members: int) -> int:
    return (len(group.rows) - -(-len(group.rows) // members)) * group.granules


def common(lists) -> int:
    length = min(map(len, lists))
    return next((index for index in range(length) if len({each[index] for each in lists}) > 1), length)


def most_saved(granules, members) -> int:
    """By any disjoint sets of all rows that begin alike."""
    found = {}
    for each in granules:
        for length in range(1, len(each) + 1):
            rows = tuple(row for row, other in enumerate(granules) if other[:length] == each[:length])
            found[rows] = PrefixGroup(rows, length)
    choices = product(*[(False, True)] * len(found))
    chosen = ([group for group, wanted in zip(found.values(), each, strict=True) if wanted] for each in choices)
    return max(sum(saved(group, members) for group in groups) for groups in chosen if disjoint(groups))


def disjoint(groups) -> bool:
    rows = [row for group in groups for row in group.rows]
    return len(rows) == len(set(rows))


def random_units(rows):
    """Lists that branch off one another, cut into units of one to three granules alike wherever they are alike."""
    lists, fresh = [[]], 0
    for _ in range(rows):
        other = random.choice(lists)
        own = []
        for _ in range(random.randint(0, 2)):
            own.append((fresh, random.randint(1, 3)))
            fresh += 3
        lists.append(other[: random.randint(0, len(other))] + own)
    return lists[1:]


def granules_of(units):
    return [first + index for first, count in units for index in range(count)]


def check_groups(tree, units, members):
    """units: of the rows in the tree."""
    granules = [granules_of(each) for each in units.values()]
    groups = tree.groups(members)
    assert disjoint(groups)
    for group in groups:
        assert len(group.rows) > 1
        assert group.granules == common([granules_of(units[row]) for row in group.rows]) > 0
    assert sum(saved(group, members) for group in groups) == most_saved(granules, members)


def test_nothing_saves_more():
    """While rows come and go."""
    for _ in range(30):
        tree, there, members = PrefixTree(), {}, random.choice([2, 3, 8])
        for row, units in enumerate(random_units(random.randint(1, 12))):
            tree.enter(row, units)
            there[row] = units
            if len(there) > 6 or random.random() < 0.3:
                tree.leave(gone := random.choice(list(there)))
                del there[gone]
            check_groups(tree, there, members)
        for row in there:
            tree.leave(row)
        assert tree.groups(members) == []
        assert not tree._root.children


def test_a_group_too_small_to_pay_is_none():
    tree = PrefixTree()
    assert tree.groups(4) == []
    for row in range(4):
        tree.enter(row, [(1, 2), (3, 1), (10 + row, 1)])
    assert tree.groups(4, 9) == [PrefixGroup((0, 1, 2, 3), 3)]
    assert tree.groups(4, 10) == []
    assert PrefixGroup((0, 1, 2, 3), 3).saved_tokens(4, 100) == 3 * 256


def test_a_row_enters_once():
    tree = PrefixTree()
    tree.enter(5, [(1, 1)])
    with pytest.raises(ValueError, match="row 5"):
        tree.enter(5, [(1, 1)])
    assert tree.changes == 1
