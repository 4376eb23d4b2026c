"""A launch has the thread that maps memory ahead wait, and go on whatever becomes of the step."""

import time

import pytest

from bladellm_runtime.config import EngineArgs
from bladellm_runtime.engine.build import build_engine
from bladellm_runtime.request import SamplingParams
from bladellm_runtime.wire.messages import AddRequest


@pytest.fixture
def core(demo_model):
    args = EngineArgs(model=str(demo_model), device="cpu", kv_cache_gib=0.05, disable_overlap=True)
    core = build_engine(args).core
    yield core
    core._in_flight.clear()  # a failed step would be collected once more
    core.close()


def watch(monkeypatch, arena, failing=None):
    """Names of an arena's methods as they are called; one of them raises `OSError`."""
    seen = []

    def noted(name, call):
        def method(*arguments):
            seen.append(name)
            if name == failing:
                raise OSError(name)
            return call(*arguments)

        return method

    for name in ("hold", "submit", "wait", "resume"):
        monkeypatch.setattr(arena, name, noted(name, getattr(arena, name)))
    return seen


@pytest.mark.parametrize("failing", [None, "submit", "wait"])
def test_mapping_ahead_waits_while_a_step_is_launched(core, monkeypatch, failing):
    core.add(AddRequest(0, [1, 2, 3], SamplingParams(max_tokens=1), 0, time.monotonic()))
    seen = watch(monkeypatch, core._runner._arena, failing)
    if failing:
        with pytest.raises(OSError, match=failing):
            core.step()
    else:
        core.step()
    assert seen == ["hold", "submit", *(["wait"] if failing != "submit" else []), "resume"]
