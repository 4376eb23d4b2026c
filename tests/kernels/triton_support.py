"""Triton kernels without a GPU: interpreted in a process of their own, or compiled for Hopper as a launch would."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def run_interpreted(call: str) -> None:
    """Run `module:function` with kernels interpreted: triton reads the switch when it is imported."""
    module, function = call.split(":")
    code = (
        "from tests.kernels.triton_support import take_scalars_as_bounds; take_scalars_as_bounds(); "
        f"from {module} import {function}; {function}()"
    )
    path = os.pathsep.join([str(ROOT), str(ROOT / "kernels")])
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": path}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def take_scalars_as_bounds() -> None:
    """Let the interpreter use a loaded scalar as the bound of a loop, which numpy ≥ 2.4 refuses: it has one axis."""
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def patched(tensor, scope):
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patched
