"""From bytes to granules, and which arena a device gets."""

import mmap
import os

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bladellm_runtime.errors import ConfigError
from bladellm_runtime.kv import sizing, virtual
from bladellm_runtime.kv.factory import arena_kind, make_arena, page_bytes
from bladellm_runtime.kv.memfd import MemfdArena
from bladellm_runtime.kv.relocating import RelocatingArena
from bladellm_runtime.kv.sizing import kv_groups, mapping_limit, plan_spec, worst_mappings
from tests.kv.arena_cases import CPU

CUDA = torch.device("cuda")


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
)
def test_a_plan_keeps_its_promises(layers, per_group, heads, head_dim, width, budget, num_slots, max_len, hint, page):
    groups = kv_groups(layers, 2 * heads * head_dim * width, per_group)
    unit = plan_spec(groups, 1 << 60, 1, 1, 1, page)
    if budget < unit.granule_bytes:
        with pytest.raises(ConfigError, match="raise --kv_cache_gib"):
            plan_spec(groups, budget, num_slots, max_len, hint, page)
        return
    spec = plan_spec(groups, budget, num_slots, max_len, hint, page)
    assert spec.granule_tokens % unit.granule_tokens == 0
    assert all(spec.granule_tokens * group.token_bytes % page == 0 for group in groups)
    assert spec.num_granules * spec.granule_bytes <= budget
    assert spec.max_tokens % spec.granule_tokens == 0
    assert spec.max_tokens < max_len + spec.granule_tokens
    assert spec.granules(spec.max_tokens) <= spec.num_granules <= num_slots * spec.granules(spec.max_tokens)
    if page == mmap.PAGESIZE:
        assert worst_mappings(len(groups), spec.num_granules, num_slots) <= mapping_limit()
    else:
        one_more = spec.num_granules + 1
        assert one_more * spec.granule_bytes > budget or spec.num_granules == num_slots * spec.granules(max_len)


def test_usual_sizes(monkeypatch, tmp_path):
    """An 8B model in bf16: 16 tokens fill four pages; the hint stands where nothing speaks against it."""
    monkeypatch.setattr(sizing, "MAX_MAP_COUNT", tmp_path / "absent")
    groups = kv_groups(32, 4096, 4)
    spec = plan_spec(groups, 4 << 30, 64, 8192, 16, 4096)
    assert (spec.granule_tokens, spec.num_granules, spec.max_tokens) == (16, 2048, 8192)
    large = plan_spec(groups, 128 << 30, 64, 131072, 16, 4096)
    assert large.granule_tokens == 512
    assert large.num_granules * large.granule_tokens == 1 << 20
    cuda = plan_spec(groups, 128 << 30, 64, 131072, 16, 2 << 20)
    assert (cuda.granule_tokens, cuda.num_granules) == (128, 8192)


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


def test_auto_is_memfd_on_a_cpu_and_relocating_elsewhere(monkeypatch):
    assert arena_kind("auto", CPU) == "memfd"
    assert arena_kind("relocating", CPU) == "relocating"
    assert arena_kind("auto", CUDA) == "relocating"
    with pytest.raises(ConfigError, match="--kv_arena memfd needs a CPU under Linux, not cuda"):
        arena_kind("memfd", CUDA)
    monkeypatch.delattr(os, "memfd_create")
    assert arena_kind("auto", CPU) == "relocating"


@pytest.mark.parametrize(
    ("kind", "arena"), [("auto", MemfdArena), ("memfd", MemfdArena), ("relocating", RelocatingArena)]
)
def test_the_factory_makes_what_was_asked_for(kind, arena):
    settled = arena_kind(kind, CPU)
    spec = plan_spec(kv_groups(3, 2 * 2 * 8 * 2, 2), 1 << 20, 4, 500, 16, page_bytes(settled))
    made = make_arena(kind, spec, 2, 8, torch.float16, CPU)
    assert type(made) is (RelocatingArena if kind == "relocating" else MemfdArena)
    assert [made.layer_kv(layer).shape[1:] for layer in range(3)] == [(2, 2, 8)] * 3
    made.close()


def test_memory_the_system_refuses_is_a_config_error(monkeypatch):
    spec = plan_spec(kv_groups(2, 4096, 2), 1 << 20, 4, 500, 16, 4096)
    impossible = plan_spec(kv_groups(2, 4096, 2), 1 << 60, 4096, 1 << 45, 1 << 40, 1)
    with pytest.raises(ConfigError, match=r"lower --kv_cache_gib"):
        make_arena("relocating", impossible, 8, 128, torch.float16, CPU)

    def refuse(*args):
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(virtual, "map_memory", refuse)
    with pytest.raises(ConfigError, match=r"Cannot allocate memory.*--max_running_requests.*--kv_arena relocating"):
        make_arena("memfd", spec, 8, 128, torch.float16, CPU)
