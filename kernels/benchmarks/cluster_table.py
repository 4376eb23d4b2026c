"""A schedule table with what `cluster_linear.py` and `wide_linear.py` found to be faster."""

from collections.abc import Mapping

from bladellm_kernels.linear_schedules import ClusterSchedule, Entry, ScheduleTable, WideSchedule
from cublaslt_table import below_reach, rule_entries


def with_clusters(
    base: ScheduleTable, key: tuple[int, int, bool], chosen: Mapping[int, ClusterSchedule | WideSchedule | None]
) -> ScheduleTable:
    """The base with the schedules of a layer that were chosen for the rows measured, None where there is none.

    key: the layer's outputs, inputs, and whether a gate follows. A schedule is for the rows down to those measured
    before it, which have one of their own, or down to `below_reach`: its tile has as many rows of x in any case.
    """
    entries = {entry.rows: entry.schedule for entry in base.entries.get(key) or rule_entries()}
    before = 0
    for rows, schedule in sorted(chosen.items()):
        lower = max(before, below_reach(rows))
        before = rows
        if schedule is None:
            continue
        # What the table says above `lower` so far, it goes on to say up to there.
        following = [known for known in sorted(entries) if known >= lower]
        entries.setdefault(lower, entries[following[0]] if following else None)
        entries = {known: found for known, found in entries.items() if not lower < known <= rows}
        entries[rows] = schedule
    shaped = tuple(Entry(rows, schedule) for rows, schedule in sorted(entries.items()) if rows > 0)
    return ScheduleTable({**base.entries, key: shaped}, base.norm_rows)
