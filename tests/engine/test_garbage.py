"""Garbage collection while prompts of a file are answered."""

import gc
import subprocess
import sys

import pytest

from bladellm_runtime.garbage import COLLECT_AFTER, objects_kept

RING = """
import gc, weakref
from bladellm_runtime.garbage import objects_kept
class Ring: pass
def left():
    ring = Ring()
    ring.itself = ring
    return weakref.ref(ring)
"""
WITHOUT_KEPT_OBJECTS = """
assert gc.get_freeze_count() == 0
gone = left()
with objects_kept():
    gc.collect()
    assert gone() is not None, "it was walked"
assert gc.get_freeze_count() == 0
gc.collect()
assert gone() is None, "it is kept for ever"
"""
WITH_KEPT_OBJECTS = """
gc.freeze()
kept, gone = gc.get_freeze_count(), left()
with objects_kept():
    pass
assert 0 < gc.get_freeze_count() <= kept
gc.collect()
assert gone() is None, "it is kept for ever"
"""


@pytest.mark.parametrize("rest", [WITHOUT_KEPT_OBJECTS, WITH_KEPT_OBJECTS])
def test_nothing_is_kept_longer_than_before(rest):
    subprocess.run([sys.executable, "-c", RING + rest], check=True)


@pytest.mark.parametrize(
    ("own", "meanwhile"), [((700, 10, 10), COLLECT_AFTER), ((0, 10, 10), 0), ((90_000, 50, 100), 90_000)]
)
def test_the_thresholds_of_others_come_back(own, meanwhile):
    seen: list[int] = []

    def stop() -> None:
        with objects_kept():
            seen.append(gc.get_threshold()[0])
            raise KeyError

    before = gc.get_threshold()
    gc.set_threshold(*own)
    try:
        with pytest.raises(KeyError):
            stop()
        assert (gc.get_threshold(), seen) == (own, [meanwhile])
    finally:
        gc.set_threshold(*before)
