"""Captures of work whose rehearsal does less than the work."""

import contextlib

import pytest
import torch

from bladellm_runtime.engine.cuda_capture import CudaCapture

pytestmark = pytest.mark.gpu


class Work:
    """Adds 1 and then, unless it is rehearsed, 10; the first time only after waiting, which no capture may do."""

    def __init__(self, always_waits: bool = False) -> None:
        self.total = torch.zeros(1, device="cuda")
        self.rehearsed, self.prepared, self.always_waits = False, False, always_waits

    @contextlib.contextmanager
    def rehearsal(self):
        self.rehearsed = True
        yield
        self.rehearsed = False

    def __call__(self) -> None:
        self.total += 1
        if self.rehearsed:
            return
        if self.always_waits or not self.prepared:
            self.total.item()
            self.prepared = True
        self.total += 10


def test_what_the_rehearsal_left_out_is_done_once_and_captured():
    work = Work()
    capture = CudaCapture(torch.device("cuda"), work.rehearsal)
    replay = capture(work)
    before = work.total.item()
    assert before == 1 + 11 + 11  # the rehearsal, the whole work after a capture that failed, and the first replay
    replay()
    assert work.total.item() == before + 11
    # The next is captured at once, in the memory of the one before.
    work.total.zero_()
    capture(work)
    assert work.total.item() == 1 + 11


def test_what_cannot_be_captured_says_so():
    work = Work(always_waits=True)
    with pytest.raises(RuntimeError):
        CudaCapture(torch.device("cuda"), work.rehearsal)(work)
    assert not work.rehearsed
    # The device is as it was.
    assert (torch.ones(3, device="cuda") * 2).tolist() == [2, 2, 2]
