"""Which device is picked, on a machine that is said to have two GPUs."""

import os
from types import SimpleNamespace

import pytest
import torch

from bladellm_runtime.engine.device import pick_device
from bladellm_runtime.errors import ConfigError


@pytest.fixture
def gpus(monkeypatch) -> SimpleNamespace:
    """The current one, and whether Triton had been told about its backends when the device was first used."""
    used = SimpleNamespace(current=0, told=None)

    def current_device() -> int:
        used.told = os.environ.get("TRITON_BACKENDS_IN_TREE")
        return used.current

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", lambda index: setattr(used, "current", index))
    monkeypatch.setattr(torch.cuda, "current_device", current_device)
    monkeypatch.setenv("TRITON_BACKENDS_IN_TREE", "")
    monkeypatch.delenv("TRITON_BACKENDS_IN_TREE")
    return used


@pytest.mark.parametrize("name", ["auto", "cuda"])
def test_a_gpu_is_picked_and_triton_told_first(gpus, name):
    pytest.importorskip("triton")
    assert pick_device(name) == torch.device("cuda", 0)
    assert gpus.told == "1"
    assert pick_device(name, index=1, ranks=2) == torch.device("cuda", 1)


def test_a_cpu_is_picked_where_it_is_asked_for(gpus):
    assert pick_device("cpu") == torch.device("cpu")
    assert gpus.told is None


def test_more_ranks_than_gpus_are_refused(gpus):
    with pytest.raises(ConfigError, match="3 ranks on this host need as many GPUs, and it has 2"):
        pick_device("auto", index=0, ranks=3)
