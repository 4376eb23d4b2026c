"""Garbage collection in processes that serve."""

import gc

COLLECT_AFTER = 20_000
"""Allocations between collections: a step of 256 streams makes a few thousand objects, none of them in cycles."""


def collect_seldom() -> None:
    """Walk objects seldom from now on. Importing torch makes so many that live on that by Python's own measure a sixth
    of its time goes into 450 collections."""
    gc.set_threshold(COLLECT_AFTER, 10, 50)


def keep_objects() -> None:
    """Keep all that lives now, and will for ever, from being walked in the middle of a step or of a burst of tokens,
    which would take up to half a second; and collect seldom."""
    gc.collect()
    gc.freeze()
    collect_seldom()
