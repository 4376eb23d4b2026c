"""The demo of `make demo` works from its start to its clean end."""

import re
import subprocess
import sys

import pytest

from tests.tools.command import ROOT

pytestmark = pytest.mark.timeout(300)


def test_demo_answers_measures_and_stops(device) -> None:
    line = [sys.executable, "recipes/demo.py", "--device", device]
    done = subprocess.run(line, capture_output=True, text=True, check=False, cwd=ROOT, timeout=240)
    assert done.returncode == 0, done.stderr
    timings = re.findall(
        r"\[TTFT [\d.]+ ms, TBT mean [\d.]+ ms, p99 [\d.]+ ms, (\d+) tokens, (\d+) tokens/s\]", done.stdout
    )
    assert len(timings) == 2
    assert all(int(tokens) > 1 and int(rate) > 0 for tokens, rate in timings)
    assert re.search(r"^blade_llm:time_to_first_token_seconds_count\{.*\} 2\.0$", done.stdout, re.M)
    assert done.stdout.endswith("server stopped with exit code 0\n")


@pytest.mark.slow
def test_demo_says_what_went_wrong() -> None:
    line = [sys.executable, "recipes/demo.py", "--max_model_len", "10000000"]
    done = subprocess.run(line, capture_output=True, text=True, check=False, cwd=ROOT, timeout=240)
    assert done.returncode == 1
    assert "max_model_len" in done.stderr
    assert "Traceback" not in done.stderr
