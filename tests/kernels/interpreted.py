"""Test functions called where Triton's kernels are interpreted, on a CPU."""

import os
from pathlib import Path

from tests.support.warm import ROOT, run_code


def run_interpreted(module: str, function: str, *folders: Path) -> None:
    """Call a function of a test module in a process of its own: triton reads the switch when it is imported.

    folders: where that function finds modules, besides the repository's own.
    """
    code = (
        "from tests.kernels import interpreted; interpreted.take_scalars_as_bounds(); interpreted.patch_once(); "
        f"from {module} import {function}; {function}()"
    )
    path = os.pathsep.join(map(str, (ROOT, ROOT / "kernels", *folders)))
    done = run_code(code, TRITON_INTERPRET="1", PYTHONPATH=path)
    assert done.returncode == 0, done.stderr


def take_scalars_as_bounds() -> None:
    """Let the interpreter use a loaded scalar as the bound of a loop, which numpy ≥ 2.4 refuses: it has one axis."""
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def patched(tensor, scope):
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patched


def patch_once() -> None:
    """Let the interpreter make its changes to triton's language for good, not for the time of every call.

    It goes through all of the language before and after each function that a kernel calls: that takes longer than most
    of them. No code of these processes needs the language as it was.
    """
    from triton.runtime import interpreter

    patch, patched = interpreter._patch_lang, set()

    def patch_new(fn):
        module = id(fn.__globals__)
        if module not in patched:
            patched.add(module)
            patch(fn)
        return interpreter._LangPatchScope()

    interpreter._patch_lang = patch_new
