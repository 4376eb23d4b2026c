"""Where Triton looks for its backends."""

import os
import subprocess
import sys

import pytest

IMPORT = """
import importlib.metadata, sys
def refuse(*args, **kwargs):
    raise RuntimeError("all distributions are read")
importlib.metadata.entry_points = refuse
from bladellm_kernels.has_triton import has_triton, use_own_backends
if "own" in sys.argv:
    use_own_backends()
import triton
assert "nvidia" in triton.backends.backends
"""


@pytest.mark.parametrize(
    ("given", "asked", "reads"), [(None, "own", False), (None, "any", True), ("0", "own", True), ("1", "any", False)]
)
def test_backends_are_its_own(given, asked, reads):
    """Installed distributions are not read, but where the user has it so."""
    pytest.importorskip("triton")
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_BACKENDS_IN_TREE"}
    environment |= {} if given is None else {"TRITON_BACKENDS_IN_TREE": given}
    command = [sys.executable, "-c", IMPORT, asked]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert ("all distributions are read" in done.stderr) == reads
    assert (done.returncode != 0) == reads
