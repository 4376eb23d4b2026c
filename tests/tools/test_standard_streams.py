"""Commands that are started without standard streams, or with some that cannot be written."""

import subprocess
import sys

import pytest

from bladellm_tools.serve import show
from tests.tools.command import ROOT

CODE = """
import os, socket, subprocess, sys
from bladellm_tools.cli import open_standard_streams
open_standard_streams()
with open(sys.argv[1], "w") as told, socket.socket() as taken:
    print("lost"), print("lost", file=sys.stderr), sys.stdout.flush()
    child = subprocess.run([sys.executable, "-c", "import os; [os.fstat(n) for n in range(3)]"], check=True)
    print(taken.fileno() > 2, repr(sys.stdin.read()), child.returncode, file=told)
"""


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_streams_that_are_closed_lead_nowhere_and_nothing_else_takes_their_numbers(closed, tmp_path):
    subprocess.run(
        ["sh", "-c", f'exec "$@" {closed}', "sh", sys.executable, "-c", CODE, tmp_path / "told"],
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, cwd=ROOT, check=True, timeout=60,
    )  # fmt: skip
    assert (tmp_path / "told").read_text() == "True '' 0\n"


def test_a_banner_that_cannot_be_written_is_logged_and_no_error(monkeypatch, caplog):
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        show(["banner"], "http://127.0.0.1:1")
        print("more", flush=True)
    assert [record.getMessage() for record in caplog.records] == [
        "standard output cannot be written (No space left on device); serving at http://127.0.0.1:1"
    ]
