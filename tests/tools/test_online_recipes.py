"""The recipes that measure servers under load run, and set two servers side by side; their model folders are right."""

import importlib
import json
import math
import shlex
import subprocess
import sys
from types import ModuleType

import pytest

from bladellm_runtime.models.config import read_model_spec
from bladellm_runtime.models.weights import parameter_shape, weight_table
from bladellm_tools import cli
from bladellm_tools.bench.capacity import Crossing
from bladellm_tools.bench.slo import SloLimit
from bladellm_tools.bench.storage import load
from bladellm_tools.recipe import read_recipe
from tests.tools.command import ROOT, command

BENCHMARKS = ROOT / "recipes" / "benchmarks"
DEMO = ROOT / "recipes" / "models" / "demo"


@pytest.fixture
def shapes(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("shapes")


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("llama31-8b", 8_030_261_248),
        ("llama31-8b-w4", 8_030_261_248),
        ("llama2-13b", 13_015_864_320),
        ("qwen25-7b", 7_615_616_512),
    ],
)
def test_the_shapes_have_the_parameters_of_the_models(shapes, name, count, tmp_path):
    spec = read_model_spec(shapes.write_shape(tmp_path, name))
    assert sum(math.prod(parameter_shape(parts)) for parts in weight_table(spec).values()) == count
    assert (spec.quantization is not None) == name.endswith("w4")


def test_model_folders_get_the_tokenizer_asked_for(tmp_path):
    words = [sys.executable, str(BENCHMARKS / "shapes.py"), str(tmp_path), "tiny", "--tokenizer_dir", str(DEMO)]
    done = subprocess.run(words, capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "tiny"
    assert done.stdout.split() == [str(folder)]
    assert (folder / "tokenizer.json").read_bytes() == (DEMO / "tokenizer.json").read_bytes()
    assert json.loads((folder / "config.json").read_text())["hidden_size"] == 128


@pytest.mark.parametrize("recipe", ["bench_online.yaml", "bench_streams.yaml", "bench_pai.yaml"])
@pytest.mark.parametrize("name", ["bench sweep", "bench compare"])
def test_recipes_are_of_flags_that_exist(recipe, name):
    assert read_recipe(str(ROOT / "recipes" / recipe), cli.COMMANDS[name].flags)


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_server_and_a_peer_get_the_same_requests(tmp_path):
    """Both are this project's server, started, measured and stopped one after the other."""
    server = shlex.join(command("blade_llm_server"))
    peer = f"env SECOND=1 {server} --model {{model}} --port {{port}} --device cpu --kv_cache_gib 0.02"
    short = "--input_len 9 --output_len 3 --duration 0.5 --min_requests 6 --warmup 0.1"
    flags = [
        "--device", "cpu", "--load_format", "auto", "--max_model_len", "128", "--max_running_requests", "4",
        "--flags", "--kv_cache_gib 0.02", "--qps", "20", "--concurrency", "2", "--bench_flags", short,
        "--peer", peer, "--target_ttft_ms", "30000", "--out", str(tmp_path / "out"),
    ]  # fmt: skip
    words = [sys.executable, str(BENCHMARKS / "online.py"), str(DEMO), *flags]
    done = subprocess.run(words, capture_output=True, text=True, cwd=ROOT, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "out" / "online.json").read_text())
    assert set(found["ready_s"]) == set(found["carried_qps"]) == {"ours", "ours_target_ttft", "peer"}
    levels = [(row["endpoint"], row["level"]) for row in found["rows"]]
    both = ("20 QPS", "2 streams")
    assert levels == [*(("ours", level) for level in both), ("ours_target_ttft", "20 QPS"),
                      *(("peer", level) for level in both)]  # fmt: skip
    assert all(row["failed"] == 0 and row["tbt_p50_ms"] > 0 for row in found["rows"])
    runs = [load(tmp_path / "out" / f"poisson-{name}").runs[0] for name in ("ours", "peer")]
    intended = [[record.intended for record in run.requests] for run in runs]
    assert intended[0] == intended[1]
    assert (tmp_path / "out" / "closed" / "report.html").exists()


@pytest.mark.parametrize(
    ("crossings", "carried"),
    [
        ([("at", 24.0), ("at", 28.0)], 24.0),
        ([("at", 24.0), ("above", 28.0)], 24.0),
        ([("at", 24.0), ("above", 8.0)], None),
        ([("above", 28.0), ("above", 28.0)], None),
        ([("at", 24.0), ("below", 8.0)], None),
        ([("at", 24.0), ("unknown", None)], None),
    ],
)
def test_a_load_is_carried_up_to_the_first_limit_that_it_breaks(monkeypatch, crossings, carried):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    limit = SloLimit("ttft", "p90", 0.1)
    made = [Crossing("ours", limit, kind, qps) for kind, qps in crossings]
    assert importlib.import_module("online").least_crossing(made) == carried


@pytest.mark.slow
def test_a_peer_that_does_not_start_is_named(tmp_path):
    short = "--duration 0.1 --warmup 0 --input_len 4 --output_len 2 --min_requests 2"
    flags = [
        "--device", "cpu", "--load_format", "auto", "--max_model_len", "128", "--flags", "--kv_cache_gib 0.02",
        "--loads", "closed", "--concurrency", "1", "--bench_flags", short, "--out", str(tmp_path / "out"),
        "--peer", "false --port {port}",
    ]  # fmt: skip
    words = [sys.executable, str(BENCHMARKS / "online.py"), str(DEMO), *flags]
    done = subprocess.run(words, capture_output=True, text=True, cwd=ROOT, timeout=100)
    assert done.returncode == 1
    assert done.stderr.strip().splitlines()[-1].startswith("error: the server of peer exited with code 1")
