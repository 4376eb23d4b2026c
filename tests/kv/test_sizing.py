"""From bytes to granules, and which arena a device gets."""

import logging
import mmap
import os

import pytest
import torch
from bladellm_kernels.kv_format import KV_FORMATS
from hypothesis import example, given
from hypothesis import strategies as st

from bladellm_runtime.errors import ConfigError
from bladellm_runtime.kv import factory, sizing, virtual
from bladellm_runtime.kv.arena import KvShape
from bladellm_runtime.kv.cuda_arena import CudaArena
from bladellm_runtime.kv.cuda_driver import CudaDriver
from bladellm_runtime.kv.factory import arena_kind, block_bytes, make_arena, page_bytes
from bladellm_runtime.kv.memfd import MemfdArena
from bladellm_runtime.kv.paged import PagedArena
from bladellm_runtime.kv.relocating import RelocatingArena
from bladellm_runtime.kv.sizing import kv_groups, mapping_limit, plan_spec, worst_mappings
from tests.kv.arena_cases import CPU
from tests.kv.fake_cuda import CUresult, FakeCuda

CUDA = torch.device("cuda")
SHAPE = KvShape(2, 8, torch.float16, KV_FORMATS["no_quant"])


@given(st.integers(1, 200), st.integers(1, 10**5), st.integers(1, 50))
def test_groups_cover_every_layer_once(num_layers, layer_bytes, per_group):
    groups = kv_groups(num_layers, layer_bytes, per_group)
    assert [layer for group in groups for layer in group.layers] == list(range(num_layers))
    assert all(len(group.layers) <= per_group for group in groups)
    assert sum(group.token_bytes for group in groups) == num_layers * layer_bytes


@given(
    layers=st.integers(1, 80),
    per_group=st.integers(1, 80),
    heads=st.integers(1, 40),
    head_dim=st.sampled_from([8, 16, 64, 80, 96, 128, 256]),
    width=st.sampled_from([1, 2, 4]),
    budget=st.integers(1 << 20, 1 << 40),
    num_slots=st.integers(1, 4096),
    max_len=st.integers(1, 1 << 20),
    hint=st.integers(1, 256),
    page=st.sampled_from([1, 4096, 2 << 20]),
    block=st.sampled_from([0, 1, 1 << 20, 32 << 20]),
    planes=st.integers(0, 2),
    host=st.integers(0, 1 << 34),
)
@example(26, 1, 1, 8, 1, 136314880, 2, 131073, 1, 4096, 1 << 20, 0, 0)
def test_a_plan_keeps_its_promises(
    layers, per_group, heads, head_dim, width, budget, num_slots, max_len, hint, page, block, planes, host
):
    groups = kv_groups(layers, 2 * heads * head_dim * width, per_group)
    more = {"block_bytes": block, "scale_token_bytes": layers * 4 * heads * planes, "host_bytes": host}
    unit = plan_spec(groups, 1 << 60, 1, 1, 1, page, **more)
    if budget < unit.granule_bytes:
        with pytest.raises(ConfigError, match="raise --kv_cache_gib"):
            plan_spec(groups, budget, num_slots, max_len, hint, page, **more)
        return
    spec = plan_spec(groups, budget, num_slots, max_len, hint, page, **more)
    assert spec.scale_token_bytes == more["scale_token_bytes"]
    assert spec.host_granules * spec.granule_bytes <= host < (spec.host_granules + 1) * spec.granule_bytes
    check_blocks(spec, block)
    assert spec.granule_tokens % unit.granule_tokens == 0
    assert all(spec.granule_tokens * group.token_bytes % page == 0 for group in groups)
    assert spec.num_granules * spec.granule_bytes <= budget
    assert spec.max_tokens % spec.granule_tokens == 0
    assert spec.max_tokens < max_len + spec.granule_tokens
    longest = spec.granules(spec.max_tokens)
    assert longest <= spec.num_granules < num_slots * longest + spec.block_granules
    if page == mmap.PAGESIZE:
        assert worst_mappings(len(groups), spec.num_granules, num_slots) <= mapping_limit()
    else:
        one_more = spec.num_granules + spec.block_granules
        assert one_more * spec.granule_bytes > budget or spec.num_granules >= num_slots * spec.granules(max_len)


def check_blocks(spec, block_bytes):
    """Whole blocks, no longer than a sequence or than asked for, and a few of them."""
    length = spec.block_granules
    assert spec.num_granules % length == 0
    if length > 1:
        assert length * spec.granule_tokens * max(group.token_bytes for group in spec.groups) <= block_bytes
        assert spec.num_granules >= 4 * length
        assert length * spec.granule_tokens <= spec.max_tokens


def test_usual_sizes(monkeypatch, tmp_path):
    """An 8B model in bf16: 16 tokens fill four pages; the hint stands where nothing speaks against it."""
    monkeypatch.setattr(sizing, "MAX_MAP_COUNT", tmp_path / "absent")
    groups = kv_groups(32, 4096, 4)
    spec = plan_spec(groups, 4 << 30, 64, 8192, 16, 4096)
    assert (spec.granule_tokens, spec.num_granules, spec.max_tokens) == (16, 2048, 8192)
    large = plan_spec(groups, 128 << 30, 64, 131072, 16, 4096)
    assert large.granule_tokens == 512
    assert large.num_granules * large.granule_tokens == 1 << 20


def test_usual_sizes_of_a_cuda_device():
    """Granules of two megabytes a group, in blocks of 32: 2048 tokens of an 8B model."""
    groups = kv_groups(32, 4096, 4)
    spec = plan_spec(groups, 120 << 30, 256, 131072, 16, 2 << 20, block_bytes=block_bytes("cuda"))
    assert (spec.granule_tokens, spec.num_granules, spec.block_granules) == (128, 7680, 16)
    assert (spec.granule_bytes, spec.max_tokens) == (16 << 20, 131072)
    assert 256 * spec.granule_bytes / 2 < 0.017 * (120 << 30)
    assert spec.block_granules * spec.granule_tokens * groups[0].token_bytes == 32 << 20
    quantized = plan_spec(
        kv_groups(32, 1024, 4), 120 << 30, 256, 131072, 16, 2 << 20, block_bytes=32 << 20, scale_token_bytes=2048
    )
    assert (quantized.granule_tokens, quantized.block_granules) == (512, 16)
    assert quantized.num_granules == (120 << 30) // (512 * (32 * 1024 + 2048)) // 16 * 16
    small = plan_spec(groups, 70 * (16 << 20), 256, 131072, 16, 2 << 20, block_bytes=32 << 20)
    assert (small.num_granules, small.block_granules, small.max_tokens) == (64, 16, 64 * 128)
    tiny = plan_spec(groups, 7 * (16 << 20), 4, 131072, 16, 2 << 20, block_bytes=32 << 20)
    assert (tiny.num_granules, tiny.block_granules) == (7, 1)


def test_a_small_budget_shrinks_granules_then_sequences():
    groups = kv_groups(4, 1024, 4)
    spec = plan_spec(groups, 64 * 4096, num_slots=16, max_model_len=1000, granule_tokens_hint=16, page_bytes=4096)
    assert (spec.granule_tokens, spec.num_granules, spec.max_tokens) == (4, 16, 64)


def test_a_budget_below_one_granule_names_the_flag():
    with pytest.raises(ConfigError, match=r"smaller than its smallest piece.*raise --kv_cache_gib"):
        plan_spec(kv_groups(4, 1024, 4), 4095, 1, 100, 16, 4096)


def test_more_slots_than_mappings_leave_some_slots_empty(monkeypatch, tmp_path):
    """Granules stop growing at the length of a sequence; after that their number gives way."""
    (tmp_path / "limit").write_text("400")
    monkeypatch.setattr(sizing, "MAX_MAP_COUNT", tmp_path / "limit")
    spec = plan_spec(kv_groups(4, 1024, 1), 1 << 30, 100, max_model_len=50, granule_tokens_hint=16, page_bytes=4096)
    assert (spec.granule_tokens, spec.max_tokens, spec.num_granules) == (64, 64, 24)
    assert worst_mappings(4, 24, 100) <= 200 < worst_mappings(4, 25, 100)


def test_without_proc_the_mapping_limit_is_linux_default(monkeypatch, tmp_path):
    monkeypatch.setattr(sizing, "MAX_MAP_COUNT", tmp_path / "absent")
    assert mapping_limit() == 32765


@pytest.fixture
def cuda(monkeypatch):
    """A CUDA device whose driver is made of mmap, and whose tensors are the CPU's."""
    fake = FakeCuda()
    driver = CudaDriver(0, fake)
    monkeypatch.setattr(factory, "cuda_driver", lambda index: driver)
    monkeypatch.setattr(factory, "_index", lambda device: 0)
    monkeypatch.setattr(factory, "_located", lambda device: CPU)
    factory._cuda_problem.cache_clear()
    yield fake
    factory._cuda_problem.cache_clear()


def test_auto_is_memfd_on_a_cpu_and_relocating_where_nothing_maps(monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    assert arena_kind("auto", CPU) == "memfd"
    assert arena_kind("relocating", CPU) == "relocating"
    assert arena_kind("auto", torch.device("mps")) == "relocating"
    with pytest.raises(ConfigError, match=r"--kv_arena memfd needs a CPU under Linux, not cuda.*--kv_arena auto"):
        arena_kind("memfd", CUDA)
    with pytest.raises(ConfigError, match="--kv_arena cuda needs a CUDA device, not cpu; use --kv_arena auto"):
        arena_kind("cuda", CPU)
    assert not caplog.records
    monkeypatch.delattr(os, "memfd_create")
    assert arena_kind("auto", CPU) == "relocating"
    assert "memfd needs a CPU under Linux" in caplog.text


def test_auto_is_cuda_where_the_driver_maps(cuda):
    assert arena_kind("auto", CUDA) == arena_kind("cuda", CUDA) == "cuda"
    assert cuda.calls.count("cuMemCreate") == 1
    assert arena_kind("relocating", CUDA) == "relocating"
    assert page_bytes("cuda") == 4096
    cuda.dispose()


@pytest.mark.parametrize(
    "call", ["cuMemAddressReserve", "cuMemCreate", "cuMemMap", "cuMemSetAccess", "cuMemsetD8Async"]
)
def test_auto_is_relocating_where_the_driver_does_not_map(cuda, caplog, call):
    caplog.set_level(logging.INFO)
    cuda.fail[call] = (0, CUresult.CUDA_ERROR_NOT_SUPPORTED)
    assert arena_kind("auto", CUDA) == "relocating"
    assert "KV memory is relocating: cuda cannot map memory (cuMem" in caplog.text
    assert "CUDA_ERROR_NOT_SUPPORTED" in caplog.text
    with pytest.raises(ConfigError, match=r"--kv_arena cuda cannot map memory .*NOT_SUPPORTED.*--kv_arena auto"):
        arena_kind("cuda", CUDA)
    cuda.dispose()


def test_without_a_driver_auto_is_relocating(caplog):
    """As on this machine without a GPU, or one without cuda-bindings."""
    if torch.cuda.is_available():
        pytest.skip("this machine has a CUDA device")
    caplog.set_level(logging.INFO)
    factory._cuda_problem.cache_clear()
    assert arena_kind("auto", torch.device("cuda", 0)) == "relocating"
    assert "KV memory is relocating: cuda cannot map memory (CUDA driver calls: " in caplog.text
    factory._cuda_problem.cache_clear()


def test_paged_attention_has_its_own_arena_everywhere():
    for kind in ("auto", "memfd", "cuda", "relocating"):
        assert arena_kind(kind, CUDA, "paged") == arena_kind(kind, CPU, "paged") == "paged"
    assert page_bytes("paged") == page_bytes("relocating") == 1
    assert block_bytes("paged") == block_bytes("memfd") == 0


@pytest.mark.parametrize(
    ("kind", "attention", "arena"),
    [
        ("auto", "ragged_flash", MemfdArena),
        ("memfd", "ragged_flash", MemfdArena),
        ("relocating", "ragged_flash", RelocatingArena),
        ("auto", "paged", PagedArena),
    ],
)
def test_the_factory_makes_what_was_asked_for(kind, attention, arena):
    settled = arena_kind(kind, CPU, attention)
    spec = plan_spec(kv_groups(3, SHAPE.payload_bytes, 2), 1 << 20, 4, 500, 16, page_bytes(settled))
    made = make_arena(kind, attention, spec, SHAPE, CPU)
    assert type(made) is arena
    assert (made.shares, made.sticky) == (arena is not RelocatingArena, arena is PagedArena)
    assert [made.layer(layer).payload.shape[1:] for layer in range(3)] == [(2, 2, 8)] * 3
    made.close()


def test_the_factory_makes_cuda_memory(cuda):
    spec = plan_spec(kv_groups(3, SHAPE.payload_bytes, 2), 1 << 20, 4, 500, 16, page_bytes("cuda"), block_bytes=8192)
    made = make_arena("auto", "ragged_flash", spec, SHAPE, CUDA)
    assert type(made) is CudaArena
    assert made.shares
    assert made.sticky
    made.close()
    cuda.capacity = 1 << 16
    with pytest.raises(ConfigError, match=r"OUT_OF_MEMORY\); lower --kv_cache_gib or --max_gpu_memory_utilization"):
        make_arena("cuda", "ragged_flash", spec, SHAPE, CUDA)
    cuda.dispose()


def test_memory_the_system_refuses_is_a_config_error(monkeypatch):
    shape = KvShape(8, 128, torch.float16, KV_FORMATS["no_quant"])
    spec = plan_spec(kv_groups(2, 4096, 2), 1 << 20, 4, 500, 16, 4096)
    impossible = plan_spec(kv_groups(2, 4096, 2), 1 << 60, 1, 1 << 45, 1 << 40, 1)
    for kind, attention in (("relocating", "ragged_flash"), ("auto", "paged")):
        with pytest.raises(ConfigError, match=r"lower --kv_cache_gib"):
            make_arena(kind, attention, impossible, shape, CPU)

    def refuse(*args):
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(virtual, "map_memory", refuse)
    with pytest.raises(ConfigError, match=r"Cannot allocate memory.*--max_running_requests.*--kv_arena relocating"):
        make_arena("memfd", "ragged_flash", spec, shape, CPU)
