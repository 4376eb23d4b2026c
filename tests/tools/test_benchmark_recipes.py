"""The recipes that measure the engine run, and the soak finds nothing left behind."""

import json
import shutil
import signal
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
import torch

from bladellm_runtime.kv.arena import ArenaStats
from bladellm_runtime.kv.operations import MemoryPlan, Rows, Show
from tests.support.cases import drawn_of
from tests.support.warm import ROOT, run_script

DEMO = "recipes/models/demo"


def run(script: str, *flags: str) -> subprocess.CompletedProcess[str]:
    load = [] if script == "host_step.py" else ["--load_format", "auto"]
    return run_script(ROOT / "recipes" / "benchmarks" / script, DEMO, *flags, *load)


@pytest.mark.turns("recipes")
@pytest.mark.parametrize(
    "flags",
    [
        pytest.param(("--device", "cpu", "--kv_cache_gib", "0.002", "--swap_gib", "0.001"), marks=pytest.mark.slow),
        pytest.param(
            ("--device", "cpu", "--kv_cache_gib", "0.001", "--swap_gib", "0", "--attn_cls", "paged"),
            marks=pytest.mark.slow,
        ),
        ("--device", "cpu", "--kv_cache_gib", "0.001", "--swap_gib", "0.001", "--kv_cache_quant", "int8"),
    ],
)
def test_a_short_soak_leaves_nothing_and_changes_no_answer(flags, tmp_path):
    common = ("--requests", "24", "--minutes", "1", "--max_model_len", "192", "--streams", "6", "--check", "6")
    done = run("soak.py", *common, "--json", str(tmp_path / "soak.json"), *flags)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "soak.json").read_text())
    assert found["left"] == {}
    assert found["differing"] == 0
    assert found["descriptors_left"] == 0
    assert found["cached_tokens"] > 0


def test_the_parts_of_a_soak_add_up(tmp_path):
    before = {"requests": 7, "aborted": 2, "most_cached": 10**6, "left": {"running": 3}}
    (tmp_path / "parts").write_text(json.dumps([before]))
    flags = ("--device", "cpu", "--requests", "20", "--max_model_len", "96", "--streams", "4", "--check", "0")
    done = run("soak.py", *flags, "--kv_cache_gib", "0.002", "--add_to", str(tmp_path / "parts"))
    assert done.returncode == 1, "what an earlier part left behind counts"
    first, second = json.loads((tmp_path / "parts").read_text())
    assert first == before
    assert second["left"] == {}
    assert f"| requests | {7 + second['requests']} |" in done.stdout
    assert f"| most_cached | {10**6} |" in done.stdout
    assert "seconds_left" in json.loads((tmp_path / "parts.progress").read_text())


@pytest.mark.turns("recipes")
@pytest.mark.parametrize(
    "degree", ["tensor_parallel_size", pytest.param("pipeline_parallel_size", marks=pytest.mark.slow)]
)
def test_what_several_ranks_make_of_a_shape_is_measured(tmp_path, degree):
    flags = ("--batches", "1", "3", "--prefills", "40", "--input", "9", "--output", "4", "--requests", "6")
    flags += ("--steps", "5", "--max_running_requests", "4", "--kv_cache_gib", "0.05", "--device", "cpu")
    flags += ("--overlap_sums_tokens", "16")
    done = run_script(ROOT / "recipes/benchmarks/parallel_steps.py", str(tmp_path), "tiny", f"--{degree}", "2", *flags)
    assert done.returncode == 0, done.stdout + done.stderr
    cells = [line.split("|") for line in done.stdout.splitlines() if line.startswith("| ")]
    measured = {row[1].strip(): row[5].strip() for row in cells[2:]}
    assert list(measured) == ["engine ready", "decode 1", "decode 3", "prefill 40", "offline"]
    means = [row[6].strip() for row in cells[2:] if row[1].split()[0] in ("decode", "prefill")]
    assert all(float(mean.replace(",", "")) > 0 for mean in means)
    assert all(float(value.replace(",", "")) > 0 for value in measured.values())


@pytest.mark.turns("recipes")
def test_steps_with_adapters_and_constrained_answers_are_measured(tmp_path):
    common = ("--device", "cpu", "--kv_cache_gib", "0.02", "--batch", "3", "--input", "9")
    done = run("adapter_steps.py", *common, "--adapters", "1", "2", "--steps", "4", "--json", str(tmp_path / "steps"),
               "--way", "alone")  # fmt: skip
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "steps").read_text())
    assert [row["adapters"] for row in rows] == [1, 2]
    assert all(row["ratio"] == pytest.approx(row["step_ms"] / row["base_ms"]) for row in rows)
    flags = ("--requests", "4", "--output", "6", "--json", str(tmp_path / "rates"))
    done = run("constrained_throughput.py", *common, *flags)
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "rates").read_text())
    assert [row["case"] for row in rows] == ["one", "different"]
    assert all(row["mask_us"] > 0 for row in rows)


def test_long_contexts_are_measured(tmp_path):
    flags = ("--device", "cpu", "--contexts", "50", "300", "--tokens", "4", "--chunk", "64", "--kv_cache_gib", "0.05")
    done = run("long_context.py", *flags, "--kv_cache_quant", "int8", "--json", str(tmp_path / "long.json"))
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "long.json").read_text())
    assert [(row["context"], row["tokens"]) for row in found["rows"]] == [(50, 5), (300, 5)]
    assert all(0 < row["tbt_ms"] <= row["tbt_max_ms"] and row["ttft_s"] > 0 for row in found["rows"])


@pytest.mark.parametrize("fusion", drawn_of(["auto", "always"], 1))
def test_decode_steps_are_measured(tmp_path, fusion):
    flags = ("--device", "cpu", "--batches", "1", "3", "--input", "9", "--steps", "5", "--warm", "2")
    flags += ("--fusion", fusion)
    done = run("decode_steps.py", *flags, "--kv_cache_gib", "0.05", "--json", str(tmp_path / "steps.json"))
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads((tmp_path / "steps.json").read_text())["rows"]
    assert [row["batch"] for row in rows] == [1, 3]
    assert all(row["host_us"] > 0 and row["step_ms"] > 0 and row["map_wait_us"] >= 0 for row in rows)
    # A prompt of 9, a token of its own step, 2 warm ones; half of 5; and a step or two in flight.
    assert all(9 + 1 + 2 + 2.5 <= row["context"] <= 9 + 1 + 2 + 2.5 + 2 for row in rows)


def test_decode_steps_of_a_shared_prompt_are_measured_both_ways(tmp_path):
    flags = ("--device", "cpu", "--batches", "3", "--input", "9", "--steps", "5", "--warm", "2")
    flags += ("--shared_prefix", "80", "--kv_cache_gib", "0.05", "--json", str(tmp_path / "steps.json"))
    done = run("decode_steps.py", *flags)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads((tmp_path / "steps.json").read_text())["rows"]
    # Nothing is captured on a CPU.
    assert [(row["batch"], row["reads"], row["shared"]) for row in rows] == [(3, "apart", 0), (3, "together", 0)]
    assert all(row["step_ms"] > 0 for row in rows)


def test_the_host_part_of_a_step_is_measured():
    done = run("host_step.py", "--batches", "1", "4", "--steps", "5", "--kv_cache_gib", "0.05")
    assert done.returncode == 0, done.stdout + done.stderr
    assert [line.split(" | ")[0] for line in done.stdout.splitlines()[2:]] == ["| 1", "| 4"]


def test_what_mapping_costs_the_host_is_measured():
    script = ROOT / "recipes" / "benchmarks" / "mapping_beside_host.py"
    done = run_script(script, "--granules", "1", "--steps", "5", "--step_ms", "1")
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [line.split(" | ")[:2] for line in done.stdout.splitlines()[2:]]
    assert rows == [["| 0", "none"], ["| 1", "at once"], ["| 1", "held back"]]


def test_kernels_that_overlap_are_busy_once(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "recipes" / "benchmarks"))
    from decode_steps import busy_share

    spans = [(40.0, 50.0), (0.0, 10.0), (5.0, 8.0), (8.0, 20.0)]
    kernels = [SimpleNamespace(time_range=SimpleNamespace(start=start, end=end)) for start, end in spans]
    assert busy_share(kernels) == pytest.approx(30 / 50)


@pytest.mark.parametrize(
    ("views", "tokens", "seconds", "splits", "before", "after", "cause"),
    [
        ([], 1, 5e-5, 0, False, False, "none"),
        ([], 1, 2e-3, 0, False, True, "views of earlier plans"),
        ([Show(0, 0, [1])], 7, 2e-3, 0, False, False, "views of its own plan"),
        ([Show(0, 0, [1])], 1, 2e-3, 1, False, True, "a block to be converted"),
        ([], 1, 2e-3, 0, True, True, "host"),
    ],
)
def test_waits_for_mappings_are_told_apart(monkeypatch, views, tokens, seconds, splits, before, after, cause):
    monkeypatch.syspath_prepend(str(ROOT / "recipes" / "benchmarks"))
    import kv_memory

    def wait():
        clock.append(clock[-1] + seconds)
        arena.stats.splits += splits

    clock = [100.0]
    monkeypatch.setattr(kv_memory, "time", SimpleNamespace(perf_counter=lambda: clock[-1]))
    dry = [before, after]
    stream = SimpleNamespace(query=lambda: dry.pop(0))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    arena = SimpleNamespace(device="cuda", stats=ArenaStats(), submit=lambda plan, rows: None, wait=wait)
    trace = kv_memory.Trace()
    trace.watch(arena)
    arena.submit(MemoryPlan(views), Rows(*np.array([[0, 1], [0, 9], [tokens, 1]])))
    arena.wait()
    found = kv_memory.summary(trace.waits)
    assert trace.waits[0].decode == (tokens == 1)
    assert (found["waits"], found["late"]) == ({cause: 1}, {cause: 1} if after else {})
    assert found["wait_us_median"] == found["wait_us_p99"] == pytest.approx(1e6 * seconds)


@pytest.mark.slow
def test_a_measurement_under_load_that_is_told_to_end_leaves_no_server(tmp_path):
    flags = ["--device", "cpu", "--load_format", "auto", "--max_model_len", "2048", "--qps", "1", "--loads", "poisson"]
    script = ROOT / "recipes" / "benchmarks" / "online.py"
    words = [sys.executable, str(script), str(ROOT / DEMO), "--out", str(tmp_path), *flags]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert "ready after" in process.stdout.readline()
        started = psutil.Process(process.pid).children(recursive=True)
        assert started
        process.terminate()
        process.stdout.read()
    assert process.returncode == 128 + signal.SIGTERM
    assert not psutil.wait_procs(started, timeout=10)[1]


@pytest.mark.turns("recipes")
@pytest.mark.parametrize("start", drawn_of(["first", "dummy"], 1))
def test_starts_are_measured(tmp_path, start):
    """On the demo's shape, in shards that are written for it; what is there stays."""
    shutil.copy(ROOT / DEMO / "config.json", tmp_path)
    flags = ("--device", "cpu", "--shard_gb", "0.002", "--starts", start, "--lengths", "1", "40")
    rest = ("--options", "kv_cache_gib=0.01", "max_model_len=64", "--json", tmp_path / "found.json")
    done = run_script(ROOT / "recipes" / "benchmarks" / "start_up.py", tmp_path, *flags, *rest)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(list(tmp_path.glob("model-*.safetensors"))) == 3
    found = json.loads((tmp_path / "found.json").read_text())
    assert found
    for row in found.values():
        phases = dict(row["phases"])
        assert {"load weights", "compile kernels", "warm up"} <= phases.keys()
        assert 0 < sum(phases.values()) + row["imports"] <= row["ready"] + 0.1
        assert row["late"] == []
