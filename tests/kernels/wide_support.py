"""Schedules of linear layers of many rows by clusters, for their tests."""

import random
from dataclasses import replace

from bladellm_kernels.hopper_parts import has_registers
from bladellm_kernels.wide_linear import MAX_GROUPS, WideSchedule, stages_of

PROCESSORS = 132


def random_schedule(gated: bool | None = None) -> WideSchedule:
    """Any that can be launched."""
    while True:
        tokens, groups = 16 * random.randint(1, 16), random.randint(1, MAX_GROUPS)
        if has_registers(tokens, groups):
            break
    gated = random.random() < 0.5 if gated is None else gated
    cluster, band = random.choice((1, 2)), random.choice((1, 2, 3, 8, 16))
    schedule = WideSchedule(tokens, groups, cluster, band, gated=gated, stream_k=random.random() < 0.5)
    return replace(schedule, stages=random.randint(2, min(stages_of(schedule), 6)))
