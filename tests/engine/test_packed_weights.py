"""When an engine keeps packed weights, and what it says where it cannot."""

import random

import pytest
import torch

from bladellm_runtime import LLM
from bladellm_runtime.config import EngineArgs
from bladellm_runtime.engine import packed_weights
from bladellm_runtime.engine.packed_weights import AUTO_SHARE, check_packed, most_packed_bytes
from bladellm_runtime.errors import ConfigError

GPU = torch.device("cuda", 0)
TOTAL = 80 * 10**9


@pytest.fixture
def hopper(monkeypatch):
    monkeypatch.setattr(packed_weights, "is_hopper", lambda device: device.type == "cuda")
    monkeypatch.setattr(packed_weights, "kernels_load", lambda index: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (TOTAL // 2, TOTAL))


def asked(mode: str, dtype: torch.dtype = torch.bfloat16, device: torch.device = GPU, **flags) -> int:
    return most_packed_bytes(EngineArgs(packed_weights=mode, **flags), dtype, device)


def test_auto_takes_a_share_of_the_memory_the_engine_may_use(hopper):
    share = random.uniform(0.3, 0.95)
    assert asked("auto", max_gpu_memory_utilization=share) == int(AUTO_SHARE * share * TOTAL)
    assert asked("off") == 0
    assert asked("on") > TOTAL


@pytest.mark.parametrize("flags", [{"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}])
def test_auto_leaves_engines_alone_that_nobody_measured(hopper, flags):
    assert asked("auto", **flags) == 0
    assert asked("on", **flags) > TOTAL


def test_adapters_lie_where_packed_weights_do_not_look(hopper):
    assert asked("auto", enable_lora=True) == 0
    with pytest.raises(ConfigError, match="serves no --enable_lora"):
        asked("on", enable_lora=True)


@pytest.mark.parametrize(
    ("dtype", "where", "missing"),
    [(torch.float16, GPU, "--dtype bfloat16"), (torch.bfloat16, torch.device("cpu"), "a Hopper GPU")],
)
def test_where_no_kernel_reads_them_auto_is_off_and_on_is_refused(hopper, dtype, where, missing):
    assert asked("auto", dtype, where) == 0
    with pytest.raises(ConfigError, match=f"--packed_weights on needs {missing}"):
        asked("on", dtype, where)


def test_kernels_that_do_not_load_are_missing_too(hopper, monkeypatch):
    monkeypatch.setattr(packed_weights, "kernels_load", lambda index: False)
    assert asked("auto") == 0
    with pytest.raises(ConfigError, match="NVRTC"):
        asked("on")


def test_a_model_without_such_layers_is_refused():
    check_packed(EngineArgs(packed_weights="auto"), 0)
    check_packed(EngineArgs(packed_weights="on"), 1)
    with pytest.raises(ConfigError, match="this model has none"):
        check_packed(EngineArgs(packed_weights="on"), 0)


def test_a_cpu_refuses_them_in_a_sentence(demo_model):
    with pytest.raises(ConfigError, match="a Hopper GPU"):
        LLM(str(demo_model), device="cpu", packed_weights="on")
