"""Garbage collection in processes that serve."""

import gc

COLLECT_AFTER = 20_000
"""Allocations between collections: a step of 256 streams makes a few thousand objects, none of them in cycles."""


def keep_objects() -> None:
    """Keep all that lives now, and will for ever, from being walked in the middle of a step or of a burst of tokens,
    which would take up to half a second; and collect seldom."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(COLLECT_AFTER, 10, 50)
