"""The commands against mock servers: known ratios come out, failures end in reports, no server stays behind."""

import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bladellm_tools.bench import commands
from bladellm_tools.bench.args import MockArgs
from bladellm_tools.bench.compare import compare
from bladellm_tools.bench.endpoints import free_port
from bladellm_tools.bench.mock_process import MockProcess
from bladellm_tools.bench.records import Benchmark
from bladellm_tools.bench.slo import parse_slo
from bladellm_tools.bench.storage import StorageError
from tests.bench.commanding import Outcome, bench, short
from tests.bench.driving import DISTURBED_SECONDS, LATE_TRIALS, disturbed
from tests.support.cases import some_of
from tests.tools.command import ROOT, command

pytestmark = pytest.mark.usefixtures("alone", "soon_seen")


def mock_command(**settings: object) -> str:
    """A `cmd:` endpoint that is a mock."""
    flags = " ".join(f"--{name} {value}" for name, value in settings.items())
    program, *words = command("blade_llm_bench")
    return f"cmd:{program} {' '.join(map(json.dumps, words))} mock --port {{port}} {flags}"


def command_without_charts() -> list[str]:
    """`blade_llm_bench` as a process that draws none: they take longer than short levels."""
    program, option, code = command("blade_llm_bench")
    no_charts = "reporting.curve_charts = reporting.run_charts = lambda *given: []"
    return [program, option, f"from bladellm_tools.bench import reporting; {no_charts}; {code}"]


def processes_of(folder: Path) -> list[int]:
    """Processes that still write to a log in the folder."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            target = os.readlink(process / "fd" / "1")
        except OSError:
            continue
        if target.startswith(str(folder)):
            found.append(int(process.name))
    return found


def trusted(benchmark: Benchmark) -> Benchmark:
    """The benchmark without the client's verdict on itself: beside other tests, 1 % of the requests are soon late."""
    for run in benchmark.runs:
        run.client.limited = False
    return benchmark


GROUP, GAP = 21, 30
"""Requests of a group, and the pause to the next group in spacings."""


def write_groups(path: Path, groups: int) -> float:
    """A trace of evenly spaced groups, one spacing a second within them; returns its mean rate."""
    times = [group * (GROUP + GAP) + place for group in range(groups) for place in range(GROUP)]
    path.write_text("".join(json.dumps({"t": t, "in": 8, "out": 8}) + "\n" for t in times))
    return (len(times) - 1) / times[-1]


@pytest.mark.turns("benchmarks")
def test_compare_recovers_a_known_factor_two_in_both_forms(tmp_path, no_charts) -> None:
    """Groups of 21 requests d apart meet a server that takes s for each: the median waits 10 (s - d).

    With 20 ms and s = 12 ms against 40 ms and s = 16 ms, an SLO of 80 ms is crossed at d = 6 ms against d = 12 ms:
    twice the load. At d = 18 ms nobody waits, and the first server's latencies are half of the second's. What a pause
    of the machine has disturbed, half of a level by 150 ms, is measured again, and by the same figures.
    """
    for trial in range(LATE_TRIALS):
        done, late, lightest = compare_groups(tmp_path / str(trial))
        assert done.code == 0, done.err
        try:
            assert_factor_two(done, lightest)
            return
        except AssertionError:
            if trial == LATE_TRIALS - 1 or not disturbed(done.benchmark.runs, late):
                raise


def compare_groups(tmp_path: Path) -> tuple[Outcome, float, float]:
    """What comparing the two said, how late they were at p99, and the rate of the lightest level."""
    tmp_path.mkdir()
    own_rate = write_groups(tmp_path / "trace.jsonl", 2)
    levels = [f"{own_rate / spacing:.6f}" for spacing in (0.018, 0.0135, 0.0105, 0.0068, 0.0052)]
    fast = MockArgs(ttft=0.02, tbt=0.004, service_time=0.012)
    slow = MockArgs(ttft=0.04, tbt=0.008, service_time=0.016)
    arguments = [
        "--arrival", "trace", "--dataset", "trace", "--data", str(tmp_path / "trace.jsonl"), "--qps", *levels,
        "--num_requests", str(2 * GROUP), "--repeats", "1", "--stop_when", "none", "--slo", "ttft_p50=80ms",
        "--warmup", "0", "--quiet",
    ]  # fmt: skip
    with MockProcess(fast) as a, MockProcess(slow) as b:
        endpoints = ["--endpoint", f"fast={a.url}", f"slow={b.url}"]
        done = bench("compare", *endpoints, *arguments, folder=tmp_path / "out")
        return done, max(a.lateness()["late_p99"], b.lateness()["late_p99"]), float(levels[0])


def assert_factor_two(done: Outcome, lightest: float) -> None:
    (pair,) = compare(trusted(done.benchmark), parse_slo(["ttft_p50=80ms"])).pairs
    first = {row.figure: row.ratio for row in pair.vertical if row.load.qps == pytest.approx(lightest)}
    assert first["ttft_p50"].value == pytest.approx(0.5, rel=0.05)
    assert first["ttft_p50"].inverse.value == pytest.approx(2, rel=0.05)
    assert first["tbt_p50"].value == pytest.approx(0.5, rel=0.05)
    (row,) = pair.horizontal
    assert (row.first.kind, row.second.kind) == ("at", "at"), done.out
    assert row.ratio.value == pytest.approx(2, rel=0.05), done.out
    assert "fast against slow" in done.html


@pytest.mark.slow
def test_a_against_a_shows_no_difference(tmp_path) -> None:
    """Also with queueing, where requests differ: both servers get the same requests at the same times."""
    settings = MockArgs(ttft=0.03, tbt=0.004, service_time=0.01)
    flags = short("--qps", "20,50", "--duration", "0.6", "--repeats", "3", "--output_len", "20")
    with MockProcess(settings) as a, MockProcess(settings) as b:
        done = bench("compare", "--endpoint", f"a={a.url}", f"b={b.url}", *flags, folder=tmp_path / "out")
    assert done.code == 0, done.err
    (pair,) = compare(trusted(done.benchmark), []).pairs
    ratios = [row.ratio for row in pair.vertical if row.ratio is not None]
    assert len(ratios) >= 4
    assert all(ratio.value == pytest.approx(1, rel=0.1) for ratio in ratios)
    intervals = [ratio.interval for ratio in ratios if ratio.interval is not None]
    wide = [interval for interval in intervals if interval.contains(1) or abs(math.log(interval.low)) < 0.01]
    assert len(wide) >= 0.75 * len(intervals) > 0
    plans = {(run.endpoint, run.load, run.repeat): [r.intended for r in run.requests] for run in done.benchmark.runs}
    assert len(plans) == 12
    assert all(plans["a", load, repeat] == plans["b", load, repeat] for _, load, repeat in plans)


def test_a_sweep_starts_its_server_stops_at_saturation_and_leaves_nothing(tmp_path, no_charts) -> None:
    """Saturation of the mock is at 1 / service_time = 50 QPS."""
    folder = tmp_path / "out"
    endpoint = "mock=" + mock_command(ttft=0.005, tbt=0.001, service_time=0.02)
    flags = short("--qps", "20", "30,100,300", "--duration", "0.5", "--repeats", "1")
    done = bench("sweep", "--endpoint", endpoint, *flags, folder=folder)
    assert done.code == 0, done.err
    assert [load.qps for load in done.benchmark.loads] == [20, 30, 100]
    assert "over-saturated" in done.out
    assert done.err == ""
    assert (folder / "mock.server.log").exists()
    assert processes_of(folder) == []
    again = bench("sweep", "--endpoint", endpoint, *flags, folder=folder)
    assert again.code == 1
    assert "holds results already" in again.err


def test_compare_starts_servers_in_turn(tmp_path, no_charts) -> None:
    """Two that would need the same GPU never run at once: they write down when they do."""
    folder = tmp_path / "out"
    log = tmp_path / "log"
    script = tmp_path / "serve.py"
    script.write_text(
        "import atexit, signal, subprocess, sys\n"
        f"def note(text): open({str(log)!r}, 'a').write(text + '\\n')\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))\n"
        "name, *line = sys.argv[1:]\n"
        "note(f'start {name}')\n"
        "server = subprocess.Popen(line)\n"
        "try:\n    server.wait()\n"
        "finally:\n    server.terminate(); server.wait(); note(f'stop {name}')\n"
    )
    endpoints = [
        f"{name}=cmd:{sys.executable} {script} {name} " + mock_command(ttft=ttft, tbt=0.001).removeprefix("cmd:")
        for name, ttft in (("a", 0.005), ("b", 0.01))
    ]
    flags = short("--qps", "100", "--num_requests", "10", "--repeats", "2")
    done = bench("compare", "--endpoint", *endpoints, *flags, folder=folder)
    assert done.code == 0, done.err
    assert log.read_text().split("\n")[:-1] == ["start a", "stop a", "start b", "stop b", "start a", "stop a"]
    assert [(run.endpoint, run.repeat) for run in done.benchmark.runs] == [("a", 0), ("b", 0), ("b", 1), ("a", 1)]
    assert processes_of(folder) == []


@pytest.mark.parametrize("fault", some_of(["http_500", "error_event", "cut", "garbage"], ["error_event"]))
def test_a_server_that_always_fails_gives_a_report_and_exit_code_1(fault: str, tmp_path, no_charts) -> None:
    with MockProcess(MockArgs(ttft=0.005, tbt=0.001, fault=fault)) as server:
        done = bench("sweep", "--endpoint", f"bad={server.url}", *short("--qps", "20,40"), "--duration", "0.5",
                     "--repeats", "1", folder=tmp_path / "out")  # fmt: skip
    assert done.code == 1
    assert done.err.count("\n") == 1
    assert "not one request succeeded" in done.err
    assert "0% of" in done.out
    assert "Failures" in done.html
    assert [load.qps for load in done.benchmark.loads] == [20]


@pytest.mark.parametrize("how", some_of(["dies", "stalls", "http_500"], ["dies"]))
def test_a_server_that_fails_in_part_gives_a_report(how: str, tmp_path, no_charts) -> None:
    settings, flags = {
        "dies": (MockArgs(ttft=0.005, tbt=0.001, die_after=12), []),
        "stalls": (MockArgs(ttft=0.005, tbt=0.001, fault="stall", fault_share=0.2), ["--timeout", "0.5"]),
        "http_500": (MockArgs(ttft=0.005, tbt=0.001, fault="http_500", fault_share=0.3), []),
    }[how]
    with MockProcess(settings) as server:
        done = bench("run", "--endpoint", f"bad={server.url}", *short("--qps", "40", "--num_requests", "40"), *flags,
                     "--repeats", "1", folder=tmp_path / "out")  # fmt: skip
    assert done.code == 0, done.err
    assert "Failures" in done.html
    (run,) = done.benchmark.runs
    assert 0 < sum(record.outcome == "ok" for record in run.requests) < len(run.requests)


def test_a_started_server_that_dies_is_named_in_the_report(tmp_path, no_charts) -> None:
    endpoint = "bad=" + mock_command(ttft=0.005, tbt=0.001, die_after=12)
    done = bench("sweep", "--endpoint", endpoint, *short("--qps", "20,40"), "--duration", "1", "--repeats", "1",
                 folder=tmp_path / "out")  # fmt: skip
    assert done.code == 0, done.err
    assert done.benchmark.runs[0].aborted.startswith("the server of bad exited with code 1")
    assert "the server of bad exited with code 1" in done.html
    assert len(done.benchmark.runs) == 1


def test_no_server_is_one_sentence(tmp_path) -> None:
    done = bench("run", "--endpoint", "none=http://127.0.0.1:9", folder=tmp_path / "out")
    assert done.code == 1
    assert "no server answers" in done.err
    assert done.err.count("\n") == 1


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_an_interruption_keeps_what_was_measured_and_stops_the_server(number: signal.Signals, tmp_path) -> None:
    folder = tmp_path / "out"
    line = [*command_without_charts(), "sweep", "--endpoint", "mock=" + mock_command(ttft=0.01, tbt=0.001)]
    line += [*short("--qps", "20,21", quiet=False), "--duration", "1.2", "--repeats", "1", "--out", str(folder)]
    process = subprocess.Popen(line, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    assert "20 QPS" in process.stderr.readline()
    time.sleep(0.5)
    process.send_signal(number)
    out, err = process.communicate(timeout=30)
    assert process.returncode == 130, err
    assert "interrupted; what was measured is in" in err
    assert "21 QPS" in out
    assert "Interrupted" in (folder / "report.html").read_text()
    assert "Traceback" not in err
    assert processes_of(folder) == []


def test_what_was_measured_outlives_a_kill(tmp_path, no_charts) -> None:
    folder = tmp_path / "out"
    stored = folder / "benchmark.json"
    with MockProcess(MockArgs(ttft=0.01, tbt=0.001)) as mock:
        line = [*command("blade_llm_bench"), "sweep", "--endpoint", f"mock={mock.url}"]
        line += [*short("--qps", "30,31,32"), "--duration", "0.8", "--repeats", "1", "--out", str(folder)]
        process = subprocess.Popen(line, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        while '"runs": 2' not in (stored.read_text() if stored.exists() else ""):
            assert process.poll() is None, process.communicate()[1]
            time.sleep(0.02)
        process.kill()
        process.communicate(timeout=30)
    assert bench("sweep", "--endpoint", "mock=http://127.0.0.1:9", folder=folder).code == 1, "it holds results"
    shown = bench("plot", "--results", str(folder), folder=folder)
    assert shown.code == 0, shown.err
    assert "30 QPS" in shown.out
    assert "31 QPS" in shown.out
    assert "did not come to its end" in shown.out
    assert (folder / "report.html").exists()


def test_a_disk_that_is_full_between_runs_ends_nothing(tmp_path, monkeypatch, no_charts) -> None:
    def full(*given: object) -> None:
        raise StorageError("no space left.")

    monkeypatch.setattr(commands, "save_newest", full)
    with MockProcess(MockArgs(ttft=0.01, tbt=0.001)) as mock:
        levels = short("--qps", "50,51", "--duration", "0.2", "--repeats", "2")
        done = bench("sweep", "--endpoint", f"mock={mock.url}", *levels, folder=tmp_path / "out")
    assert done.code == 0, done.err
    assert done.out.count("Results are not stored before the end: no space left.") == 1
    assert len(list((tmp_path / "out" / "runs").glob("*.jsonl"))) == 2 * 2


def test_an_interruption_before_anything_leaves_no_process(tmp_path) -> None:
    folder = tmp_path / "out"
    endpoint = f"slow=cmd:{sys.executable} -c 'import time; time.sleep(600)' {{port}}"
    line = [*command("blade_llm_bench"), "run", "--endpoint", endpoint, "--out", str(folder)]
    process = subprocess.Popen(line, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    while not processes_of(folder):
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert (process.returncode, err) == (130, "error: interrupted\n")
    assert processes_of(folder) == []


@pytest.mark.slow
def test_capacity_is_found_by_bisection(tmp_path) -> None:
    """The mock's median TTFT passes 60 ms where its queue does: near 1 / service_time = 100 QPS, if enough come."""
    with MockProcess(MockArgs(ttft=0.005, tbt=0.001, service_time=0.01)) as server:
        flags = short("--qps", "80", "--num_requests", "200", "--repeats", "1", "--slo", "ttft_p50=60ms")
        done = bench("sweep", "--endpoint", f"mock={server.url}", "--find_capacity", *flags, folder=tmp_path / "out")
        late = server.lateness()["late_p99"]
    assert done.code == 0, done.err
    (note,) = done.benchmark.notes
    if "the client was the limit" in note and late > DISTURBED_SECONDS:
        pytest.skip(f"this machine is too busy to keep time: the mock was {late * 1e3:.1f} ms late at p99")
    words = note.replace(",", "").split()
    passed, failed = (float(words[words.index("QPS") - 1]), float(words[-2]))
    assert passed < failed <= passed * 1.11
    assert 75 < passed < 140
    assert note in done.html


@pytest.mark.slow
def test_automatic_levels_end_beyond_saturation(tmp_path) -> None:
    with MockProcess(MockArgs(ttft=0.005, tbt=0.001, service_time=0.02)) as server:
        done = bench("sweep", "--endpoint", f"mock={server.url}", *short("--qps", "auto", "--duration", "2"),
                     "--repeats", "1", folder=tmp_path / "out")  # fmt: skip
    assert done.code == 0, done.err
    rates = [load.qps for load in done.benchmark.loads]
    assert rates[0] == pytest.approx(5, rel=0.25)
    assert 45 < rates[-1] < 110


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--extra_body", "{"), "--extra_body is not JSON"),
        (("--header", "x"), "--header"),
        (("--tokenizer", "/nowhere"), "--tokenizer /nowhere"),
        (("--dataset", "jsonl", "--data", "/nowhere"), "--data /nowhere"),
        (("--dataset", "prefix", "--prefix_len", "8"), "--prefix_len 8"),
    ],
)
def test_what_cannot_be_asked_is_told_before_a_server_is_started(flags: tuple, words: str, tmp_path) -> None:
    arguments = short("--qps", "1") if "jsonl" not in flags else ["--qps", "1"]
    done = bench("sweep", "--endpoint", f"a=cmd:touch {tmp_path}/started {{port}}", *arguments, *flags,
                 folder=tmp_path / "out")  # fmt: skip
    assert done.code == 2
    assert words in done.err
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_left_where_nothing_was_measured(tmp_path) -> None:
    endpoint = ("--endpoint", f"a=http://127.0.0.1:{free_port()}")
    assert bench("run", *endpoint, folder=tmp_path / "new").code == 1
    assert not (tmp_path / "new").exists()
    (tmp_path / "old").mkdir()
    assert bench("run", *endpoint, folder=tmp_path / "old").code == 1
    assert (tmp_path / "old").exists()
    done = bench("run", *endpoint, "--start_timeout", "5", folder=tmp_path / "new")
    assert (done.code, "--start_timeout has no effect" in done.err) == (2, True)
