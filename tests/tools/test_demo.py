"""The demo of `make demo` works from its start to its clean end."""

import importlib
import re
import subprocess
import sys

import pytest

from tests.tools.command import ROOT

pytestmark = pytest.mark.timeout(300)

TIMING = re.compile(r"TTFT [\d.]+ ms, (TBT mean [\d.]+ ms, p99 [\d.]+ ms, )?(\d+) tokens, (\d+) tokens/s")


@pytest.mark.parametrize("moments", [[0.25], [0.25, 0.25], [0.25, 0.375, 1.0]])
def test_demo_names_gaps_wherever_there_are_pieces(moments: list[float], monkeypatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "recipes"))
    timing = importlib.import_module("demo").Timing(moments, 5)
    found = TIMING.fullmatch(timing.line())
    assert found
    assert bool(found[1]) == (len(moments) > 1)
    assert int(found[2]) == 5
    assert int(found[3]) == 5 / moments[-1]


def test_demo_answers_measures_and_stops(device) -> None:
    line = [sys.executable, "recipes/demo.py", "--device", device]
    done = subprocess.run(line, capture_output=True, text=True, check=False, cwd=ROOT, timeout=240)
    assert done.returncode == 0, done.stderr
    short, story = re.findall(rf"^\[{TIMING.pattern}\]$", done.stdout, re.M)
    assert all(int(tokens) > 1 and int(rate) > 0 for _, tokens, rate in (short, story))
    assert story[0], "96 tokens do not come in one piece, as those of the short answer may"
    assert re.search(r"^blade_llm:time_to_first_token_seconds_count\{.*\} 2\.0$", done.stdout, re.M)
    assert done.stdout.endswith("server stopped with exit code 0\n")


@pytest.mark.slow
def test_demo_says_what_went_wrong() -> None:
    line = [sys.executable, "recipes/demo.py", "--max_model_len", "10000000"]
    done = subprocess.run(line, capture_output=True, text=True, check=False, cwd=ROOT, timeout=240)
    assert done.returncode == 1
    assert "max_model_len" in done.stderr
    assert "Traceback" not in done.stderr
