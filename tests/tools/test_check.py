"""`blade_llm_check`: the form of its report, its exit codes, and that no probe can hang or crash it."""

import asyncio
import json
import re
import socket
import sys
import time

import psutil
import pytest

from bladellm_runtime.errors import ConfigError
from bladellm_tools.check import report
from bladellm_tools.check.args import CheckArgs
from bladellm_tools.check.catalog import CHECKS, GPU_CHECKS, chosen
from bladellm_tools.check.finding import Finding, Status, failed, passed, warned
from bladellm_tools.check.gpu import device_nodes, list_gpus
from bladellm_tools.check.runner import run_probe
from bladellm_tools.check.worker import probe
from tests.tools.command import run

LINE = re.compile(r"^ *(check_\w+) (PASS   |WARNING|FAILED ) - (\S.*)$")
NO_GPU = not device_nodes() and not list_gpus()


def lines_of(text: str) -> tuple[list[tuple[str, str, str]], str]:
    """(name, status, detail) of every line, and the last line."""
    *lines, last = text.splitlines()
    matches = [LINE.match(line) for line in lines]
    assert all(matches), text
    return [(match[1], match[2].strip(), match[3]) for match in matches if match], last


def test_the_report_has_one_line_a_check_and_a_line_of_counts() -> None:
    done = run("blade_llm_check", "--port", str(free_port()))
    lines, last = lines_of(done.stdout)
    assert [name for name, _, _ in lines] == [name for name in CHECKS if name != "check_model"]
    counts = {status: sum(found == status for _, found, _ in lines) for status in ("PASS", "WARNING", "FAILED")}
    assert last == f"PASS {counts['PASS']}, WARNING {counts['WARNING']}, FAILED {counts['FAILED']}"
    assert done.returncode == int(counts["FAILED"] > 0)
    width = max(len(name) for name, _, _ in lines)
    assert all(
        line[:width].strip() == name for line, (name, _, _) in zip(done.stdout.splitlines(), lines, strict=False)
    )


@pytest.mark.skipif(not NO_GPU, reason="this machine has a GPU")
def test_without_a_gpu_its_probes_warn_and_pass_the_exit_code() -> None:
    done = run("blade_llm_check", "--only", *GPU_CHECKS)
    lines, last = lines_of(done.stdout)
    assert [(status, detail) for _, status, detail in lines] == [("WARNING", "skipped: no device")] * len(GPU_CHECKS)
    assert last == f"PASS 0, WARNING {len(GPU_CHECKS)}, FAILED 0"
    assert done.returncode == 0
    assert run("blade_llm_check", "--only", *GPU_CHECKS, "--strict").returncode == 1


def test_blade_llm_check_is_the_same_command() -> None:
    arguments = ["--only", "pb_env", "shm"]
    assert run("blade_llm", "check", *arguments).stdout == run("blade_llm_check", *arguments).stdout


@pytest.mark.parametrize(
    ("statuses", "strict", "code"),
    [
        ([], False, 0),
        ([Status.PASS, Status.WARNING], False, 0),
        ([Status.PASS, Status.WARNING], True, 1),
        ([Status.PASS], True, 0),
        ([Status.FAILED, Status.PASS], False, 1),
    ],
)
def test_exit_code(statuses: list[Status], strict: bool, code: int) -> None:
    assert report.exit_code({str(i): Finding(status, "x") for i, status in enumerate(statuses)}, strict) == code


def test_a_line_stays_one_line() -> None:
    text = report.line("check_x", warned("first\nsecond \x1b[2J", "do\tthis"), 10)
    assert text == "   check_x WARNING - first second \ufffd[2J; do this"


def test_json_is_one_object() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = run("blade_llm_check", "--json", "--only", "port", "pb_env", "--port", str(port))
    answer = json.loads(done.stdout)
    assert [check["name"] for check in answer["checks"]] == ["check_pb_env", "check_port"]
    assert answer["checks"][1]["status"] == "FAILED"
    assert str(port) in answer["checks"][1]["detail"]
    assert answer["checks"][1]["hint"]
    assert answer["counts"]["FAILED"] == 1
    assert done.returncode == 1


def test_only_and_skip() -> None:
    assert chosen(CheckArgs(only=["port", "check_shm"], skip=["shm"])) == ["check_port"]
    assert "check_model" not in chosen(CheckArgs())
    assert "check_model" in chosen(CheckArgs(model="x"))
    with pytest.raises(ConfigError, match="check_ulimit"):
        chosen(CheckArgs(skip=["ulimits"]))


PROBES = {
    "hangs": "import time; time.sleep(600)",
    "hangs with a child": "import subprocess; subprocess.run(['sleep', '600.125'])",
    "dies of a signal": "import os; os.abort()",
    "exits": "import sys; sys.exit('library not found')",
    "says nothing": "pass",
    "says nonsense": "print('hello')",
}
ANSWERS = {
    "hangs": "no answer within 0.5 s",
    "hangs with a child": "no answer within 0.5 s",
    "dies of a signal": "died with signal SIGABRT",
    "exits": "died with exit code 1: library not found",
    "says nothing": "gave no answer",
    "says nonsense": "gave no answer",
}


@pytest.mark.parametrize("how", PROBES)
def test_a_bad_probe_costs_one_line(how: str) -> None:
    timeout = 0.5 if "hangs" in how else 20.0
    started = time.monotonic()
    finding = asyncio.run(run_probe([sys.executable, "-c", PROBES[how]], CheckArgs(timeout=timeout)))
    assert finding.status is Status.FAILED
    assert ANSWERS[how] in finding.detail
    assert time.monotonic() - started < 20
    assert not [child for child in psutil.process_iter(["cmdline"]) if child.info["cmdline"] == ["sleep", "600.125"]]


def test_what_a_probe_raises_is_a_failed(monkeypatch) -> None:
    def broken(_: CheckArgs) -> Finding:
        raise RuntimeError("CUDA error 999")

    monkeypatch.setattr("bladellm_tools.check.host.check_shm", broken)
    assert probe("check_shm", CheckArgs()) == failed("the check raised RuntimeError: CUDA error 999")


def test_library_noise_on_standard_output_does_not_hide_the_finding() -> None:
    code = (
        "import sys; sys.argv = ['worker', 'check_pb_env']; from bladellm_tools.check import host, worker\n"
        "real = host.check_pb_env\n"
        "def noisy(args):\n    print('noise'); import os; os.write(1, b'more'); return real(args)\n"
        "host.check_pb_env = noisy; worker.main()"
    )
    finding = asyncio.run(run_probe([sys.executable, "-c", code], CheckArgs()))
    assert finding.status is Status.PASS


def test_tables_come_before_the_counts(capsys, monkeypatch) -> None:
    def no_processes(names, args, on_finding) -> None:
        for name in names:
            on_finding(name, passed("fine", (("weights", "1 GiB"), ("room", "20 GiB"))))

    monkeypatch.setattr(report, "run_checks", no_processes)
    assert report.run(CheckArgs(only=["shm"])) == 0
    assert capsys.readouterr().out == (
        "check_shm PASS    - fine\n  weights   1 GiB\n  room     20 GiB\nPASS 1, WARNING 0, FAILED 0\n"
    )


def free_port() -> int:
    with socket.socket() as probe_socket:
        probe_socket.bind(("127.0.0.1", 0))
        return int(probe_socket.getsockname()[1])
