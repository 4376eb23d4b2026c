"""`blade_llm generate`: prompts of a file in, answers in the same order out, mistakes named by line."""

import io
import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bladellm_runtime import LLM, SamplingParams
from bladellm_runtime.errors import UserError
from bladellm_tools import cli
from bladellm_tools.prompts import Output, PromptLine, read_prompts
from tests.support.cases import some_of
from tests.tools.command import ROOT, command, run_forked, wait_for_library

PROMPTS = ["Once upon a time", "PEP 8 is", "Ümläut \u2028 and \U0001f600", "The sea"]


@pytest.fixture
def prompts_file(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    lines = [
        {"id": 7, "prompt": PROMPTS[0], "tag": {"a": [1]}},
        PROMPTS[1],
        {"prompt": PROMPTS[2]},
        {"prompt": [5, 6, 7]},
    ]
    path.write_text("\n\n".join(json.dumps(line) for line in lines) + "\n")
    return path


def generate(*arguments: str) -> int:
    return cli.guarded(
        lambda: cli.dispatch("blade_llm", ["generate", "--kv_cache_gib", "0.05", *arguments]), debug=True
    )


def test_answers_equal_those_of_the_python_api(prompts_file, demo_model, device, tmp_path, capsys) -> None:
    output = tmp_path / "answers.jsonl"
    flags = [
        "--max_tokens",
        "12",
        "--temperature",
        "0.9",
        "--top_k",
        "40",
        "--seed",
        "11",
        "--n",
        "2",
        "--stop",
        " the",
        "of",
    ]
    arguments = ["--model", str(demo_model), "--device", device, "--input", str(prompts_file), "--output", str(output)]
    assert generate(*arguments, *flags) == 0
    answers = [json.loads(line) for line in output.read_text().rstrip("\n").split("\n")]
    params = SamplingParams(max_tokens=12, temperature=0.9, top_k=40, seed=11, n=2, stop=(" the", "of"))
    with LLM(str(demo_model), device=device, kv_cache_gib=0.05) as llm:
        expected = llm.generate([*PROMPTS[:3], [5, 6, 7]], params)
    assert [answer["prompt"] for answer in answers] == [one.prompt for one in expected]
    for answer, one in zip(answers, expected, strict=True):
        assert [choice["text"] for choice in answer["outputs"]] == [choice.text for choice in one.outputs]
        assert [choice["token_ids"] for choice in answer["outputs"]] == [choice.token_ids for choice in one.outputs]
        assert [choice["finish_reason"] for choice in answer["outputs"]] == [
            choice.finish_reason for choice in one.outputs
        ]
    assert (answers[0]["id"], answers[0]["tag"]) == (7, {"a": [1]})
    written = sum(len(choice.token_ids) for one in expected for choice in one.outputs)
    summary = capsys.readouterr().err
    assert "4 prompts" in summary
    assert "tokens/s" in summary
    assert written > 0


def test_standard_input_to_standard_output(demo_model, monkeypatch, capsys) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"One line\r\n\n  two\n")))
    assert generate("--model", str(demo_model), "--device", "cpu", "--max_tokens", "2", "--logprobs", "1") == 0
    answers = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [answer["prompt"] for answer in answers] == ["One line", "  two"]
    for choice in (choice for answer in answers for choice in answer["outputs"]):
        assert [one["token_ids"][0] for one in choice["logprobs"]] == choice["token_ids"]
        assert all(value <= 0 for one in choice["logprobs"] for value in one["logprobs"])


def test_a_prompt_that_cannot_run_fails_alone(demo_model, tmp_path, capsys) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(f'"short"\n{json.dumps([1] * 5000)}\n"short too"\n')
    code = generate("--model", str(demo_model), "--device", "cpu", "--max_tokens", "2", "--input", str(path))
    shown = capsys.readouterr()
    answers = [json.loads(line)["outputs"][0] for line in shown.out.splitlines()]
    assert code == 1
    assert [answer["finish_reason"] for answer in answers] == ["length", "error", "length"]
    assert "line 2" in shown.err.splitlines()[-1]
    assert answers[1]["error"] in shown.err.splitlines()[-1]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('"fine"\n{"prompt": 1}', ["line 2", "token ids", "1"]),
        ('{"promt": "x"}', ["line 1", "'prompt'"]),
        ('\n\n{"prompt": [1, -1]}', ["line 3"]),
        ('{"prompt": [true]}', ["line 1"]),
        ('{"prompt": [1.0]}', ["line 1"]),
        ('{"prompt": []}', ["line 1"]),
        ("null", ["line 1"]),
        ("not json", ["line 1", "not JSON"]),
        ("[" * 100_000, ["line 1", "not JSON"]),
        (b"\xff\xfe", ["line 1", "UTF-8"]),
        ("\n \n", ["no prompt"]),
    ],
)
def test_bad_lines_name_file_and_line(text: str | bytes, words: list[str], tmp_path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(UserError) as error:
        read_prompts(str(path))
    assert all(word in str(error.value) for word in [str(path), *words]), str(error.value)
    assert "\n" not in str(error.value)


def test_formats(tmp_path) -> None:
    path = tmp_path / "p.txt"
    path.write_text('"a"\n  b \n')
    assert read_prompts(str(path)) == [PromptLine(1, '"a"'), PromptLine(2, "  b ")]
    assert read_prompts(str(path), "txt") == read_prompts(str(path))
    path.write_text('"a"\n')
    assert read_prompts(str(path), "jsonl") == [PromptLine(1, "a")]
    path.write_text('"a"', encoding="utf-8-sig")
    assert read_prompts(str(path), "jsonl") == [PromptLine(1, "a")]


def test_files_that_cannot_be_used(tmp_path, demo_model) -> None:
    done = run_forked("blade_llm", "generate", "--model", str(demo_model), "--input", str(tmp_path / "none.txt"))
    assert done.returncode == 1
    assert "none.txt cannot be read: No such file" in done.stderr
    (tmp_path / "p.txt").write_text("x")
    files = ("--input", str(tmp_path / "p.txt"), "--output", str(tmp_path))
    done = run_forked("blade_llm", "generate", "--model", str(demo_model), *files)
    assert done.returncode == 1
    assert "cannot be written: Is a directory" in done.stderr


@pytest.mark.parametrize("delay", some_of([0.0, 0.5, 2.0, 3.0], [0.0, 2.0]))
def test_ctrl_c_is_one_line(delay: float, demo_model, tmp_path) -> None:
    (tmp_path / "p.txt").write_text("again\n" * 4000)
    flags = ["--model", str(demo_model), "--device", "cpu", "--input", str(tmp_path / "p.txt"), "--max_tokens", "500"]
    process = subprocess.Popen([*command("blade_llm"), "generate", *flags], stderr=subprocess.PIPE, text=True, cwd=ROOT)
    wait_for_library(process.pid, "torch")
    time.sleep(delay)
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=60)[1] == "error: interrupted\n"
    assert process.returncode == 130


def test_a_failed_start_leaves_earlier_answers(tmp_path, capsys) -> None:
    output = tmp_path / "answers.jsonl"
    output.write_text("earlier\n")
    (tmp_path / "prompts.txt").write_text("Hi\n")
    files = ["--input", str(tmp_path / "prompts.txt"), "--output", str(output)]
    assert generate("--model", str(tmp_path / "nothing"), *files) == 1
    assert output.read_text() == "earlier\n"


def test_answers_do_not_take_the_place_of_the_prompts(demo_model, tmp_path, capsys) -> None:
    path = tmp_path / "prompts.txt"
    path.write_text("Hi\n")
    assert generate("--model", str(demo_model), "--input", str(path), "--output", f"{tmp_path}/./prompts.txt") == 2
    assert path.read_text() == "Hi\n"
    assert "give another one" in capsys.readouterr().err


def test_a_prompt_that_failed_is_explained(demo_model, tmp_path, capsys) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('""\n')
    arguments = ["--model", str(demo_model), "--input", str(path), "--output", str(tmp_path / "answers.jsonl")]
    assert generate(*arguments) == 1
    assert "of line 1: the prompt is empty" in capsys.readouterr().err


def test_a_bad_value_is_named_by_its_flag(capsys) -> None:
    assert generate("--model", "m", "--stop", "") == 2
    assert "--stop: each stop string must have" in capsys.readouterr().err


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a Linux device")
def test_a_full_disk_is_one_sentence(capsys) -> None:
    with pytest.raises(UserError, match="--output /dev/full cannot be written: No space"), Output("/dev/full") as file:
        file.write(["answer"])
