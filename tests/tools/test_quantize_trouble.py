"""`blade_llm quantize` when something is wrong: one sentence, no half-made output, and `--resume` that goes on."""

import errno
import json
import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from bladellm_runtime import LLM, SamplingParams
from bladellm_tools import cli
from bladellm_tools.quantize import command as quantize_command
from bladellm_tools.quantize.calibration import texts
from tests.support.cases import drawn_of
from tests.tools.command import ROOT, command

GPTQ = ("--bit", "4", "--quant_algo", "gptq", "--block_wise_quant")
QUICK = ("--max_samples", "5", "--max_length", "48", "--device", "cpu")


def quantize(model: Path, output: Path, *arguments: str) -> int:
    flags = ["--model", str(model), "--output_dir", str(output), *QUICK, *arguments]
    return cli.guarded(lambda: cli.dispatch("blade_llm", ["quantize", *flags]), debug=False)


def refused(capsys: pytest.CaptureFixture[str], code: int, *words: str) -> str:
    """The one line on standard error that begins with `error:`; it must hold the words."""
    errors = [line for line in capsys.readouterr().err.splitlines() if not line.startswith(" ")]
    errors = [line for line in errors if line.startswith(("error:", "Traceback"))]
    assert len(errors) == 1, errors
    assert "internal error" not in errors[0]
    assert code in (1, 2)
    for word in words:
        assert word in errors[0], errors[0]
    return errors[0]


def changed(model: Path, folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> Path:
    """A copy of the model with other weights."""
    folder.mkdir()
    for path in model.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--output_dir", "out"], ["--model is missing"]),
        (["--model", "recipes/models/demo"], ["--output_dir is missing"]),
        (["--model", "no/such/folder", "--output_dir", "out"], ["--model"]),
        (["--model", "recipes/models/demo", "--output_dir", "out", "--bit", "3"], ["--bit", "one of 8, 4"]),
        (["--model", "recipes/models/demo", "--output_dir", "out", "--group_size", "128"], ["192", "--group_size 64"]),
        (["--model", "recipes/models/demo", "--output_dir", "out", "--report_data", "x.txt"], ["--report"]),
        (["--model", "recipes/models/demo", "--output_dir", "out", "--num_gpus", "63"], ["--num_gpus 63"]),
        (["--model", "recipes/models/demo", "--output_dir", "out", "--ignore", "*"], ["--ignore"]),
        (["--model", "recipes/models/demo", "--output_dir", "out", "--ignore", "q"], ["--ignore 'q'"]),
    ],
)
def test_flags_that_cannot_be(flags, words, capsys, monkeypatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(ROOT)
    code = cli.guarded(lambda: cli.dispatch("blade_llm", ["quantize", *flags]), debug=False)
    refused(capsys, code, *words)
    assert not (ROOT / "out").exists()
    assert not (ROOT / "out.partial").exists()


def test_outputs_that_cannot_be(demo_model, tmp_path, capsys) -> None:
    full = tmp_path / "full"
    full.mkdir()
    (full / "letter.txt").write_text("keep me")
    refused(capsys, quantize(demo_model, full), "--output_dir", "not empty")
    refused(capsys, quantize(demo_model, full / "letter.txt"), "--output_dir", "is a file")
    refused(capsys, quantize(demo_model, full / "letter.txt" / "out"), "--output_dir")
    refused(capsys, quantize(demo_model, demo_model), "model's own folder")
    refused(capsys, quantize(demo_model, demo_model / "out"), "model's own folder")
    assert [path.name for path in full.iterdir()] == ["letter.txt"]
    assert (full / "letter.txt").read_text() == "keep me"
    assert not (demo_model / "out").exists()


def test_a_folder_without_the_right_to_write(demo_model, tmp_path, capsys, monkeypatch) -> None:
    locked = tmp_path / "locked"
    locked.mkdir(mode=0o500)
    if os.geteuid() == 0:  # nothing is forbidden to root
        monkeypatch.setattr(os, "access", lambda path, mode: not (Path(path) == locked and mode & os.W_OK))
    refused(capsys, quantize(demo_model, locked / "out"), "--output_dir", str(locked), "cannot be written")
    assert list(locked.iterdir()) == []


def test_an_empty_output_folder_is_used(demo_model, tmp_path) -> None:
    (tmp_path / "out").mkdir()
    assert quantize(demo_model, tmp_path / "out") == 0
    assert (tmp_path / "out" / "config.json").exists()


def test_a_model_that_is_quantized_already(demo_model, tmp_path, capsys) -> None:
    assert quantize(demo_model, tmp_path / "once") == 0
    capsys.readouterr()
    refused(capsys, quantize(tmp_path / "once", tmp_path / "twice"), "quantized already", "float")
    assert not (tmp_path / "twice").exists()


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.jsonl", "", ["a.jsonl holds no text"]),
        ("a.jsonl", '{"text": "fine"}\n{"text": "not', ["a.jsonl line 2 is not JSON"]),
        ("a.jsonl", '{"prompt": "fine"}\n', ["a.jsonl line 1 has no key 'text'"]),
        ("a.txt", "\n\n", ["a.txt holds no text"]),
        ("a.csv", "text\nx\n", ["must end in .jsonl"]),
    ],
)
def test_calibration_data_that_cannot_be_used(name, content, words, demo_model, tmp_path, capsys) -> None:
    path = tmp_path / name
    path.write_text(content)
    refused(capsys, quantize(demo_model, tmp_path / "out", *GPTQ, "--calib_data_file", str(path)), *words)
    assert [path.name for path in tmp_path.iterdir()] == [name]


@pytest.mark.parametrize("algorithm", drawn_of(["gptq", "awq", "smoothquant+"], 1))
def test_a_single_line_of_data_is_enough_with_a_warning(algorithm, demo_model, tmp_path, capsys) -> None:
    path = tmp_path / "one.jsonl"
    path.write_text('{"text": "hello world!"}\n')
    flags = ("--bit", "4", "--group_size", "64", "--quant_algo", algorithm, "--calib_data_file", str(path))
    assert quantize(demo_model, tmp_path / "out", *flags) == 0
    shown = capsys.readouterr().err
    assert "warning:" in shown
    assert "32,768" in shown
    check_loads(tmp_path / "out")


def check_loads(folder: Path) -> None:
    with LLM(str(folder), device="cpu", kv_cache_gib=0.01, disable_frontend_multiprocessing=True) as llm:
        done = llm.generate(["Once"], SamplingParams(max_tokens=3, temperature=0, ignore_eos=True))
    assert len(done[0].outputs[0].token_ids) == 3


def test_weights_that_are_no_numbers(demo_model, tmp_path, capsys) -> None:
    def spoil(weights: dict[str, torch.Tensor]) -> None:
        weights["model.layers.2.mlp.up_proj.weight"][5, 7] = float("nan")

    model = changed(demo_model, tmp_path / "model", spoil)
    refused(capsys, quantize(model, tmp_path / "out", *GPTQ), "model.layers.2.mlp.up_proj.weight", "NaN")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "flags",
    drawn_of(
        [
            GPTQ,
            ("--bit", "4", "--quant_algo", "awq", "--group_size", "64", "--sym", "false"),
            ("--bit", "4", "--quant_algo", "smoothquant+", "--group_size", "64", "--alpha", "0.5"),
            ("--quant_mode", "act_and_weight_quant", "--quant_algo", "smoothquant_gptq"),
        ],
        1,
    ),
    ids=lambda flags: flags[3],
)
def test_dead_columns(flags, demo_model, tmp_path) -> None:
    """Channels that are never active, and columns and whole groups that are 0, give a model of finite numbers."""

    def kill(weights: dict[str, torch.Tensor]) -> None:
        weights["model.layers.0.input_layernorm.weight"][3:9] = 0
        weights["model.layers.1.post_attention_layernorm.weight"].zero_()
        weights["model.layers.2.mlp.down_proj.weight"][:, :64] = 0
        weights["model.layers.3.self_attn.q_proj.weight"][5] = 0
        weights["model.layers.3.mlp.up_proj.weight"].zero_()

    model = changed(demo_model, tmp_path / "model", kill)
    assert quantize(model, tmp_path / "out", *flags) == 0
    for path in (tmp_path / "out").glob("*.safetensors"):
        for name, tensor in load_file(path).items():
            assert not tensor.is_floating_point() or bool(tensor.float().isfinite().all()), name
    check_loads(tmp_path / "out")


@pytest.mark.turns("interrupted quantization")
def test_a_disk_that_fills_up_and_a_run_that_goes_on(demo_model, tmp_path, capsys, monkeypatch) -> None:
    """Full after any number of files: a sentence, nothing that loads; then the same bytes as without the trouble."""
    assert quantize(demo_model, tmp_path / "whole", *GPTQ) == 0
    out, real = tmp_path / "out", os.fsync
    for allowed in (1, 8, 14):
        calls = iter(range(10**6))

        def fsync(handle: int, calls=calls, allowed=allowed) -> None:
            if next(calls) >= allowed:
                raise OSError(errno.ENOSPC, "No space left on device")
            real(handle)

        capsys.readouterr()
        monkeypatch.setattr(os, "fsync", fsync)
        code = quantize(demo_model, out, *GPTQ, "--resume")
        monkeypatch.setattr(os, "fsync", real)
        refused(capsys, code, "No space left on device", "--resume")
        assert not out.exists()
    assert quantize(demo_model, out, *GPTQ, "--resume") == 0
    assert_same_models(out, tmp_path / "whole")


def assert_same_models(one: Path, other: Path) -> None:
    names = sorted(path.name for path in one.iterdir())
    assert names == sorted(path.name for path in other.iterdir())
    for name in names:
        if name != "quantize_report.json":
            assert (one / name).read_bytes() == (other / name).read_bytes(), name


@pytest.mark.turns("interrupted quantization")
def test_ctrl_c_keeps_what_is_done_and_resume_goes_on(demo_model, tmp_path, capsys) -> None:
    flags = ["--model", str(demo_model), "--device", "cpu", *GPTQ, "--max_samples", "24", "--max_length", "128"]
    out = tmp_path / "out"
    line = [*command("blade_llm_quantize"), *flags]
    with subprocess.Popen([*line, "--output_dir", str(out)], cwd=ROOT, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        for text in process.stderr:
            if text.startswith("layer 2 of 4 done"):
                break
        process.send_signal(signal.SIGINT)
        rest = process.stderr.read()
        assert process.wait(60) == 130
    assert "Traceback" not in rest
    errors = [text for text in rest.splitlines() if text.startswith("error:")]
    assert len(errors) == 1
    assert "--resume" in errors[0]
    assert not out.exists()
    more = (*GPTQ, "--max_samples", "24", "--max_length", "128")
    refused(capsys, quantize(demo_model, out, *more), "--resume")
    assert quantize(demo_model, out, *more, "--resume") == 0
    assert "replay" in capsys.readouterr().out, "the finished layers were not rounded again"
    assert quantize(demo_model, tmp_path / "whole", *more) == 0
    assert_same_models(out, tmp_path / "whole")


def test_resume_with_other_flags_is_refused(demo_model, tmp_path, capsys, monkeypatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(quantize_command, "quantize_model", interrupted_after(quantize_command.quantize_model, 2))
        assert quantize(demo_model, tmp_path / "out", *GPTQ) == 130
    shown = capsys.readouterr().err
    assert shown.count("error:") == 1
    assert "--resume" in shown
    refused(capsys, quantize(demo_model, tmp_path / "out", *GPTQ, "--seed", "5", "--resume"), "seed")
    assert quantize(demo_model, tmp_path / "out", *GPTQ, "--resume", "--batch_size", "2") == 0


def interrupted_after(action: Callable[..., object], layers: int) -> Callable[..., object]:
    """The pipeline with a Ctrl-C once so many layers are done."""

    def run(job: object, progress: object) -> object:
        done = progress.done

        def stop(index: int) -> None:
            done(index)
            if index + 1 == layers:
                raise KeyboardInterrupt

        progress.done = stop
        return action(job, progress)

    return run


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("CUDA out of memory. Tried ..."), MemoryError(),
              RuntimeError("[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: not enough memory")],
    ids=["cuda", "python", "cpu"],
)  # fmt: skip
def test_too_little_memory_names_the_flags_to_change(error, demo_model, tmp_path, capsys, monkeypatch) -> None:
    def fail(*arguments: object) -> None:
        raise error

    monkeypatch.setattr(quantize_command, "quantize_model", fail)
    code = quantize(demo_model, tmp_path / "out", *GPTQ)
    refused(capsys, code, "--cpu_offload", "--batch_size 2", "--max_length 24", "--max_samples 2")
    code = quantize(demo_model, tmp_path / "out", *GPTQ, "--cpu_offload", "--batch_size", "1")
    assert "--cpu_offload" not in refused(capsys, code, "--max_length 24")


def test_an_error_of_ours_is_not_called_the_users(demo_model, tmp_path, capsys, monkeypatch) -> None:
    def fail(*arguments: object) -> None:
        raise RuntimeError("shapes do not match")

    monkeypatch.setattr(quantize_command, "quantize_model", fail)
    assert quantize(demo_model, tmp_path / "out") == 1
    assert "internal error: RuntimeError: shapes do not match" in capsys.readouterr().err


def test_a_report_text_that_is_too_short_is_refused_before_the_work(demo_model, tmp_path, capsys) -> None:
    text = tmp_path / "short.txt"
    text.write_text("Too short.")
    code = quantize(demo_model, tmp_path / "out", "--report", "--report_data", str(text))
    refused(capsys, code, "--report_data", "longer text")
    refused(capsys, quantize(demo_model, tmp_path / "out", "--report", "--report_data", "none.txt"), "--report_data")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("error", "code"), [(torch.OutOfMemoryError("CUDA"), 1), (KeyboardInterrupt(), 130)], ids=str)
def test_trouble_in_the_report_says_that_the_model_is_complete(
    error, code, demo_model, tmp_path, capsys, monkeypatch
) -> None:
    def fail(*arguments: object) -> None:
        raise error

    monkeypatch.setattr(quantize_command, "run_evaluation", fail)
    out = tmp_path / "out"
    assert quantize(demo_model, out, "--report") == code
    refused(capsys, 1, "--report", "the model is complete", f"blade_llm eval --model {out} --baseline")
    check_loads(out)


def test_an_interrupt_before_the_first_layer_promises_nothing(demo_model, tmp_path, capsys, monkeypatch) -> None:
    def stop(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(quantize_command, "find_alpha", stop)
    flags = ("--bit", "4", "--quant_algo", "smoothquant+", "--group_size", "64")
    assert quantize(demo_model, tmp_path / "out", *flags) == 130
    assert "--resume" not in refused(capsys, 1, "interrupted")


def test_files_beyond_the_bounds_are_refused(demo_model, tmp_path, capsys, monkeypatch) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"text": "x" * 100}) + "\n" for _ in range(50)))
    for name, bound in (("MAX_FILE_BYTES", 1000), ("MAX_CHARACTERS", 1000), ("MAX_LINE_BYTES", 50)):
        with monkeypatch.context() as patch:
            patch.setattr(texts, name, bound)
            code = quantize(demo_model, tmp_path / "out", *GPTQ, "--calib_data_file", str(path))
            refused(capsys, code, "--calib_data_file", "a.jsonl")
