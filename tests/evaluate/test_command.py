"""`blade_llm eval` from the command line to table and JSON, and its refusals."""

import json
import math
import os
import re
import shutil
import subprocess
import sys

import pytest
import torch
import transformers

from bladellm_runtime.errors import CheckpointError, ConfigError, UserError
from bladellm_tools.evaluate.args import EvaluateArgs
from bladellm_tools.evaluate.command import run
from tests.evaluate.texts import perturbed, random_text, reference_kl, reference_logs, reference_losses
from tests.models.harness import save_tiny
from tests.tools.command import ROOT, run_forked, run_on_terminal

WINDOW = 96


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "one.txt"
    path.write_text(random_text(500))
    return path


@pytest.fixture
def rough(demo_model, tmp_path):
    return perturbed(demo_model, tmp_path / "rough", 0.05)


def test_a_comparison_from_start_to_end(demo_model, rough, text, tmp_path, device) -> None:
    other = tmp_path / "two.jsonl"
    other.write_text("".join(json.dumps({"text": random_text(40)}) + "\n" for _ in range(9)))
    out = tmp_path / "result.json"
    done = run_forked(
        "blade_llm", "eval", "--model", str(rough), "--baseline", str(demo_model), "--data", str(text), str(other),
        "--window", str(WINDOW), "--batch_size", "4", "--device", device, "--dtype", "float32", "--json", str(out),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    result = json.loads(out.read_text())
    tokenizer = transformers.AutoTokenizer.from_pretrained(demo_model)
    documents = "\n\n".join(json.loads(line)["text"] for line in other.read_text().splitlines())
    rows = [torch.tensor(tokenizer(words)["input_ids"]) for words in (text.read_text(), documents)]
    windows = [ids[: len(ids) // WINDOW * WINDOW].view(-1, WINDOW) for ids in rows]
    everything = torch.cat(windows)
    logs, rough_logs = reference_logs(demo_model, everything), reference_logs(rough, everything)
    losses = reference_losses(rough_logs, everything)

    overall = result["overall"]
    close = {"rel": 1e-4 if device == "cpu" else 5e-3}
    assert overall["windows"] == len(everything)
    assert overall["targets"] == len(everything) * (WINDOW - 1)
    assert overall["perplexity"]["value"] == pytest.approx(math.exp(sum(losses) / len(losses)), **close)
    kl = reference_kl(rough_logs, logs)
    assert overall["baseline"]["kl_mean"]["value"] == pytest.approx(float(kl.mean()), **close)
    assert overall["baseline"]["kl_p99"] == pytest.approx(float(kl.flatten().quantile(0.99)), **close)
    for place, (part, ids) in enumerate(zip(windows, rows, strict=True)):
        part_losses = reference_losses(reference_logs(rough, part), part)
        found = result["texts"][place]
        assert found["tokens"] == len(ids)
        expected = math.exp(sum(part_losses) / len(part_losses))
        assert found["summary"]["perplexity"]["value"] == pytest.approx(expected, **close)
    sizes = [sum(file.stat().st_size for file in folder.glob("*.safetensors")) for folder in (rough, demo_model)]
    assert [result["size"]["disk_bytes"], result["baseline_size"]["disk_bytes"]] == sizes
    assert result["size"]["memory_bytes"] == 4 * 3_147_456

    lines = {line.split()[0]: line for line in done.stdout.splitlines() if line}
    assert f"{overall['perplexity']['value']:,.3f} [" in lines["all"]
    assert f"{overall['baseline']['kl_mean']['value']:.5f} [" in lines["all"]
    assert f"{overall['baseline']['agreement']['value'] * 100:.2f}% [" in lines["all"]
    assert {"one.txt", "two.jsonl", "baseline", "ratio"} <= set(lines)


@pytest.mark.slow
def test_without_a_baseline_there_is_perplexity_alone(demo_model, text, device) -> None:
    done = run_forked(
        "blade_llm", "eval", "--model", str(demo_model), "--data", str(text), "--window", "64", "--max_windows", "3",
        "--device", device, "--json", "-",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["overall"]["windows"] == 3
    assert result["overall"]["baseline"] is result["baseline"] is result["baseline_size"] is None


@pytest.mark.turns("terminals")
def test_a_terminal_sees_the_table_and_nothing_left_of_the_bar(demo_model, text) -> None:
    arguments = ("--data", str(text), "--window", "64", "--max_windows", "2", "--device", "cpu")
    shown = run_on_terminal("blade_llm", "eval", "--model", str(demo_model), *arguments, columns=160)
    assert re.search(r"one\.txt +2 +[\d.,]+ \[", shown)


def test_help_imports_no_torch() -> None:
    code = (
        "import sys; sys.argv = ['blade_llm', 'eval', '--help']\n"
        "from bladellm_tools.cli import main\n"
        "try: main()\n"
        "except SystemExit: print('torch' in sys.modules, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=ROOT)
    assert "--baseline" in done.stdout
    assert done.stderr.strip() == "False"


def arguments(model, text, **options) -> EvaluateArgs:
    return EvaluateArgs(**{"model": str(model), "data": [str(text)], "window": 64, "device": "cpu", **options})


def test_models_that_cannot_be_compared_are_refused(demo_model, text, tmp_path) -> None:
    save_tiny(tmp_path / "tiny", "llama")
    with pytest.raises(ConfigError, match="vocabulary of 8192 tokens and --baseline one of 97"):
        run(arguments(demo_model, text, baseline=str(tmp_path / "tiny")))
    other = tmp_path / "other"
    shutil.copytree(demo_model, other)
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    tokenizer["model"]["merges"] = tokenizer["model"]["merges"][:200]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(ConfigError, match=r"tokenize \S+one.txt differently; give --tokenizer_dir"):
        run(arguments(demo_model, text, baseline=str(other)))
    assert run(arguments(demo_model, text, baseline=str(other), tokenizer_dir=str(demo_model), max_windows=1)) == 0


def test_the_baselines_tokenizer_is_not_needed(demo_model, rough, text) -> None:
    (rough / "tokenizer.json").unlink()
    assert run(arguments(demo_model, text, baseline=str(rough), max_windows=1)) == 0


def test_bad_flags_are_refused_with_what_would_work(demo_model, text, tmp_path) -> None:
    with pytest.raises(ConfigError, match="--model is missing"):
        EvaluateArgs(data=["a.txt"])
    with pytest.raises(ConfigError, match="--data is missing"):
        EvaluateArgs(model="a")
    with pytest.raises(ConfigError, match="--window 5000 is above the --model's max_position_embeddings of 4096"):
        run(arguments(demo_model, text, window=5000))
    with pytest.raises(CheckpointError, match=r"^--baseline .*/nowhere' is neither"):
        run(arguments(demo_model, text, baseline=str(tmp_path / "nowhere")))
    with pytest.raises(UserError, match=r"below one window of 4000; .* --window"):
        run(arguments(demo_model, text, window=4000))


def test_a_result_that_could_not_be_written_is_refused_before_the_work(demo_model, tmp_path) -> None:
    """The text is missing, too: the message shows which came first."""
    missing = tmp_path / "missing.txt"
    with pytest.raises(UserError, match=r"--json .* is a folder"):
        run(arguments(demo_model, missing, json=str(tmp_path)))
    with pytest.raises(UserError, match=r"--json .* is not a folder that can be written to"):
        run(arguments(demo_model, missing, json=str(tmp_path / "no" / "a.json")))


def test_memory_that_cannot_be_had_names_the_flags(demo_model, text) -> None:
    if not hasattr(os, "memfd_create"):
        pytest.skip("the arena of other systems takes its memory when it is touched")
    from bladellm_tools.evaluate.forward import window_arena
    from tests.models.harness import load_tiny

    with pytest.raises(ConfigError, match="cannot be had; lower --batch_size or --window"):
        window_arena(load_tiny(demo_model), 2**24, 2**16)
