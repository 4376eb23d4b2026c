"""An engine's process that is started before it is told anything, and one that nobody wants in the end."""

import os
import socket
import subprocess
import sys

import pytest

from bladellm_runtime.errors import UserError
from bladellm_runtime.wire.engine_process import DEFAULT_COMMAND, EngineProcess

WATCHED = """
import sys
from bladellm_runtime.config import ServingArgs
from bladellm_runtime.wire import engine_process
from bladellm_tools import serve

class Started(Exception):
    pass

def start(*_):
    raise Started(*(name for name in sys.modules if name in {"uvicorn", "uvloop", "zmq", "bladellm_runtime.server"}))

engine_process.EngineProcess = start
try:
    serve.run(ServingArgs(model=sys.argv[1]))
except Started as started:
    print("imported before:", *started.args)
"""


def test_what_it_is_not_told_it_does_not_do():
    """A front end that ends before it says what to serve leaves no engine behind, and no traceback."""
    done = subprocess.run(list(DEFAULT_COMMAND), stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (1, "", "")


def test_one_that_is_not_wanted_ends_with_its_context():
    with EngineProcess([sys.executable, "-c", "import time; time.sleep(60)"]) as process:
        assert os.path.exists(f"/proc/{process.pid}")
    assert not os.path.exists(f"/proc/{process.pid}")


def test_telling_one_that_has_ended_is_no_error():
    with EngineProcess(["true"]) as process:
        assert process.wait() == 0
        process.write(b"anything\n")
        process.end_input()
        process.write(b"anything\n")


def test_a_command_that_cannot_be_run_is_one_sentence():
    with pytest.raises(UserError, match=r"^the engine command /nonexistent/engine cannot be run: No such file"):
        EngineProcess(["/nonexistent/engine"])


def test_it_is_started_before_what_serves_is_imported(demo_model):
    done = subprocess.run(
        [sys.executable, "-c", WATCHED, str(demo_model)], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == "imported before:\n"


def test_a_server_that_cannot_start_leaves_none_behind(demo_model):
    """Its port is taken: that is said when the engine's process runs already."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        command = [sys.executable, "-m", "bladellm_tools.cli", "serve", "--model", str(demo_model), "--port", port]
        # All that inherit the pipe have ended when it does.
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode != 0
    assert port in done.stderr
    assert "Traceback" not in done.stderr
