"""Kernels loaded after the first early launch prefer shared memory."""

import sys
from types import ModuleType, SimpleNamespace

import pytest
from bladellm_kernels import shared_memory


def test_loaded_kernels_are_asked_to_prefer_shared_memory(monkeypatch):
    knobs = pytest.importorskip("triton").knobs
    asked = []
    driver = SimpleNamespace(
        CUfunction_attribute=SimpleNamespace(CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT="carve-out"),
        cuFuncSetAttribute=lambda *given: asked.append(given),
    )
    bindings = ModuleType("cuda.bindings")
    bindings.driver = driver
    monkeypatch.setitem(sys.modules, "cuda.bindings", bindings)
    monkeypatch.setattr(knobs.runtime, "kernel_load_end_hook", type(knobs.runtime.kernel_load_end_hook)())
    shared_memory.prefer_shared_memory.cache_clear()
    shared_memory.prefer_shared_memory()
    shared_memory.prefer_shared_memory()
    knobs.runtime.kernel_load_end_hook(1, 77, "kernel", None, "key")
    assert asked == [(77, "carve-out", 100)]
    shared_memory.prefer_shared_memory.cache_clear()
