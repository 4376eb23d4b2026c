"""`blade_llm quantize` from the command line: every algorithm to a model that answers, progress, plan and report."""

import json
import re
from pathlib import Path

import pytest
import yaml

from bladellm_runtime import LLM, SamplingParams
from bladellm_tools import cli
from bladellm_tools.quantize import command as quantize_command
from bladellm_tools.quantize.algorithms.smoothquant_plus import AlphaSearch
from bladellm_tools.quantize.progress import duration
from tests.support.cases import drawn_of
from tests.tools.command import ROOT, run_on_terminal
from tests.tools.test_cli import QUICK_SECONDS, processor_seconds

QUICK = ("--max_samples", "5", "--max_length", "48")
RUNS = {
    "default": (),
    "gptq": ("--bit", "4", "--quant_algo", "gptq", "--block_wise_quant"),
    "gptq scrambled": (
        *("--bit", "4", "--quant_algo", "gptq", "--group_size", "32"),
        *("--static_groups", "false", "--format", "gptq"),
    ),
    "awq": ("--bit", "4", "--quant_algo", "awq", "--group_size", "64", "--format", "awq"),
    "awq symmetric": ("--bit", "4", "--quant_algo", "awq", "--group_size", "64", "--sym", "true"),
    "smoothquant": ("--quant_mode", "act_and_weight_quant", "--quant_algo", "smoothquant", "--alpha", "0.8"),
    "smoothquant+": ("--bit", "4", "--quant_algo", "smoothquant+", "--group_size", "64", "--alpha", "0.25"),
    "smoothquant_gptq": ("--quant_mode", "act_and_weight_quant", "--quant_algo", "smoothquant_gptq"),
    "fp8": ("--quant_dtype", "fp8", "--quant_mode", "act_and_weight_quant"),
    "kv_scales": ("--quant_algo", "gptq", "--kv_scales"),
    "pad": ("--bit", "4", "--group_size", "64", "-tp", "3", "--experimental_pad"),
}
"""What each stores, and what comes of it, is tested in tests/quantize."""

GROUP_OF = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj"), "qkv"),
    "o_proj": "output",
    **dict.fromkeys(("gate_proj", "up_proj"), "gate_up"),
    "down_proj": "down",
}


def quantize(model: Path, output: Path, *arguments: str) -> int:
    flags = ["--model", str(model), "--output_dir", str(output), *QUICK, *arguments]
    return cli.guarded(lambda: cli.dispatch("blade_llm", ["quantize", *flags]), debug=True)


def answer(model: Path, device: str) -> list[int]:
    """What the model says to a prompt."""
    with LLM(str(model), device=device, kv_cache_gib=0.01, disable_frontend_multiprocessing=True) as llm:
        done = llm.generate(["The sea was"], SamplingParams(max_tokens=6, temperature=0, ignore_eos=True))
        return list(done[0].outputs[0].token_ids)


@pytest.mark.turns
@pytest.mark.parametrize("name", drawn_of(RUNS, 3, always=("default", "awq")))
def test_every_algorithm_makes_a_model_that_answers(name, demo_model, device, tmp_path, capsys) -> None:
    output = tmp_path / "out"
    assert quantize(demo_model, output, "--device", device, *RUNS[name]) == 0
    shown = capsys.readouterr()
    assert "28 of 28 linear layers" in shown.out
    assert f"blade_llm_server --model {output}" in shown.out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"], "nothing is left beside the output"
    assert len(answer(output, device)) == 6


def test_the_float_model_stays_as_it_is(demo_model, tmp_path) -> None:
    before = {path: path.read_bytes() for path in demo_model.iterdir()}
    assert quantize(demo_model, tmp_path / "out", *RUNS["gptq"]) == 0
    assert {path: path.read_bytes() for path in demo_model.iterdir()} == before


def test_the_plan_and_the_result_say_what_was_done(demo_model, tmp_path, capsys) -> None:
    output = tmp_path / "out"
    assert quantize(demo_model, output, "--device", "cpu", *RUNS["gptq"]) == 0
    shown = capsys.readouterr()
    for words in (
        "w4a16, groups of 64, symmetric",
        "5 × 48 tokens of the built-in text",
        "cpu, float32",
        "transformers        yes, with the package compressed-tensors",
        "LMDeploy TurboMind  no: it needs --group_size 32 or 128",
        "host memory at most",
    ):
        assert words in shown.err, words
    size = sum(path.stat().st_size for path in output.glob("*.safetensors"))
    before = sum(path.stat().st_size for path in demo_model.glob("*.safetensors"))
    bits = float(re.search(r"bits per weight +([\d.]+)", shown.out)[1])
    assert bits == pytest.approx(8 * size / (before / 2), abs=0.01)
    assert f"({size / before:.0%})" in shown.out
    errors = re.findall(r"^  (model\.layers\.\d\.\S+) +([\d.e-]+)$", shown.out, re.M)
    modules = {
        one["module"]: one["error"] for one in json.loads((output / "quantize_report.json").read_text())["modules"]
    }
    worst = sorted(modules, key=lambda name: -modules[name])[:5]
    assert [(name, float(error)) for name, error in errors] == [
        (name, pytest.approx(modules[name], rel=0.01)) for name in worst
    ]


def test_few_words_in_a_pipe(demo_model, tmp_path, capsys) -> None:
    assert quantize(demo_model, tmp_path / "out", *RUNS["gptq"]) == 0
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("layer ")]
    assert [line.split(" done")[0] for line in lines] == [f"layer {number} of 4" for number in range(1, 5)]
    assert [" left" in line for line in lines] == [True, True, True, False]


@pytest.mark.turns("terminals")
def test_a_bar_on_a_terminal(demo_model, tmp_path) -> None:
    flags = ["--model", str(demo_model), "--output_dir", str(tmp_path / "out"), *QUICK, *RUNS["gptq"]]
    shown = run_on_terminal("blade_llm_quantize", *flags, columns=100)
    assert "\x1b[" in shown
    assert "4/4" in shown
    assert "left" in shown
    assert "layer 1 of 4 done" not in shown
    assert "Serve it with" in shown


def test_minmax_needs_no_data_and_measures_errors_where_it_has_some(demo_model, tmp_path, capsys) -> None:
    assert quantize(demo_model, tmp_path / "a") == 0
    assert "none, the weights alone decide" in capsys.readouterr().err
    assert quantize(demo_model, tmp_path / "b", "--calib_data", "Some words to measure with.") == 0
    shown = capsys.readouterr()
    assert "tokens of --calib_data" in shown.err
    assert "Largest errors" in shown.out


@pytest.mark.parametrize("algorithm", drawn_of(["minmax", "gptq"], 1))
def test_the_worst_layers_fall_back(algorithm, demo_model, device, tmp_path, capsys) -> None:
    flags = ("--bit", "4", "--quant_algo", algorithm, "--fallback_ratio", "0.2")
    assert quantize(demo_model, tmp_path / "out", *flags) == 0
    out = capsys.readouterr().out
    kept = out.split("Left in floating point\n")[1].split("Serve it")[0].split("Notes")[0]
    names = re.findall(r"model\.layers\.\d\.\S+", kept)
    groups = {(name.split(".")[2], GROUP_OF[name.split(".")[-1]]) for name in names}
    assert len(groups) == round(0.2 * 4 * 4), "a fifth of what is served as one layer"
    assert f"{28 - len(names)} of 28 linear layers" in out
    ignored = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]["ignore"]
    assert set(names) <= set(ignored)
    assert len(answer(tmp_path / "out", device)) == 6


def test_smoothquant_plus_searches_its_strength(demo_model, tmp_path, capsys) -> None:
    flags = ("--bit", "4", "--quant_algo", "smoothquant+", "--group_size", "64")
    assert quantize(demo_model, tmp_path / "out", *flags) == 0
    found = re.search(r"^(?:alpha ([\d.]+)|no smoothing is best)$", capsys.readouterr().err, re.M)
    assert found
    settings = json.loads((tmp_path / "out" / "quantize_report.json").read_text())["settings"]
    assert settings["alpha"] == (None if found[1] is None else float(found[1]))


@pytest.mark.parametrize(("best", "words"), [(0.35, "alpha 0.35"), (None, "no smoothing is best")])
def test_the_strength_that_was_found_is_used(best, words, demo_model, tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.setattr(quantize_command, "find_alpha", lambda job: AlphaSearch(best, {}))
    flags = ("--bit", "4", "--quant_algo", "smoothquant+", "--group_size", "64")
    assert quantize(demo_model, tmp_path / "found", *flags) == 0
    assert words in capsys.readouterr().err
    report = json.loads((tmp_path / "found" / "quantize_report.json").read_text())
    assert report["settings"]["alpha"] == best
    if best is not None:
        assert quantize(demo_model, tmp_path / "given", *flags, "--alpha", str(best)) == 0
        for path in (tmp_path / "given").glob("*.safetensors"):
            assert path.read_bytes() == (tmp_path / "found" / path.name).read_bytes()


def test_the_report_compares_with_the_float_model(demo_model, tmp_path, capsys) -> None:
    text = tmp_path / "text.txt"
    text.write_text("The sea was calm, and the boats lay still in the harbour until the evening. " * 80)
    model = short_context(demo_model, tmp_path / "model", 256)
    flags = ("--report", "--report_data", str(text), "--bit", "4", "--quant_algo", "gptq")
    assert quantize(model, tmp_path / "out", *flags) == 0
    out = capsys.readouterr().out
    assert "perplexity" in out
    assert "top-1" in out
    figures = json.loads((tmp_path / "out" / "evaluation.json").read_text())
    pair = figures["overall"]["baseline"]
    assert figures["window"] == 256
    assert pair["kl_mean"]["value"] > 0
    assert 0 < pair["agreement"]["value"] < 1
    assert figures["size"]["disk_bytes"] < figures["baseline_size"]["disk_bytes"]


def short_context(model: Path, folder: Path, positions: int) -> Path:
    """A copy of the model for sequences of so many tokens."""
    folder.mkdir()
    for path in model.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    config = json.loads((model / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": positions}))
    return folder


def test_windows_are_no_longer_than_the_model_can_read(demo_model, tmp_path, capsys) -> None:
    model = short_context(demo_model, tmp_path / "model", 40)
    assert quantize(model, tmp_path / "out", *RUNS["gptq"]) == 0
    assert "5 × 40 tokens" in capsys.readouterr().err


def test_the_recipe_of_the_demo_works(tmp_path, capsys) -> None:
    recipe = ROOT / "recipes" / "quantize_demo.yaml"
    values = yaml.safe_load(recipe.read_text())
    assert (values["bit"], values["quant_algo"], values["block_wise_quant"]) == (4, "gptq", True)
    flags = ["--config", str(recipe), "--output_dir", str(tmp_path / "out"), "--model", str(ROOT / values["model"])]
    action = ["quantize", *flags, *QUICK]
    assert cli.guarded(lambda: cli.dispatch("blade_llm", action), debug=True) == 0
    assert "w4a16, groups of 64" in capsys.readouterr().err


def test_help_is_quick() -> None:
    assert any(processor_seconds(["blade_llm_quantize", "--help"]) <= QUICK_SECONDS for _ in range(5))


def test_times_in_words() -> None:
    words = [duration(seconds) for seconds in (0.04, 59.94, 60, 185.2, 3600, 7509)]
    assert words == ["0.0 s", "59.9 s", "1 min 0 s", "3 min 5 s", "1 h 0 min", "2 h 5 min"]
