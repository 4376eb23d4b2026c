"""Both orders: a quantized model is split, and a split model is quantized; the ranks come out the same."""

import itertools
from pathlib import Path

import pytest

from bladellm_runtime.distributed.manifest import read_manifest
from bladellm_tools import cli
from bladellm_tools.quantize import command as quantize_command
from bladellm_tools.split.verify import verify

QUICK = ("--max_samples", "5", "--max_length", "48", "--device", "cpu")
RUNS = {
    "gptq scrambled": ("--bit", "4", "--quant_algo", "gptq", "--group_size", "32", "--static_groups", "false"),
    "w8a8": ("--quant_mode", "act_and_weight_quant", "--quant_algo", "smoothquant", "--alpha", "0.8"),
    "awq": ("--bit", "4", "--quant_algo", "awq", "--group_size", "64", "--format", "awq"),
}


def call(name: str, *arguments: object) -> int:
    return cli.guarded(lambda: cli.dispatch("blade_llm", [name, *map(str, arguments)]), debug=True)


@pytest.mark.parametrize(
    "name", ["w8a8", *(pytest.param(name, marks=pytest.mark.slow) for name in ("gptq scrambled", "awq"))]
)
def test_either_order_gives_the_same_ranks(name: str, demo_model: Path, tmp_path: Path, capsys) -> None:
    """6 heads over 4 ranks, which divides nothing; merged, both are the quantized model byte for byte."""
    flags = (*QUICK, *RUNS[name], *(("--format", "gptq") if "scrambled" in name else ()))
    degrees = ("--tensor_parallel_size", 4, "--pipeline_parallel_size", 2)
    whole, first, second = tmp_path / "whole", tmp_path / "quantized-split", tmp_path / "split-quantized"
    assert call("quantize", "--model", demo_model, "--output_dir", whole, *flags) == 0
    assert call("split", "--model", whole, "--output_dir", first, *degrees) == 0
    assert call("split", "--model", demo_model, "--output_dir", tmp_path / "split", *degrees) == 0
    assert call("quantize", "--model", tmp_path / "split", "--output_dir", second, *flags, "-tp", 4) == 0
    assert call("split", "--verify", first, "--model", whole) == 0
    assert call("split", "--verify", second, "--model", whole) == 0
    assert call("split", "--verify", second) == 0
    assert read_manifest(first).ranks == read_manifest(second).ranks
    assert not second.with_name(second.name + ".whole").exists()
    assert "byte for byte" in capsys.readouterr().out


def test_other_degrees_and_a_report_are_refused(demo_model: Path, tmp_path: Path, capsys) -> None:
    assert call("split", "--model", demo_model, "--output_dir", tmp_path / "split", "-tp", 3) == 0
    for flags, sentence in ((("-tp", 2), "use --tensor_parallel_size 3"), (("-tp", 3, "--report"), "--report needs")):
        assert call("quantize", "--model", tmp_path / "split", "--output_dir", tmp_path / "out", *flags) == 2
        assert sentence in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_an_interruption_before_the_split_is_resumed(demo_model: Path, tmp_path: Path, monkeypatch, capsys) -> None:
    assert call("split", "--model", demo_model, "--output_dir", tmp_path / "split", "-tp", 2) == 0
    flags = ("--model", tmp_path / "split", "--output_dir", tmp_path / "out", "-tp", 2, "--device", "cpu")

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(quantize_command, "split_whole", interrupt)
        assert call("quantize", *flags) == 130
    assert "--resume" in capsys.readouterr().err
    assert call("quantize", *flags) == 2
    assert "go on with --resume" in capsys.readouterr().err
    assert call("quantize", *flags, "--resume", "--bit", "4") == 2
    assert "other flags" in capsys.readouterr().err
    monkeypatch.setattr(quantize_command, "quantize_model", None)
    assert call("quantize", *flags, "--resume") == 0
    assert verify(tmp_path / "out", None).ranks == 2


def test_more_ranks_than_heads_are_refused(demo_model: Path, tmp_path: Path, capsys) -> None:
    for flag, most in (("--tensor_parallel_size", 6), ("--pipeline_parallel_size", 4)):
        given = ["--model", str(demo_model), "--output_dir", str(tmp_path / "out"), flag, str(most + 1)]
        assert cli.guarded(lambda given=given: cli.dispatch("blade_llm", ["split", *given]), debug=False) == 2
        error = capsys.readouterr().err
        assert f"use {flag} {most} or less" in error
        assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ((), "--model is missing"),
        (("--model", "{model}"), "--output_dir is missing"),
        (("--verify", "{model}"), "holds no split_config.json"),
        (("--verify", "{model}", "--output_dir", "x"), "does not go with --verify"),
    ],
)
def test_flags_that_do_not_go_together(flags, sentence, demo_model: Path, capsys) -> None:
    given = [flag.format(model=demo_model) for flag in flags]
    assert call("split", *given) == 2
    assert sentence in capsys.readouterr().err


@pytest.mark.slow
def test_the_demo_model_is_proved_at_every_degree(demo_model: Path, tmp_path: Path) -> None:
    for degree, stages in itertools.product(range(1, 7), range(1, 5)):
        output = tmp_path / f"{degree}-{stages}"
        assert call("split", "--model", demo_model, "--output_dir", output, "-tp", degree, "-pp", stages) == 0
        assert call("split", "--verify", output, "--model", demo_model) == 0
