"""Faults inside the engine, one test a row of the fault table, on the real engine behind the real server."""

import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.engine import reference
from tests.faults.conftest import assert_quiet
from tests.support.cases import drawn_of
from tests.support.live import LiveServer, until

TOKENS = 32
NAN_TOKEN = 5000
SLOTS = 4


def ask(server: LiveServer, prompt: str | list[int], **fields) -> tuple[int, dict]:
    body = {"model": "demo", "prompt": prompt, "temperature": 0, "max_tokens": TOKENS, "ignore_eos": True, **fields}
    return server.json("/v1/completions", body, timeout=120)


@cache
def expected(folder: Path, prompt: str, tokens: int = TOKENS) -> str:
    """transformers' greedy answer to one of `reference.PROMPTS`, which all are made at once."""
    _, tokenizer = reference.load(folder)
    found = reference.greedy_all(folder, [tokenizer.encode(each) for each in reference.PROMPTS], tokens)
    return tokenizer.decode(found[reference.PROMPTS.index(prompt)], skip_special_tokens=True)


def small_kv(folder: Path, tokens: int) -> float:
    """GiB of KV cache that hold `tokens` tokens of the demo model in float32."""
    return tokens * 4 * 2 * 2 * 32 * 4 / 1024**3


def test_row_39_kv_exhausted_mid_decode_resumes_with_identical_tokens(demo_model, device):
    tokens = 96  # so long that requests meet, however late some come
    memory = {"max_model_len": 160, "kv_cache_gib": small_kv(demo_model, 320)}
    prompts = [reference.PROMPTS[index % len(reference.PROMPTS)] for index in range(16)]
    with LiveServer("real", device=device, dtype="float32", max_running_requests=16, **memory) as server:
        ask(server, "warm up", max_tokens=2)
        descriptors = server.open_fds()
        with ThreadPoolExecutor(len(prompts)) as pool:
            answers = list(pool.map(lambda prompt: ask(server, prompt, max_tokens=tokens), prompts))
        # The engine says so a few times a second.
        until(lambda: server.metrics()["blade_llm:num_preemptions_total"] > 0, what="a preemption")
        for prompt, (status, answer) in zip(prompts, answers, strict=True):
            assert status == 200, answer
            assert answer["choices"][0]["text"] == expected(demo_model, prompt, tokens)
            assert answer["usage"]["completion_tokens"] == tokens
        assert_quiet(server)
        until(lambda: server.open_fds() <= descriptors, 8.0, "a return to the open descriptors before")


@pytest.fixture(scope="module")
def nan_model(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo model with its head untied and one embedding not a number: only prompts with that token suffer."""
    folder = tmp_path_factory.mktemp("models") / "nan"
    shutil.copytree(demo_model, folder)
    config = (folder / "config.json").read_text()
    (folder / "config.json").write_text(config.replace('"tie_word_embeddings": true', '"tie_word_embeddings": false'))
    tensors = load_file(folder / "model.safetensors")
    embedding = tensors["model.embed_tokens.weight"]
    tensors["lm_head.weight"] = embedding.clone()
    embedding[NAN_TOKEN] = torch.nan
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def nan_server(nan_model, request) -> Iterator[LiveServer]:
    device = request.config.getoption("--device")
    flags = {"device": device, "dtype": "float32", "kv_cache_gib": 0.05, "max_running_requests": SLOTS}
    with LiveServer("real", model=str(nan_model), **flags) as server:
        ask(server, "warm up", max_tokens=2)
        yield server


@pytest.mark.parametrize("stream", drawn_of([False, True], 1))
def test_row_42_nan_logits_end_that_request_alone(nan_server, demo_model, stream):
    prompt, descriptors = reference.PROMPTS[0], nan_server.open_fds()
    with ThreadPoolExecutor(4) as pool:
        neighbours = [pool.submit(ask, nan_server, prompt) for _ in range(3)]
        for _ in range(5):
            if stream:  # the bias makes the fatal token the first answer, so the error comes after a first event
                body = {"model": "demo", "prompt": [7, 9], "max_tokens": 8, "logit_bias": {NAN_TOKEN: 100}}
                first, *_, last = nan_server.stream("/v1/completions", body)
                assert first["choices"][0]["text"]
                assert last["error"]["code"] == "invalid_logits"
            else:
                status, answer = ask(nan_server, [7, NAN_TOKEN, 9])
                assert status == 500
                assert answer["error"]["code"] == "invalid_logits"
    for neighbour in neighbours:
        status, answer = neighbour.result()
        assert status == 200
        assert answer["choices"][0]["text"] == expected(demo_model, prompt)
    assert ask(nan_server, prompt)[1]["choices"][0]["text"] == expected(demo_model, prompt)
    assert_quiet(nan_server)
    until(lambda: nan_server.open_fds() <= descriptors, 8.0, "a return to the open descriptors before")


def test_row_47_aborted_slots_are_reused_cleanly(nan_server, demo_model):
    """As many clients as slots that hang up again and again, and one that must get exactly its own tokens."""
    prompt, server, stop = reference.PROMPTS[4], nan_server, threading.Event()
    poison = {"model": "demo", "prompt": "Poison " * 20, "max_tokens": 3000, "ignore_eos": True}

    def hang_up_again_and_again() -> None:
        while not stop.is_set():
            with pytest.raises(OSError):  # noqa: PT011 - the time-out closes the connection mid-generation
                server.json("/v1/completions", {**poison, "logit_bias": {NAN_TOKEN: -100}}, timeout=0.1)

    rude = [threading.Thread(target=hang_up_again_and_again) for _ in range(SLOTS)]
    for thread in rude:
        thread.start()
    try:
        for _ in range(4):
            status, answer = ask(server, prompt)
            assert status == 200
            assert answer["choices"][0]["text"] == expected(demo_model, prompt)
    finally:
        stop.set()
        for thread in rude:
            thread.join()
    assert_quiet(server)
