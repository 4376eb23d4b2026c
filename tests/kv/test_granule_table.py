"""The table of granules against a dictionary, and its copy for kernels."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from bladellm_runtime.kv.granule_table import GranuleTable, runs
from bladellm_runtime.kv.operations import Show
from tests.kv.arena_cases import CPU, Geometry

SPEC = Geometry(blocks=40, max_granules=12, num_slots=3).spec("paged")
STEPS = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 12), st.lists(st.integers(0, 159), max_size=12)))


@given(STEPS, st.booleans())
def test_the_table_says_what_slots_show(steps, every_time):
    table = GranuleTable(SPEC, CPU)
    shown = {slot: [] for slot in range(3)}
    for slot, position, granules in steps:
        position = min(position, len(shown[slot]))
        granules = granules[: 12 - position]
        if granules:
            table.show(slot, position, granules)
            shown[slot][position : position + len(granules)] = granules
        else:
            table.hide(slot, position)
            del shown[slot][position:]
        if every_time:
            table.upload()
            assert table.device_rows.tolist() == [shown[s] + [-1] * (12 - len(shown[s])) for s in range(3)]
    table.upload()
    assert np.array_equal(table.device_rows.numpy(), table.rows)
    assert [table.granules(slot) for slot in range(3)] == list(shown.values())
    assert [table.length(slot) for slot in range(3)] == [len(each) for each in shown.values()]


def test_the_copy_changes_with_upload_only():
    table = GranuleTable(SPEC, CPU)
    device_rows = table.device_rows
    table.show(1, 0, [3, 4])
    assert (device_rows == -1).all()
    table.upload()
    assert device_rows[1, :3].tolist() == [3, 4, -1]
    assert device_rows is table.device_rows
    assert device_rows.dtype == torch.int32


@given(st.lists(st.integers(0, 12), max_size=12, unique=True), st.data())
def test_pieces_are_runs(granules, data):
    table = GranuleTable(SPEC, None)
    if granules:
        table.show(0, 0, granules)
    end = data.draw(st.integers(0, len(granules)))
    assert table.pieces(0, end) == len(runs(granules[:end]))
    more = data.draw(st.lists(st.integers(20, 30), min_size=1, max_size=12 - end)) if end < 12 else []
    if more:
        after = granules[:end] + more + granules[end + len(more) :]
        assert table.pieces(0, len(after), Show(0, end, more)) == len(runs(after))


@given(st.lists(st.integers(0, 8)))
def test_runs_are_maximal_and_complete(granules):
    found = runs(granules)
    assert [granule + i for _, granule, length in found for i in range(length)] == granules
    assert [index for index, _, _ in found] == [0, *np.cumsum([length for *_, length in found])][: len(found)]
    assert all(found[i][1] + found[i][2] != found[i + 1][1] for i in range(len(found) - 1))
