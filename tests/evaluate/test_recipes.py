"""The scripts that make the tables of the documentation, on tiny models."""

import importlib
import json
import math

import pytest
import torch

from bladellm_runtime.errors import ConfigError
from bladellm_runtime.models.config import ModelSpec, read_model_spec
from bladellm_runtime.models.loading import load_model
from bladellm_runtime.models.weights import parameter_shape, weight_table
from bladellm_tools.evaluate.summary import Estimate, PairSummary, Summary
from tests.evaluate.texts import random_text
from tests.support.warm import ROOT, run_script

SCRIPTS = ROOT / "recipes" / "quantize"
pytestmark = pytest.mark.timeout(300)


@pytest.fixture
def recipe(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return importlib.import_module


def accuracy_flags(demo_model, folder, device) -> list[object]:
    text = folder / "text.txt"
    text.write_text(random_text(600))
    return [
        demo_model, "--data", text, "--output", folder / "out", "--window", "64", "--max_windows", "4",
        "--seed", "0", "7", "--max_samples", "4", "--max_length", "64", "--group_size", "64", "--device", device,
        "--only", "W4A16 g64 minmax", "W4A16 g64 gptq", "W8A8 smoothquant on outliers",
    ]  # fmt: skip


@pytest.mark.turns("recipes")
def test_the_accuracy_table_is_made_and_resumed(recipe, capsys, demo_model, tmp_path, device) -> None:
    flags = accuracy_flags(demo_model, tmp_path, device)
    done = run_script(SCRIPTS / "accuracy.py", *flags)
    assert done.returncode == 0, done.stderr
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    rows = {(row["method"], row["seed"]): row for row in results["rows"]}
    calibrated = ("W4A16 g64 gptq", "W8A8 smoothquant on outliers")
    assert list(rows) == [("W4A16 g64 minmax", None), *((name, seed) for name in calibrated for seed in (0, 7))]
    for row in rows.values():
        assert 0.25 < row["size"] < 1
        assert row["summary"]["baseline"]["kl_mean"]["value"] > 0
    assert rows["W4A16 g64 gptq", 0]["summary"] != rows["W4A16 g64 gptq", 7]["summary"], "seeds choose other samples"
    baselines = {row["summary"]["baseline"]["perplexity"]["value"] for row in rows.values()}
    assert len(baselines) == 1
    assert not (tmp_path / "out" / "quantized").exists()
    assert "| W4A16 g64 gptq | 0 7 | " in done.stdout
    assert (tmp_path / "out" / "table.md").read_text() in done.stdout

    results["rows"] = [row for row in results["rows"] if row["seed"] != 7 or row["method"] != calibrated[0]]
    (tmp_path / "out" / "results.json").write_text(json.dumps(results))
    log = (tmp_path / "out" / "log.txt").read_text()
    recipe("accuracy").run(list(map(str, flags)))
    again = capsys.readouterr().out.splitlines()
    assert len([line for line in again if line.startswith("W4A16 g64 gptq, seed 7: perplexity")]) == 1
    assert not [line for line in again if "minmax:" in line or "seed 0:" in line or "smoothquant on outliers, " in line]
    assert len((tmp_path / "out" / "log.txt").read_text()) > len(log)
    with pytest.raises(ConfigError, match="made with other values of --max_length; give another --output"):
        recipe("accuracy").run([*map(str, flags), "--max_length", "32"])


def summary(perplexity: float, baseline: float = 10.0) -> Summary:
    pair = PairSummary(
        Estimate(baseline), Estimate(perplexity / baseline), Estimate(0.01 * perplexity), 0.5, Estimate(0.9)
    )
    return Summary(3, 30, Estimate(perplexity), pair)


def test_the_table_has_means_over_the_seeds(recipe) -> None:
    accuracy = recipe("accuracy")
    rows = [
        accuracy.Row("W4A16 g64 minmax", None, 2.0, 0.31, summary(12.0)),
        accuracy.Row("W4A16 g64 awq", 3, 4.0, 0.3, summary(10.5)),
        accuracy.Row("W4A16 g64 awq", 5, 6.0, 0.3, summary(11.5)),
    ]
    lines = accuracy.markdown(rows).splitlines()
    assert lines[2:] == [
        "| float | | 10.000 | | | | | | |",
        "| W4A16 g64 minmax |  | 12.000 |  | +20.00 % | 0.12000 | 90.00 % | 0.310 | 2.0 |",
        "| W4A16 g64 awq | 3 5 | 11.000 | 10.500 – 11.500 | +10.00 % | 0.11000 | 90.00 % | 0.300 | 5.0 |",
    ]
    assert {line.count("|") for line in lines} == {10}


def test_the_verdicts_say_what_does_not_hold(recipe) -> None:
    accuracy = recipe("accuracy")
    perplexities = {
        ("W4A16 g128 minmax", None): 11.0,
        ("W4A16 g128 awq", 0): 10.9,
        ("W4A16 g128 awq", 1): 11.1,
        ("W4A16 g128 gptq", 1): 9.9,
        ("W8A8 minmax on outliers", None): 10.6,
        ("W8A8 smoothquant on outliers", 2): 10.04,
        ("W8A8 smoothquant_gptq on outliers", 2): 10.06,
    }
    rows = [accuracy.Row(*key, 1.0, 0.3, summary(value)) for key, value in perplexities.items()]
    said = [line.split(":")[0] for line in accuracy.verdicts(rows)]
    assert said == ["holds", "DOES NOT HOLD", "DOES NOT HOLD", "holds", "holds", "DOES NOT HOLD"]


def test_rows_that_do_not_exist_are_refused(recipe) -> None:
    accuracy = recipe("accuracy")
    flags = ["model", "--data", "a", "--output", "b"]
    names = [method.name for method in accuracy.methods(accuracy.arguments(flags))]
    assert len(names) == len(set(names)) == 15
    with pytest.raises(ConfigError, match="'W3' is no row; --list shows the names"):
        accuracy.methods(accuracy.arguments([*flags, "--only", "W3"]))


def test_the_speed_of_a_tiny_shape_is_measured(tmp_path, device) -> None:
    out = tmp_path / "speed.json"
    done = run_script(
        SCRIPTS / "speed.py", "--shape", "tiny", "--layers", "3", "--work", tmp_path, "--samples", "5",
        "--length", "32", "--group_size", "64", "--device", device, "--extrapolate", "10", "--json", out,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(out.read_text())
    assert found["layers"] == 3
    assert found["extrapolated"] == pytest.approx(found["seconds"] + 7 * found["layer_seconds"])
    assert 0 < 2 * found["layer_seconds"] < found["seconds"]
    assert found["stages"]
    assert found["bytes_after"] < found["bytes_before"]
    assert found["peak_host_bytes"] > 2**26
    assert (len(found["peak_device_bytes"]) > 0) == (device == "cuda")
    assert f"extrapolated to 10 layers  {found['extrapolated']:.1f} s".split() == next(
        line.split() for line in done.stdout.splitlines() if "extrapolated" in line
    )
    assert json.loads((tmp_path / "quantized" / "config.json").read_text())["quantization_config"]


def test_a_layers_time_leaves_out_the_first(recipe, monkeypatch) -> None:
    speed = recipe("speed")
    moments = iter([100.0, 102.0, 104.5])
    monkeypatch.setattr(speed.time, "monotonic", lambda: next(moments))
    clock = speed.Clock()
    assert clock.layer_seconds() == 0
    for index in range(3):
        clock.done(index)
    assert clock.layer_seconds() == 2.25


def parameters(spec: ModelSpec) -> int:
    return sum(math.prod(parameter_shape(parts)) for parts in weight_table(spec).values())


@pytest.mark.parametrize(("shape", "count"), [("llama31-8b", 8_030_261_248), ("llama31-70b", 70_553_706_496)])
def test_the_shapes_have_the_parameters_of_the_models(recipe, shape, count, tmp_path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(recipe("dummy_model").SHAPES[shape]))
    assert parameters(read_model_spec(tmp_path)) == count


def test_a_dummy_model_loads_and_gives_finite_logits(recipe, tmp_path, device) -> None:
    dummy = recipe("dummy_model")
    folder = dummy.write_dummy_model(tmp_path, "tiny", 2, torch.device("cpu"))
    files = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    assert dummy.write_dummy_model(tmp_path, "tiny", 2, torch.device("cpu")) == folder
    assert {path.name: path.stat().st_mtime_ns for path in folder.iterdir()} == files, "made once"
    assert {"model-layer-00000.safetensors", "model-layer-00001.safetensors", "model-outer.safetensors"} <= set(files)
    dummy.drop_from_page_cache(folder)
    spec = read_model_spec(folder)
    kind = torch.device(device)
    model = load_model(folder, spec, device=kind, dtype=torch.bfloat16, load_format="auto", seed=0)
    hidden = torch.randn(3, spec.hidden_size, device=kind, dtype=torch.bfloat16)
    assert model.logits(hidden).isfinite().all()
    assert float(model.layers[0].mlp.down.weight.float().std()) == pytest.approx(spec.intermediate_size**-0.5, rel=0.05)
    assert not torch.equal(model.layers[0].mlp.down.weight, model.layers[1].mlp.down.weight)
