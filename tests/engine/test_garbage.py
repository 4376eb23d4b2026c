"""Garbage collection while prompts of a file are answered."""

import gc
import subprocess
import sys

import pytest

from bladellm_runtime.garbage import COLLECT_AFTER, objects_kept

IN_A_FRESH_PROCESS = """
import gc, weakref
from bladellm_runtime.garbage import objects_kept
class Ring: pass
ring = Ring(); ring.itself = ring; gone = weakref.ref(ring); del ring
assert gc.get_freeze_count() == 0
with objects_kept():
    gc.collect()
    assert gone() is not None, "it was walked"
assert gc.get_freeze_count() == 0
gc.collect()
assert gone() is None, "it is kept for ever"
"""


def test_what_lives_is_not_walked_until_the_end():
    subprocess.run([sys.executable, "-c", IN_A_FRESH_PROCESS], check=True)


def test_what_was_kept_before_stays_so():
    gc.freeze()
    with objects_kept():
        made = [[]]
        assert any(one is made for one in gc.get_objects()), "what is made meanwhile is walked"
    assert gc.get_freeze_count() > 0


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
