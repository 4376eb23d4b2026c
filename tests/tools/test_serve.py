"""`blade_llm serve`: its banner, and that it starts and stops without leaving anything behind."""

import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import time
import urllib.request
from pathlib import Path

import psutil
import pytest

from bladellm_runtime.config import ServingArgs
from bladellm_runtime.wire.messages import EngineReady
from bladellm_tools.serve import banner
from tests.support.cases import drawn_of, some_pairs
from tests.tools.command import ROOT, command, run, wait_for_library

FRONT_ENDS = [[], ["--disable_frontend_multiprocessing"]]
GIB = 1024**3
READY = EngineReady(
    vocab_size=100,
    max_model_len=4096,
    kv_tokens=6144,
    eos_token_ids=[2],
    device="cuda:0",
    dtype="bfloat16",
    memory=[("weights", 15 * GIB), ("KV cache", 100 * GIB)],
    phases=[("load weights", 2.5), ("warm up", 0.25)],
    kv_cache="int8; cuda, 128 tokens a granule; prompt cache",
)


def test_banner() -> None:
    args = ServingArgs(model="org/model", served_model_name=["it's me", "other"], api_key=["topsecret"])
    lines = banner(args, "http://127.0.0.1:8081", READY, 4.0)
    text = "\n".join(lines)
    for words in (
        "org/model",
        "it's me, other",
        "bfloat16",
        "cuda:0",
        "15.00 GiB",
        "115.00 GiB",
        "6,144 tokens",
        "1.5 requests",
        "int8; cuda",
    ):
        assert words in text
    seconds = [line.rsplit(None, 2) for line in lines if line.endswith(" s")]
    assert [(name.strip(), value) for name, value, _ in seconds] == [
        ("load weights, 6.4 GB/s", "2.50"),
        ("warm up", "0.25"),
        ("processes, imports", "1.25"),
        ("total", "4.00"),
    ]
    assert "topsecret" not in text
    curl = shlex.split(lines[-1])
    assert curl[:2] == ["curl", "http://127.0.0.1:8081/v1/chat/completions"]
    assert "Authorization: Bearer $API_KEY" in curl
    assert json.loads(curl[-1])["model"] == "it's me"


def test_the_recipe_serves_and_sigterm_ends_it(device) -> None:
    flags = ["--config", "recipes/serve_demo.yaml", "--port", "0", "--device", device]
    process = subprocess.Popen([*command("blade_llm_server"), *flags], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    try:
        assert process.stdout is not None
        lines = []
        while not lines or not lines[-1].startswith("curl "):
            line = process.stdout.readline()
            assert line, lines
            lines.append(line)
        children = psutil.Process(process.pid).children(recursive=True)
        assert children, "the engine is a process of its own"
        curl = shlex.split(lines[-1])
        request = urllib.request.Request(curl[1], curl[-1].encode(), {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=60) as response:
            answer = json.load(response)
        assert answer["model"] == "demo"
        assert 0 < answer["usage"]["completion_tokens"] <= 32
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
        assert process.stdout.read() == ""
        assert all(gone(child) for child in children)
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize(
    ("delay", "flags"), some_pairs([0.0, 0.2, 0.6], [[], ["--disable_frontend_multiprocessing"]], 2)
)
def test_ctrl_c_during_the_start_is_clean(delay: float, flags: list[str], demo_model: Path) -> None:
    flags = ["--model", str(demo_model), "--port", "0", "--kv_cache_gib", "0.05", "--device", "cpu", *flags]
    process = subprocess.Popen(
        [*command("blade_llm_server"), *flags], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT
    )
    wait_for_library(process.pid, "uvloop")
    time.sleep(delay)
    children = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    if process.returncode == 0:
        assert "serving at" in out, "it was quick enough to be ready"
        assert err == ""
    else:
        assert (process.returncode, out) == (130, "")
        assert err.count("\n") == 1
    assert all(gone(child) for child in children)


def gone(process: psutil.Process, seconds: float = 10.0) -> bool:
    """True once the process has ended."""
    deadline = time.monotonic() + seconds
    while process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def test_a_port_in_use_is_one_sentence(demo_model: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        done = run("blade_llm_server", "--model", str(demo_model), "--port", port)
    assert done.returncode != 0
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert port in done.stderr
    assert "--port" in done.stderr


@pytest.mark.parametrize("model", drawn_of(["/no/such/folder", "recipes/serve_demo.yaml"], 1))
def test_a_model_that_is_none_is_one_sentence(model: str) -> None:
    env = {**os.environ, "HF_HUB_OFFLINE": "1"}
    done = run("blade_llm_server", "--model", model, env=env)
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert model in done.stderr


def test_a_folder_that_is_no_models_is_one_sentence() -> None:
    done = run("blade_llm_server", "--model", "recipes")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
    assert "recipes/config.json is missing" in done.stderr


@pytest.mark.parametrize("flags", drawn_of(FRONT_ENDS, 1))
def test_a_folder_with_two_faults_is_one_sentence(flags: list[str], demo_model: Path, tmp_path: Path) -> None:
    """Tokenizer and engine load side by side, and both fail; whichever is second has nothing to add."""
    for name in ("config.json", "tokenizer_config.json"):
        shutil.copy(demo_model / name, tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"nothing")
    done = run("blade_llm_server", "--model", str(tmp_path), "--port", "0", *flags)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1), done.stderr
    assert str(tmp_path) in done.stderr
