"""Kernels compiled after the start are counted, told once, and shown to the front end."""

import logging
import subprocess
import sys
from types import SimpleNamespace

import pytest

from bladellm_runtime.config import EngineArgs
from bladellm_runtime.engine import build
from bladellm_runtime.engine.kernel_compiles import KERNEL_COMPILES, KernelCompiles


def note(compiles: KernelCompiles, name: str, cache_hit: bool = False, seconds: float = 0.25) -> None:
    times = SimpleNamespace(total=round(seconds * 1e6))
    compiles.note(src=SimpleNamespace(name=name), times=times, cache_hit=cache_hit, metadata={}, metadata_group={})


def test_compiles_are_late_only_outside_of_a_start(caplog):
    compiles = KernelCompiles()
    with caplog.at_level(logging.WARNING):
        with compiles.expected():
            note(compiles, "one")
            with compiles.expected():
                note(compiles, "two", cache_hit=True)
            note(compiles, "three", seconds=1.5)
            compiles.note_cubin("wide.cu", False, 0.25)
        assert (compiles.compiled, compiles.loaded, compiles.seconds, compiles.late) == (3, 1, 2.0, 0)
        assert not caplog.records
        note(compiles, "four")
        note(compiles, "five", cache_hit=True)
        compiles.note_cubin("tall.cu", True, 0.01)
        note(compiles, "six")
    assert (compiles.compiled, compiles.loaded, compiles.seconds, compiles.late) == (5, 3, 2.5, 4)
    assert compiles.late_names == ["four", "five", "tall.cu", "six"]
    [told] = caplog.records
    assert "kernel four was compiled after the start" in told.getMessage()


def test_a_start_that_fails_expects_no_more():
    compiles = KernelCompiles()
    with pytest.raises(KeyError), compiles.expected():
        raise KeyError
    note(compiles, "one")
    assert compiles.late == 1


def test_the_engine_tells_of_late_ones(demo_model):
    core = build.build_engine(EngineArgs(model=str(demo_model), device="cpu", kv_cache_gib=0.01)).core
    before = core.stats(0.0).kernel_compiles_after_ready
    note(KERNEL_COMPILES, "one")
    note(KERNEL_COMPILES, "two")
    assert core.stats(0.0).kernel_compiles_after_ready == before + 2
    core.close()


def test_building_an_engine_is_a_start(monkeypatch):
    def resolve(name):
        note(KERNEL_COMPILES, "one")
        raise KeyError(name)

    monkeypatch.setattr(build, "resolve_model", resolve)
    late, count = KERNEL_COMPILES.late, KERNEL_COMPILES.compiled
    for _ in range(2):
        with pytest.raises(KeyError):
            build.build_engine(EngineArgs(model="nowhere"))
    assert (KERNEL_COMPILES.late, KERNEL_COMPILES.compiled) == (late, count + 2)


COMPILE = """
import triton, triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from bladellm_runtime.engine.kernel_compiles import KERNEL_COMPILES

@triton.jit
def kernel(x):
    tl.store(x, 1.0)

KERNEL_COMPILES.watch()
KERNEL_COMPILES.watch()
for _ in range(2):
    triton.compile(ASTSource(kernel, {"x": "*fp32"}, {}), target=GPUTarget("cuda", 90, 32))
print(KERNEL_COMPILES.compiled, KERNEL_COMPILES.loaded, KERNEL_COMPILES.late, 0 < KERNEL_COMPILES.seconds < 60)
"""


@pytest.mark.turns("compiled kernels")
def test_triton_tells_of_what_it_compiles(tmp_path):
    script = tmp_path / "compile.py"
    script.write_text(COMPILE)
    environment = {"TRITON_CACHE_DIR": str(tmp_path / "cache"), "PYTHONPATH": ":".join(sys.path)}
    done = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["1", "1", "2", "True"], done.stderr
