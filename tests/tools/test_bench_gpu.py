"""`make bench-gpu` on a tiny shape and a CPU: every part runs, and its figures stand beside their goals."""

import argparse
import importlib
import json
import subprocess
import sys
from types import ModuleType

import pytest

from tests.tools.command import ROOT

BENCHMARKS = ROOT / "recipes" / "benchmarks"
ENGINE_FLAGS = "--kv_cache_gib 0.1 --steps 4 --tokens 3 --repeats 2 --max_running_requests 8"


@pytest.fixture
def recipe(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module


@pytest.fixture
def targets(recipe) -> ModuleType:
    return recipe("targets")


def bench(folder, *flags: str) -> "subprocess.CompletedProcess[str]":
    words = [sys.executable, str(BENCHMARKS / "bench_gpu.py"), "--out", str(folder), "--shapes", "tiny"]
    return subprocess.run(
        [*words, "--device", "cpu", *flags], capture_output=True, text=True, check=False, cwd=ROOT, timeout=200
    )


def measured(folder) -> dict[str, float]:
    return {row["case"]: row["value"] for row in json.loads((folder / "results.json").read_text())}


@pytest.mark.slow
def test_parts_of_a_shape_share_an_engine_and_join_what_was_measured(tmp_path):
    done = bench(tmp_path, "--parts", "decode", "prefill", "offline", "--engine_flags", ENGINE_FLAGS)
    assert done.returncode == 0, done.stdout + done.stderr
    first = measured(tmp_path)
    steps = {"decode step, batch 1", "decode step, batch 3", "host work, batch 1", "host work, batch 3"}
    rates = {"offline", "offline, default --target_tbt_ms"}
    packed = {f"{case}, fp12_e4m7" for case in {*steps, *rates, "engine ready, this start"}}
    assert set(first) == packed | steps | rates | {"prefill of 40", "engine ready, this start, no_quant"}
    assert all(value > 0 for value in first.values())
    raw = json.loads((tmp_path / "tiny-decode-prefill-offline.json").read_text())["raw"]
    assert [(run["requests"], run["input"], run["output"]) for run in raw["offline"]] == [(6, 8, 4)] * 2
    done = bench(tmp_path, "--parts", "long", "--engine_flags", ENGINE_FLAGS)
    assert done.returncode == 0, done.stdout + done.stderr
    both = measured(tmp_path)
    contexts = ("50, no_quant", "90, no_quant", "50, int8")
    assert set(both) - set(first) == {
        "engine ready, this start, int8", *(f"{what} of {context}" for what in ("context", "first token")
                                            for context in contexts),
    }  # fmt: skip
    assert both["offline"] == first["offline"]
    lines = (tmp_path / "table.md").read_text().splitlines()
    assert len(lines) == len(both) + 2
    assert all(line.count("|") == 11 for line in lines)


@pytest.mark.slow
def test_a_part_that_fails_is_named_and_the_others_go_on(tmp_path):
    flags = ("--parts", "decode", "long", "--engine_flags", f"{ENGINE_FLAGS} --kv_cache_gib 0.0001")
    done = bench(tmp_path, *flags)
    assert done.returncode == 1
    assert "tiny-decode-long failed" in done.stderr
    assert "tiny-long-int8" in done.stdout


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_starts_and_a_server_under_load(tmp_path):
    load = "--input_len 9 --output_len 3 --duration 0.5 --min_requests 6 --warmup 0.1"
    fastest = "--kv_cache_quant fp12_e4m7 --precompute_first_layer"
    flags = f"--flags=--kv_cache_gib 0.02 {fastest}"
    online = (flags, "--qps", "20", "--concurrency", "2", "--bench_flags", load)
    options = ("--start_options", "kv_cache_gib=0.02 max_model_len=64")
    parts = ("--parts", "start", "online", *options, "--models", str(tmp_path / "models"))
    done = bench(tmp_path / "out", *parts, "--online_flags", "--max_model_len", "128", *online)
    assert done.returncode == 0, done.stdout + done.stderr
    found = measured(tmp_path / "out")
    assert {"engine ready, warm", "server ready, warm", "20 QPS, TTFT p50", "2 streams"} <= set(found)
    assert {"20 QPS, --target_ttft_ms 95, TBT p99", "QPS at TTFT p90 100 ms, TBT p99 50 ms"} <= set(found)
    assert found["2 streams"] > 0
    assert not (tmp_path / "models" / "tiny-start").exists()


def test_a_goal_is_met_by_less_time_and_by_more_tokens(targets):
    least = targets.TARGETS["llama31-8b"]["offline"].least
    met = {value: targets.Row("llama31-8b", "offline", "tokens/s", value).met for value in (least - 1, least, None)}
    assert met == {least - 1: "no", least: "yes", None: ""}
    least = targets.DECODE[64].least
    row = targets.Row("llama31-8b", "decode step, batch 64", "ms", least)
    assert row.met == "yes"
    assert targets.Row(row.shape, row.case, "ms", least + 0.1).met == "no"
    assert targets.Row("llama31-8b", "8 QPS, TBT p99", "ms", 14.6).met == "no"
    assert targets.Row("qwen25-7b", "decode step, batch 64", "ms", 1.0).met == ""


def test_a_peer_of_the_same_run_moves_the_goal(recipe, targets, tmp_path):
    kept = targets.DECODE[8]
    file = tmp_path / "peer.json"
    file.write_text(json.dumps({"llama31-8b": {"decode step, batch 8": 1.1 * kept.peer, "offline": 9000}}))
    cases = {"decode step, batch 8": ("ms", 1.05 * kept.least), "offline": ("tokens/s", 11_000.0), "other": ("ms", 1.0)}
    rows = [targets.Row("llama31-8b", case, unit, value) for case, (unit, value) in cases.items()]
    assert [row.met for row in rows] == ["no", "no", ""]
    bench_gpu = recipe("bench_gpu")
    beside = bench_gpu.beside_peer(rows, bench_gpu.read_figures(str(file)))
    assert [row.met for row in beside] == ["yes", "yes", ""]
    assert beside[0].least == pytest.approx(1.1 * kept.least)
    assert bench_gpu.beside_peer(beside, {"llama31-8b": {"offline": 1.0}})[1].peer == 9000


@pytest.mark.parametrize("text", ["[1]", '{"llama31-8b": 3}', '{"llama31-8b": {"offline": "fast"}}', "{", None])
def test_figures_of_a_peer_that_are_none_are_told(text, recipe, tmp_path):
    file = tmp_path / "peer.json"
    if text is not None:
        file.write_text(text)
    with pytest.raises(argparse.ArgumentTypeError, match=r"peer\.json has no figures by shape and case"):
        recipe("bench_gpu").read_figures(str(file))


def test_every_goal_belongs_to_a_case_that_is_measured(recipe, targets):
    """A goal under a name that no part uses would never be shown."""
    bench_gpu = recipe("bench_gpu")
    levels = [("poisson", f"{qps} QPS") for qps in targets.QPS] + [("closed", f"{n} streams") for n in targets.STREAMS]
    figures = dict.fromkeys(("ttft_p50_ms", "ttft_p90_ms", "tbt_p50_ms", "tbt_p99_ms", "requests_per_s"), 1.0)
    rows = [{"load": load, "level": level, "endpoint": "ours", **figures} for load, level in levels]
    carried = dict.fromkeys(targets.OURS, 1.0)
    found = {"rows": rows, "ready_s": {"ours": 1.0}, "carried_qps": carried}
    online = {row.case for row in bench_gpu.online_rows("s", found)}
    for shape, goals in targets.TARGETS.items():
        cases = targets.CASES[shape]
        named = {f"decode step, batch {batch}" for batch in cases.decode} | {f"prefill of {n}" for n in cases.prefill}
        named |= {f"host work, batch {batch}" for batch in cases.decode} | {"offline", *bench_gpu.STARTS.values()}
        named |= {f"{case}, {targets.FLOAT12}" for case in named if case.startswith(("decode", "offline"))}
        named |= {f"context of {n}, {kind}" for kind, contexts in cases.contexts.items() for n in contexts}
        assert set(goals) <= named | online, shape


def test_a_peer_stands_beside_the_same_level(recipe):
    rows = [
        {"load": "closed", "level": "2 streams", "endpoint": name, "requests_per_s": rate, "ttft_p50_ms": rate,
         "ttft_p90_ms": rate, "tbt_p50_ms": rate, "tbt_p99_ms": None}
        for name, rate in (("ours", 5.0), ("peer", 4.0))
    ]  # fmt: skip
    online = {"rows": rows, "ready_s": {"ours": 1.0, "peer": 2.0}, "carried_qps": {"ours": 24.0, "peer": 20.0}}
    found = list(recipe("bench_gpu").online_rows("tiny", online))
    assert [(row.value, row.peer) for row in found] == [(5.0, 4.0)] * 4 + [(None, None), (24.0, 20.0), (1.0, 2.0)]


def test_the_goals_of_a_server_with_a_target_have_names_of_their_own(recipe):
    figures = dict.fromkeys(("ttft_p50_ms", "ttft_p90_ms", "tbt_p50_ms", "tbt_p99_ms"), 1.0)
    names = ("ours", "ours_target_ttft", "peer")
    rows = [{"load": "poisson", "level": "24 QPS", "endpoint": name, **figures} for name in names]
    online = {"rows": rows, "ready_s": {"ours": 1.0}, "carried_qps": dict.fromkeys(names, 3.0)}
    cases = [row.case for row in recipe("bench_gpu").online_rows("tiny", online)]
    assert len(cases) == len(set(cases)) == 2 * 4 + 2 + 1
