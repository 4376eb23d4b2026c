"""When an engine keeps packed weights, and what it says where it cannot."""

import random
from dataclasses import replace

import pytest
import torch
from bladellm_kernels.kv_format import KV_FORMATS

from bladellm_runtime import LLM
from bladellm_runtime.config import GIB, EngineArgs
from bladellm_runtime.engine import memory, packed_weights
from bladellm_runtime.engine.memory import MemoryTable, kv_budget, make_kv_spec
from bladellm_runtime.engine.packed_weights import AUTO_SHARE, check_packed, packed_room
from bladellm_runtime.errors import ConfigError
from bladellm_runtime.kv.arena import KvShape
from bladellm_runtime.models.config import ModelSpec, read_model_spec
from bladellm_runtime.models.packed_layers import NO_ROOM, PackedRoom
from bladellm_runtime.models.stages import Stages

GPU = torch.device("cuda", 0)
TOTAL = 80 * 10**9


@pytest.fixture
def hopper(monkeypatch):
    """One with half of its memory free, whose pages take 2 MiB."""
    monkeypatch.setattr(packed_weights, "is_hopper", lambda device: device.type == "cuda")
    monkeypatch.setattr(packed_weights, "kernels_load", lambda index: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (TOTAL // 2, TOTAL))
    monkeypatch.setattr(memory, "arena_kind", lambda *asked: "cuda")
    monkeypatch.setattr(memory, "page_bytes", lambda kind, device: 2 << 20)


@pytest.fixture(scope="module")
def large(demo_model) -> ModelSpec:
    """Of 8 billion parameters."""
    return replace(
        read_model_spec(demo_model), hidden_size=4096, layers=32, heads=32, kv_heads=8, head_dim=128,
        intermediate_size=14336, vocab_size=128256, max_position_embeddings=131072, windows=(None,) * 32,
    )  # fmt: skip


def shape_of(spec: ModelSpec, name: str = "no_quant", dtype: torch.dtype = torch.bfloat16) -> KvShape:
    return KvShape(spec.kv_heads, spec.head_dim, dtype, KV_FORMATS[name])


def asked(mode: str, spec: ModelSpec, dtype=torch.bfloat16, device=GPU, length: int = 4096, **flags) -> PackedRoom:
    return packed_room(EngineArgs(packed_weights=mode, **flags), spec, shape_of(spec, dtype=dtype), device, length)


def test_auto_takes_a_share_of_the_memory_the_engine_may_use(hopper, large):
    share = random.uniform(0.3, 0.95)
    assert asked("auto", large, max_gpu_memory_utilization=share).most == int(AUTO_SHARE * share * TOTAL)
    assert asked("off", large) == NO_ROOM
    assert asked("on", large).most > TOTAL
    assert asked("on", large).asked
    assert EngineArgs().packed_weights == "auto"


@pytest.mark.parametrize("name", ["no_quant", "int8", "int4_affine", "fp12_e4m7"])
def test_auto_leaves_one_sequence_its_kv_cache(name, hopper, large, monkeypatch):
    """Where it packs with nothing to spare the KV cache still holds the longest sequence."""
    for _ in range(20):
        length = random.randint(1, 200_000)
        flags = {"max_gpu_memory_utilization": random.uniform(0.5, 0.95), "precompute_first_layer": False}
        args = EngineArgs(kv_cache_quant=name, max_running_requests=random.randint(1, 300), **flags)
        room = packed_room(args, large, shape_of(large, name), GPU, length)
        if room.kept > TOTAL:
            continue
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device, free=room.kept: (free, TOTAL))
        budget = kv_budget(args, large, torch.bfloat16, GPU, MemoryTable())
        spec = make_kv_spec(args, Stages.of(large, None), shape_of(large, name), GPU, length, budget)
        assert spec.max_tokens >= length


def test_auto_leaves_what_is_asked_for(hopper, large):
    length, known = random.randint(1, 10**6), 128256 * 48 * 128 * 2
    given, more = (asked("auto", large, length=length, kv_cache_gib=gib).kept for gib in (2.0, 5.5))
    assert more - given == int(3.5 * GIB)
    assert asked("auto", large, kv_cache_gib=2.0, precompute_first_layer=True).kept - given == known
    token = 32 * 2 * 8 * 128 * 2
    assert asked("auto", large, length=length + 7).kept - asked("auto", large, length=length).kept == 7 * token


@pytest.mark.parametrize("flags", [{"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}])
def test_auto_leaves_engines_alone_that_nobody_measured(hopper, large, flags):
    assert asked("auto", large, **flags) == NO_ROOM
    assert asked("on", large, **flags).most > TOTAL


def test_adapters_lie_where_packed_weights_do_not_look(hopper, large):
    assert asked("auto", large, enable_lora=True) == NO_ROOM
    with pytest.raises(ConfigError, match="serves no --enable_lora"):
        asked("on", large, enable_lora=True)


@pytest.mark.parametrize(
    ("dtype", "where", "missing"),
    [(torch.float16, GPU, "--dtype bfloat16"), (torch.bfloat16, torch.device("cpu"), "a Hopper GPU")],
)
def test_where_no_kernel_reads_them_auto_is_off_and_on_is_refused(hopper, large, dtype, where, missing):
    assert asked("auto", large, dtype, where) == NO_ROOM
    with pytest.raises(ConfigError, match=f"--packed_weights on needs {missing}"):
        asked("on", large, dtype, where)


def test_kernels_that_do_not_load_are_missing_too(hopper, large, monkeypatch):
    monkeypatch.setattr(packed_weights, "kernels_load", lambda index: False)
    assert asked("auto", large) == NO_ROOM
    with pytest.raises(ConfigError, match="NVRTC"):
        asked("on", large)


def test_a_model_without_such_layers_is_refused():
    check_packed(EngineArgs(packed_weights="auto"), 0)
    check_packed(EngineArgs(packed_weights="on"), 1)
    with pytest.raises(ConfigError, match="this model has none"):
        check_packed(EngineArgs(packed_weights="on"), 0)


def test_a_cpu_refuses_them_in_a_sentence(demo_model):
    with pytest.raises(ConfigError, match="a Hopper GPU"):
        LLM(str(demo_model), device="cpu", packed_weights="on")
