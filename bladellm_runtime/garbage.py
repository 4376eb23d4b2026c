"""Garbage collection in processes that serve, and while files of prompts are answered."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

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


@contextmanager
def objects_kept() -> Iterator[None]:
    """The same for a while, in a process that is somebody else's, and without the collection before it. Where that one
    keeps objects itself no others are: they could not be given free apart from these. Who has set Python's collector to
    run more seldom, or never, is not overruled."""
    thresholds, keeps = gc.get_threshold(), gc.get_freeze_count() == 0
    if keeps:
        gc.freeze()
    if 0 < thresholds[0] < COLLECT_AFTER:
        collect_seldom()
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        if keeps:
            gc.unfreeze()
