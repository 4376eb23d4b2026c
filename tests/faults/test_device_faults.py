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


def faulty(faults: str, device: str, **flags) -> LiveServer:
    command = [sys.executable, "-m", "tests.support.faulty_engine", *faults.split()]
    return LiveServer(command, **{"device": device, "dtype": "float32", "kv_cache_gib": 0.05, **flags})


def text_of(folder, prompt: list[int], tokens: int) -> str:
    _, tokenizer = reference.load(folder)
    return tokenizer.decode(reference.greedy(folder, prompt, tokens), skip_special_tokens=True)


def ask_beside(server: LiveServer, folder, fault_prompt: list[int]) -> tuple[int, dict]:
    """The answer to a prompt that sets the fault off, beside streams that go on with exactly their own tokens."""
    prompts = reference.PROMPTS[:4]
    lengths = [150, *[TOKENS] * (len(prompts) - 1)]
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


OVERLAP = pytest.mark.parametrize("overlap", [True, pytest.param(False, marks=pytest.mark.slow)])


@OVERLAP
def test_row_40_steps_without_memory_are_done_in_smaller_ones_if_there_are_any(demo_model, overlap):
    """One server goes through all of them: a long step, a request that fits no step, and then no step that fits."""
    with faulty("short cursed exhausted", "cpu", disable_overlap=not overlap) as server:
        assert_does_it_in_smaller_steps(server, demo_model)
        assert_answers_503(server, demo_model)
        assert_ends(server, "ran out of memory; lower --max_gpu_memory_utilization", TRIGGER - 2)


def assert_does_it_in_smaller_steps(server: LiveServer, folder) -> None:
    status, answer = ask_beside(server, folder, LONG_PROMPT)
    assert status == 200, answer
    assert answer["choices"][0]["text"] == text_of(folder, LONG_PROMPT, 8)
    assert_quiet(server)
    assert ask(server, reference.PROMPTS[0])[1]["choices"][0]["text"] == expected(folder, reference.PROMPTS[0])
    assert "out of memory in a step of" in server.log()
    assert "Traceback" not in server.log()


def assert_answers_503(server: LiveServer, folder) -> None:
    status, answer = ask_beside(server, folder, [TRIGGER - 1, 7, 9])
    assert (status, answer["error"]["code"]) == (503, "out_of_memory")
    assert_quiet(server)
    assert server.json("/health")[0] == 200
    assert ask(server, reference.PROMPTS[0])[1]["choices"][0]["text"] == expected(folder, reference.PROMPTS[0])
    assert "Traceback" not in server.log()


@OVERLAP
def test_row_41_an_engine_without_its_gpu_ends(overlap):
    with faulty("illegal", "cpu", disable_overlap=not overlap) as server:
        sentence = "the GPU failed (CUDA error: an illegal memory access was encountered); start it again"
        assert_ends(server, sentence)


def assert_ends(server: LiveServer, sentence: str, trigger: int = TRIGGER) -> None:
    """The fault ends every request with an error within seconds, then the server, in one sentence."""
    streams = [OpenStream(server, ENDLESS) for _ in range(3)]
    begun = [stream.read(2) for stream in streams]
    assert all(completion_text(events) for events in begun)
    started = time.monotonic()
    status, answer = ask(server, [trigger, 7, 9])
    assert status == 503, answer
    for stream in streams:
        assert stream.rest()[-1]["error"]["code"] == "engine_dead"
        stream.close()
    assert server.json("/health") == (503, {"status": "engine_dead"})
    assert time.monotonic() - started < 5
    log = server.log()
    assert sentence in log
    assert "Traceback" not in log
    assert server.hurry() == 1
