"""The CUDA driver is opened beside the import of torch, by what needs no torch itself."""

import ctypes
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from bladellm_runtime.engine import early_driver

FAKE = """
int calls[3];
int cuInit(unsigned flags) { calls[0] += flags == 0; return %d; }
int cuDeviceGet(int *device, int number) { calls[1] += number == 0; *device = 7; return 0; }
int cuDevicePrimaryCtxRetain(void **context, int device) { calls[2] += device == 7; *context = calls; return 0; }
"""


@pytest.fixture
def fake_driver(tmp_path, monkeypatch):
    """Builds a libcuda whose cuInit returns a code, and has it be used."""

    def build(code: int) -> ctypes.CDLL:
        source, library = tmp_path / "cuda.c", tmp_path / f"libcuda{code}.so"
        source.write_text(FAKE % code)
        subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source], check=True)
        monkeypatch.setattr(early_driver, "LIBRARY", str(library))
        return ctypes.CDLL(str(library))

    return build


@pytest.mark.parametrize(("code", "calls"), [(0, [1, 1, 1]), (100, [1, 0, 0])])
def test_the_first_context_is_made_where_there_is_a_driver_that_opens(fake_driver, monkeypatch, code, calls):
    library = fake_driver(code)
    monkeypatch.setattr(early_driver, "torch_has_cuda", lambda: True)
    thread = early_driver.open_early("auto")
    assert isinstance(thread, threading.Thread)
    thread.join(10)
    assert list((ctypes.c_int * 3).in_dll(library, "calls")) == calls


def test_nothing_happens_without_a_driver_or_for_a_cpu(monkeypatch):
    monkeypatch.setattr(early_driver, "LIBRARY", "libno-such-driver.so")
    early_driver.open_driver()
    monkeypatch.setattr(early_driver, "open_driver", lambda: pytest.fail("opened"))
    assert early_driver.open_early("cpu") is None
    monkeypatch.setattr(early_driver, "torch_has_cuda", lambda: False)
    assert early_driver.open_early("cuda") is None


def test_a_build_of_torch_is_known_by_its_libraries():
    assert early_driver.torch_has_cuda() == torch.backends.cuda.is_built()


def test_an_engine_process_reads_its_arguments_before_torch_is_there():
    code = "import sys, bladellm_runtime.engine.process; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[2]).returncode == 0
