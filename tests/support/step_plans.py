"""Step plans from lists."""

from typing import Any

import numpy as np

from bladellm_runtime.scheduler.plan import StepPlan

ROWS = {"slots": np.int64, "generations": np.int64, "starts": np.int64, "query_lens": np.int64, "samples": np.bool_}


def step_plan(step: int, **fields: Any) -> StepPlan:
    """Rows as any sequences, and other fields of a plan."""
    arrays = {name: np.array(fields[name], dtype) for name, dtype in ROWS.items() if name in fields}
    return StepPlan(step, **(fields | arrays))
