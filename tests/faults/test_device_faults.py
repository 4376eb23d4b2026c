"""A GPU that runs out of memory in a step, or is lost, behind the real server; rows 40 and 41 of the fault table.

The engine's own process raises the errors of torch here; tests/gpu/test_device_faults.py has the faults themselves.
"""

import sys
import time

import pytest

from tests.engine import reference
from tests.faults.conftest import assert_quiet
from tests.faults.test_engine import TOKENS, ask, expected
from tests.support.faulty_engine import FITTING_TOKENS, TRIGGER
from tests.support.live import LiveServer, OpenStream, completion_text

LONG_PROMPT = [TRIGGER, *range(400, 400 + 3 * FITTING_TOKENS)]
ENDLESS = {"prompt": "Once upon a time", "max_tokens": 2000, "temperature": 0, "ignore_eos": True}


def faulty(fault: str, device: str, **flags) -> LiveServer:
    command = [sys.executable, "-m", "tests.support.faulty_engine", fault]
    return LiveServer(command, **{"device": device, "dtype": "float32", "kv_cache_gib": 0.05, **flags})


def text_of(folder, prompt: list[int], tokens: int) -> str:
    _, tokenizer = reference.load(folder)
    return tokenizer.decode(reference.greedy(folder, prompt, tokens), skip_special_tokens=True)


def ask_beside(server: LiveServer, folder, fault_prompt: list[int]) -> tuple[int, dict]:
    """The answer to a prompt that sets the fault off, beside streams that go on with exactly their own tokens."""
    prompts = reference.PROMPTS[:4]
    lengths = [400, *[TOKENS] * (len(prompts) - 1)]
    streams = [
        OpenStream(server, {**ENDLESS, "prompt": prompt, "max_tokens": length})
        for prompt, length in zip(prompts, lengths, strict=True)
    ]
    begun = [stream.read(1) for stream in streams]
    answer = ask(server, fault_prompt, max_tokens=8)
    for prompt, stream, events in zip(prompts, streams, begun, strict=True):
        events += stream.rest()
        stream.close()
        assert not any("error" in event for event in events)
        assert completion_text(events).startswith(expected(folder, prompt))
    return answer


@pytest.mark.parametrize("overlap", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_row_40_a_step_without_memory_is_done_in_smaller_ones(demo_model, overlap):
    with faulty("short", "cpu", disable_overlap=not overlap) as server:
        status, answer = ask_beside(server, demo_model, LONG_PROMPT)
        assert status == 200, answer
        assert answer["choices"][0]["text"] == text_of(demo_model, LONG_PROMPT, 8)
        assert_quiet(server)
        assert ask(server, reference.PROMPTS[0])[1]["choices"][0]["text"] == expected(demo_model, reference.PROMPTS[0])
        assert "out of memory in a step of" in server.log()
        assert "Traceback" not in server.log()


def test_row_40_a_request_that_fits_no_step_is_answered_503(demo_model):
    with faulty("cursed", "cpu") as server:
        status, answer = ask_beside(server, demo_model, [TRIGGER, 7, 9])
        assert (status, answer["error"]["code"]) == (503, "out_of_memory")
        assert_quiet(server)
        assert server.json("/health")[0] == 200
        assert ask(server, reference.PROMPTS[0])[1]["choices"][0]["text"] == expected(demo_model, reference.PROMPTS[0])
        assert "Traceback" not in server.log()


@pytest.mark.parametrize(
    ("fault", "sentence"),
    [
        ("exhausted", "ran out of memory; lower --max_gpu_memory_utilization"),
        ("illegal", "the GPU failed (CUDA error: an illegal memory access was encountered); start it again"),
    ],
)
@pytest.mark.parametrize("overlap", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_rows_40_and_41_an_engine_that_cannot_go_on_ends(fault, sentence, overlap):
    with faulty(fault, "cpu", disable_overlap=not overlap) as server:
        assert_ends(server, sentence)


def assert_ends(server: LiveServer, sentence: str) -> None:
    """The fault ends every request with an error within seconds, then the server, in one sentence."""
    streams = [OpenStream(server, ENDLESS) for _ in range(3)]
    begun = [stream.read(2) for stream in streams]
    assert all(completion_text(events) for events in begun)
    started = time.monotonic()
    status, answer = ask(server, [TRIGGER, 7, 9])
    assert status == 503, answer
    for stream in streams:
        assert stream.rest()[-1]["error"]["code"] == "engine_dead"
        stream.close()
    assert server.json("/health") == (503, {"status": "engine_dead"})
    assert time.monotonic() - started < 5
    log = server.log()
    assert sentence in log
    assert "Traceback" not in log
    assert server.wait(15) == 1
