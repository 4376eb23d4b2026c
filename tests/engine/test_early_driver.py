"""The CUDA driver is opened beside the import of torch, by what needs no torch itself."""

import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from bladellm_runtime.engine import early_driver


class FakeDriver:
    """A libcuda whose cuInit returns a code; `calls` in their order, with what they were given."""

    def __init__(self, code: int) -> None:
        self.code, self.calls = code, []

    def cuInit(self, flags):
        self.calls.append(("cuInit", flags))
        return self.code

    def cuDeviceGet(self, device, number):
        self.calls.append(("cuDeviceGet", number))
        device._obj.value = 7
        return 0

    def cuDevicePrimaryCtxRetain(self, context, device):
        self.calls.append(("cuDevicePrimaryCtxRetain", device.value))
        context._obj.value = 1
        return 0


OPENED = [("cuInit", 0), ("cuDeviceGet", 0), ("cuDevicePrimaryCtxRetain", 7)]


@pytest.mark.parametrize(("code", "calls"), [(0, OPENED), (100, OPENED[:1])])
def test_the_first_context_is_made_where_there_is_a_driver_that_opens(monkeypatch, code, calls):
    driver = FakeDriver(code)
    monkeypatch.setattr(early_driver.ctypes, "CDLL", {early_driver.LIBRARY: driver}.__getitem__)
    monkeypatch.setattr(early_driver, "torch_has_cuda", lambda: True)
    thread = early_driver.open_early("auto")
    assert isinstance(thread, threading.Thread)
    thread.join(10)
    assert driver.calls == calls


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
