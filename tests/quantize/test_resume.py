"""A run that is stopped anywhere leaves nothing that loads, and goes on to the very same bytes."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial

import pytest
import torch

from bladellm_runtime.errors import ConfigError, UserError
from bladellm_tools.quantize.algorithms.registry import make_algorithm
from bladellm_tools.quantize.job import Progress
from bladellm_tools.quantize.pipeline import files, publish
from bladellm_tools.quantize.pipeline.run import quantize_model
from tests.conftest import ROOT
from tests.quantize.jobs import W4_ASYMMETRIC, Steps, digests, job_of, save_model, windows
from tests.support.cases import drawn_of


class Stopped(Exception):
    pass


def stop() -> None:
    raise Stopped


def interrupt() -> None:
    raise KeyboardInterrupt


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("float") / "model"
    save_model(folder, "qwen3")
    return folder


@pytest.fixture(scope="module")
def data():
    return windows()


def full_job(model, output, data, **options):
    """AWQ with fallback and KV scales: everything a part can hold."""
    options = {"fallback_ratio": 0.3, "kv_scales": True, "scheme": W4_ASYMMETRIC, "windows": data, **options}
    return job_of(model, output, "awq", **options)


def partial_of(output):
    return output.with_name(output.name + ".partial")


@pytest.fixture(scope="module")
def whole(model, data, tmp_path_factory):
    """The digests of an uninterrupted run, and the steps it took."""
    steps = Steps()
    output = tmp_path_factory.mktemp("whole") / "out"
    quantize_model(full_job(model, output, data), steps)
    assert not partial_of(output).exists()
    return digests(output), steps.seen


STEPS = 1 + 3 * 5


@pytest.mark.turns
@pytest.mark.parametrize("at", drawn_of(range(STEPS), 1, always=(0, 15)))
def test_stopped_at_every_step(at, model, data, whole, tmp_path):
    expected, seen = whole
    assert len(seen) == STEPS
    output = tmp_path / "out"

    with pytest.raises(KeyboardInterrupt if at % 2 else Stopped):
        quantize_model(full_job(model, output, data), Steps(at, interrupt if at % 2 else stop))
    assert not output.exists()
    assert not list(tmp_path.rglob("config.json"))
    assert [path.name for path in tmp_path.iterdir()] == ["out.partial"]
    steps = Steps()
    quantize_model(full_job(model, output, data, resume=True), steps)
    assert digests(output) == expected
    finished = sum(step == "done" for step, _ in seen[:at])
    replayed = sum(step == "replay" for step, _ in steps.seen)
    begun = sum(step == "write" for step, _ in seen[: at + 1])
    assert finished <= replayed <= begun or begun == 3
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_stopped_again_and_again(model, data, whole, tmp_path):
    """The second attempt dies while it replays, the third later on."""
    output = tmp_path / "out"
    for at in (8, 1, 2, 9):
        with pytest.raises(Stopped):
            quantize_model(full_job(model, output, data, resume=True), Steps(at, stop))
    quantize_model(full_job(model, output, data, resume=True), Progress())
    assert digests(output) == whole[0]


@pytest.mark.turns
@pytest.mark.parametrize("count", drawn_of(range(1, 20), 1, always=(1, 19)))
def test_stopped_at_every_write(count, model, data, whole, tmp_path, monkeypatch):
    """The disk is full at the n-th file; what a torn write leaves behind is cleared. Then there is space again."""
    output = tmp_path / "out"
    written = 0
    real = os.fsync

    def fsync(handle):
        nonlocal written
        if not os.path.isdir(f"/proc/self/fd/{handle}"):
            written += 1
            if written == count:
                raise OSError(28, "No space left on device")
        real(handle)

    monkeypatch.setattr(files.os, "fsync", fsync)
    with pytest.raises(UserError, match=r"cannot be written: No space left on device; free some space, .* --resume"):
        quantize_model(full_job(model, output, data), Progress())
    assert not output.exists()
    quantize_model(full_job(model, output, data, resume=True), Progress())
    assert digests(output) == whole[0]


def test_stopped_before_the_last_rename(model, data, whole, tmp_path, monkeypatch):
    """All is there, config.json too: only the name is not."""
    output = tmp_path / "out"
    with monkeypatch.context() as patch:
        patch.setattr(publish, "write_errors", lambda path: stop())
        with pytest.raises(Stopped):
            quantize_model(full_job(model, output, data), Progress())
    assert not output.exists()
    steps = Steps()
    quantize_model(full_job(model, output, data, resume=True), steps)
    assert steps.seen == [("plan", 3)]
    assert digests(output) == whole[0]


SCRIPT = """
import sys, time, torch
from pathlib import Path
from bladellm_tools.quantize.pipeline.run import quantize_model
from tests.quantize.jobs import Steps
from tests.quantize.test_resume import full_job
model, output, data = map(Path, sys.argv[1:])
steps = Steps()
steps.layer = lambda index, stage: (print(stage, index, flush=True), time.sleep(0.05))
tokens = torch.frombuffer(bytearray(data.read_bytes()), dtype=torch.int64).view(6, 21)
quantize_model(full_job(model, output, tokens), steps)
"""


@pytest.mark.turns("interrupted quantization")
@pytest.mark.parametrize(
    ("sign", "line"),
    [
        (signal.SIGKILL, "write 1"),
        pytest.param(signal.SIGKILL, "round 2", marks=pytest.mark.slow),
        pytest.param(signal.SIGINT, "calibrate 1", marks=pytest.mark.slow),
    ],
)
def test_killed(sign, line, model, data, whole, tmp_path):
    output = tmp_path / "out"
    (tmp_path / "data").write_bytes(data.numpy().tobytes())
    command = [sys.executable, "-c", SCRIPT, str(model), str(output), str(tmp_path / "data")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, cwd=ROOT) as process:
        for printed in process.stdout:
            if printed.strip() == line:
                time.sleep(0.02)
                process.send_signal(sign)
                break
        assert process.wait(30) not in (0, 1) or sign == signal.SIGINT
    assert not output.exists()
    assert partial_of(output).exists()
    quantize_model(full_job(model, output, data, resume=True), Progress())
    assert digests(output) == whole[0]


def interrupted(model, output, data, at=8, **options):
    with pytest.raises(Stopped):
        quantize_model(full_job(model, output, data, **options), Steps(at, stop))


def test_an_interrupted_run_is_not_overwritten(model, data, tmp_path):
    interrupted(model, tmp_path / "out", data)
    before = digests(tmp_path)
    with pytest.raises(ConfigError, match=r"out.partial holds an interrupted run; go on with it by --resume"):
        quantize_model(full_job(model, tmp_path / "out", data), Progress())
    assert digests(tmp_path) == before


OTHERS = {
    "calibration data": lambda job: replace(job, windows=job.windows.roll(1, 0)),
    "scheme": lambda job: replace(job, scheme=replace(job.scheme, bits=8)),
    "algorithm": lambda job: replace(job, algorithm=partial(make_algorithm, "gptq")),
    "--damp": lambda job: replace(job, settings={**job.settings, "damp": 0.1}),
    "--extra": lambda job: replace(job, settings={**job.settings, "extra": True}),
    "ignore": lambda job: replace(job, ignore=("lm_head", "*.0.mlp.*")),
    "kv_scales": lambda job: replace(job, kv_scales=False),
    "fallback_ratio": lambda job: replace(job, fallback_ratio=0.5),
    "type of activations": lambda job: replace(job, dtype=torch.bfloat16),
}


@pytest.mark.parametrize("what", drawn_of(OTHERS, 4))
def test_other_work_is_refused_saying_what_differs(what, model, data, tmp_path):
    interrupted(model, tmp_path / "out", data)
    before = digests(tmp_path)
    job = OTHERS[what](full_job(model, tmp_path / "out", data, resume=True))
    with pytest.raises(ConfigError, match=rf"begun with something else: .*{what}.*delete the folder"):
        quantize_model(job, Progress())
    assert digests(tmp_path) == before


def test_another_model_is_refused(model, data, tmp_path):
    interrupted(model, tmp_path / "out", data)
    save_model(tmp_path / "other", "qwen3")
    with pytest.raises(ConfigError, match=r"model file model.safetensors"):
        quantize_model(full_job(tmp_path / "other", tmp_path / "out", data, resume=True), Progress())


def test_how_fast_is_no_difference(model, data, tmp_path):
    """Batch, devices and the flags about them may change between runs."""
    interrupted(model, tmp_path / "out", data, settings={"batch_size": 4, "damp": 0.01})
    job = full_job(model, tmp_path / "out", data, resume=True, batch=2, settings={"batch_size": 2, "damp": 0.01})
    quantize_model(replace(job, devices=job.devices * 2, cpu_offload=True), Progress())
    assert read_report(tmp_path / "out")["settings"] == {"batch_size": 2, "damp": 0.01}


def read_report(folder):
    return json.loads((folder / "quantize_report.json").read_text())


def test_a_finished_part_that_changed_is_refused(model, data, tmp_path):
    interrupted(model, tmp_path / "out", data, at=12)
    part = partial_of(tmp_path / "out") / "model" / "model-00001-of-00004.safetensors"
    content = bytearray(part.read_bytes())
    content[-1] ^= 1
    part.write_bytes(content)
    with pytest.raises(UserError, match=r"model-00001-of-00004.safetensors is not as it was written"):
        quantize_model(full_job(model, tmp_path / "out", data, resume=True), Progress())


@pytest.mark.parametrize("text", ["", "{", '{"version": 99, "fingerprint": {}}', '{"version": "x"}'])
def test_a_manifest_that_cannot_be_read_is_refused(text, model, data, tmp_path):
    interrupted(model, tmp_path / "out", data)
    (partial_of(tmp_path / "out") / "manifest.json").write_text(text)
    with pytest.raises(UserError, match=r"manifest.json"):
        quantize_model(full_job(model, tmp_path / "out", data, resume=True), Progress())


def test_resume_without_anything_to_resume_is_a_plain_run(model, data, whole, tmp_path):
    quantize_model(full_job(model, tmp_path / "out", data, resume=True), Progress())
    assert digests(tmp_path / "out") == whole[0]
