"""Groups of sequences that share their first granules, against a search through all sets that begin alike."""

import random
from itertools import product

from bladellm_kernels.prefix_groups import PrefixGroup, prefix_groups


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


def random_granules(rows):
    """Lists that branch off one another."""
    lists = [[]]
    for row in range(rows):
        other = random.choice(lists)
        own = [100 * (row + 1) + index for index in range(random.randint(0, 2))]
        lists.append(other[: random.randint(0, len(other))] + own)
    return lists[1:]


def test_nothing_saves_more():
    for _ in range(60):
        granules, members = random_granules(random.randint(1, 7)), random.choice([2, 3, 8])
        groups = prefix_groups(granules, members)
        assert disjoint(groups)
        for group in groups:
            assert len(group.rows) > 1
            assert group.granules == common([granules[row] for row in group.rows]) > 0
        assert sum(saved(group, members) for group in groups) == most_saved(granules, members)


def test_a_group_too_small_to_pay_is_none():
    granules = [[1, 2, 3, row] for row in range(4)]
    assert prefix_groups(granules, 4, 9) == [PrefixGroup((0, 1, 2, 3), 3)]
    assert prefix_groups(granules, 4, 10) == []
    assert prefix_groups([], 4) == []
