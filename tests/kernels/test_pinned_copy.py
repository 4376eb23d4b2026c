"""Copies by the driver's functions: what they refuse, and on a GPU what arrives, on which stream, and when."""

import threading
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from bladellm_kernels import pinned_copy
from bladellm_kernels.cuda_kernel import SIGNATURES, DriverLibrary
from bladellm_kernels.pinned_copy import copy_from_device, copy_to_device

WRONG = {
    "another type": (torch.zeros(4, dtype=torch.int64), torch.zeros(4, dtype=torch.int32)),
    "more than there is room for": (torch.zeros(4), torch.zeros(5)),
    "rows with gaps": (torch.zeros(8), torch.zeros(4, 4)[:, :2]),
    "into rows with gaps": (torch.zeros(4, 4)[:, :2], torch.zeros(8)),
}


@pytest.mark.parametrize(("target", "source"), WRONG.values(), ids=WRONG)
@pytest.mark.parametrize("copy", [copy_to_device, copy_from_device])
def test_tensors_that_do_not_fit_are_refused(copy, target, source):
    with pytest.raises(ValueError, match="is not copied to"):
        copy(target, source, None)


class FakeStream:
    cuda_stream = 77

    def __init__(self) -> None:
        self.used = False

    def query(self) -> bool:
        self.used = True
        return True


@pytest.mark.parametrize(("answers", "error"), [([0], ""), ([201, 0], ""), ([201, 201], "201"), ([700], "700")])
def test_a_thread_that_has_not_used_the_device_gets_its_context(answers, error, monkeypatch):
    stream, calls, left = FakeStream(), [], list(answers)

    def copy(*given):
        calls.append((given, stream.used))
        return left.pop(0)

    functions = SimpleNamespace(**{name: SimpleNamespace() for name in SIGNATURES})
    functions.cuMemcpyHtoDAsync_v2 = copy
    functions.cuGetErrorName = lambda status, name: 0
    driver = DriverLibrary(functions)
    monkeypatch.setattr(pinned_copy, "_driver", lambda: driver)
    target, source = torch.zeros(9), torch.zeros(5)
    with pytest.raises(RuntimeError, match=f"cuMemcpyHtoDAsync_v2: {error}") if error else nullcontext():
        copy_to_device(target, source, stream)
    given = (target.data_ptr(), source.data_ptr(), 20, 77)
    assert calls == [(given, place > 0) for place in range(len(answers))]


@pytest.mark.gpu
def test_any_thread_may_copy():
    sent, there = torch.randn(100).pin_memory(), torch.zeros(100, device="cuda")
    stream = torch.cuda.Stream()
    thread = threading.Thread(target=copy_to_device, args=(there, sent, stream))
    thread.start()
    thread.join()
    stream.synchronize()
    assert there.cpu().equal(sent)


@pytest.mark.gpu
@pytest.mark.parametrize("by_driver", [True, False])
def test_numbers_arrive_where_and_when_the_stream_says(by_driver, monkeypatch):
    if not by_driver:
        monkeypatch.setattr(pinned_copy, "_driver", lambda: None)
    stream, count = torch.cuda.Stream(), int(torch.randint(1, 5000, ()))
    sent = torch.randint(-(2**62), 2**62, (count,)).pin_memory()
    there = torch.zeros(count + 3, dtype=torch.int64, device="cuda")
    back = torch.zeros(count + 1, dtype=torch.int64, pin_memory=True)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
    copy_to_device(there, sent, stream)
    copy_from_device(back, there[:count], stream)
    assert not stream.query()  # queued behind what the stream does
    assert not back.any()
    stream.synchronize()
    assert back[:count].equal(sent)
    assert not there[count:].any()
    assert back[count] == 0
