"""Test functions called where Triton's kernels are interpreted, on a CPU."""

import gc
import os
from pathlib import Path

from tests.support.warm import ROOT, run_code

PREPARE = "from tests.kernels import interpreted; interpreted.prepare(); "
"""Code before all other of a process that interprets kernels."""


def run_interpreted(module: str, function: str, *folders: Path) -> None:
    """Call a function of a test module in a process of its own: triton reads the switch when it is imported.

    folders: where that function finds modules, besides the repository's own.
    """
    code = f"{PREPARE}from {module} import {function}; {function}()"
    path = os.pathsep.join(map(str, (ROOT, ROOT / "kernels", *folders)))
    done = run_code(code, TRITON_INTERPRET="1", PYTHONPATH=path)
    assert done.returncode == 0, done.stderr


def prepare() -> None:
    """Make the interpreter work with any numpy, and as fast as it can."""
    take_scalars_as_bounds()
    patch_once()
    know_types()
    describe_tuples_late()
    # It makes many small objects, which hardly ever refer to each other.
    gc.freeze()
    gc.set_threshold(200_000, 50, 100)


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


def know_types() -> None:
    """Let the interpreter make the table of numpy's types once, not for each thing that it looks up in it."""
    from triton.language import block_type, pointer_type
    from triton.runtime import interpreter

    look_up, known = interpreter._get_np_dtype, {}

    def looked_up(kind):
        scalar = kind.element_ty if isinstance(kind, block_type) else kind
        if isinstance(scalar, pointer_type):
            return look_up(scalar)
        if scalar.name not in known:
            known[scalar.name] = look_up(scalar)
        return known[scalar.name]

    interpreter._get_np_dtype = looked_up


def describe_tuples_late() -> None:
    """Let triton's language make the type of a tuple when it is asked for: hardly ever, and each shape is a tuple."""
    from triton.language import core

    def kind(self):
        if not isinstance(self.kind, core.tuple_type):
            self.kind = core._type_for_tuple_values(self.values) if self.kind is None else core.tuple_type(self.kind)
        return self.kind

    def set_kind(self, value):
        self.kind = value

    def init(self, args, type=None):
        self.values = [*args]
        self.kind = type

    core.tuple.type, core.tuple.__init__ = property(kind, set_kind), init
