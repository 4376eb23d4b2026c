"""The stream that a thread launches on, whichever it was before."""

import pytest
import torch

from bladellm_runtime.engine.current_stream import CurrentStream

pytestmark = pytest.mark.gpu


def test_it_follows_what_torch_takes_to_be_current():
    current, device = CurrentStream(torch.device("cuda")), torch.device("cuda")
    others = [torch.cuda.Stream() for _ in range(3)]
    for stream in (*others, others[0]):
        assert current() == torch.cuda.current_stream(device)
        with torch.cuda.stream(stream):
            assert current() == stream
            assert current() is current()
