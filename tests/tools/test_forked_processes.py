"""Processes that tests fork from one with torch do what those do that Python starts."""

import os
import signal
import subprocess
import sys

import pytest

from tests.support.warm import ROOT, run_code

CODES = {
    "prints and arguments": "import sys, os; print(sys.argv, os.environ['A'], os.getcwd()); sys.stderr.write('x')",
    "no input": "import sys; print(repr(sys.stdin.read()))",
    "a number": "raise SystemExit(7)",
    "a sentence": "raise SystemExit('no')",
    "a signal": "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
    "threads and exit handlers": (
        "import atexit, threading, time; atexit.register(print, 'end'); "
        "threading.Thread(target=lambda: (time.sleep(0.05), print('thread'))).start()"
    ),
}


@pytest.mark.parametrize("code", CODES.values(), ids=CODES)
def test_they_end_alike(code, tmp_path):
    environment = {**os.environ, "A": "5"}
    line = [sys.executable, "-c", code, "1", "x y"]
    expected = subprocess.run(
        line, capture_output=True, text=True, cwd=tmp_path, env=environment, stdin=subprocess.DEVNULL, check=False
    )
    found = run_code(code, 1, "x y", cwd=tmp_path, A="5")
    assert (found.returncode, found.stdout, found.stderr) == (expected.returncode, expected.stdout, expected.stderr)


def test_errors_are_told_and_nothing_stays_for_the_next():
    found = run_code("import os, sys; sys.changed = os.environ['CHANGED'] = 'yes'; raise KeyError(3)")
    assert found.returncode == 1
    assert found.stderr.endswith("KeyError: 3\n")
    assert run_code("import os, sys; print(hasattr(sys, 'changed'), 'CHANGED' in os.environ)").stdout == "False False\n"


def test_a_test_that_is_interrupted_takes_its_job_along(tmp_path):
    def interrupt(*_):
        raise TimeoutError

    before = signal.signal(signal.SIGUSR1, interrupt)
    code = f"import os, time; os.kill({os.getpid()}, {int(signal.SIGUSR1)}); time.sleep(600)"
    try:
        with pytest.raises(TimeoutError):
            run_code(code, cwd=ROOT)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert run_code("print(1)").stdout == "1\n"
