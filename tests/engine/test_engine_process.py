"""The engine process, before there is an engine."""

import subprocess
import sys
from pathlib import Path


def test_it_reads_its_arguments_before_torch_is_there():
    """So that a bad address is reported at once."""
    code = "import sys, bladellm_runtime.engine.process; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[2]).returncode == 0
