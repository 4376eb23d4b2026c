"""A kernel compiled once is found in triton's cache by every later process."""

import importlib
import os
import pkgutil
import sys

import bladellm_kernels
import pytest
from triton.runtime.jit import JITFunction

from tests.support.warm import run_code

HASHES = """
import importlib, random, pkgutil
import bladellm_kernels
chance = random.Random({seed})
modules = [module.name for module in pkgutil.iter_modules(bladellm_kernels.__path__, "bladellm_kernels.")]
chance.shuffle(modules)
kept = [[importlib.import_module(name), *(object() for _ in range(chance.randrange(5000)))] for name in modules]
from bladellm_runtime.engine.kernel_record import make_hashes_reproducible
from tests.kernels.test_cache_hashes import our_functions

make_hashes_reproducible()
make_hashes_reproducible()
functions = our_functions()
names = list(functions)
chance.shuffle(names)
hashes = {{name: functions[name].cache_key for name in names}}
print("\\n".join(f"{{name}} {{hashes[name]}}" for name in sorted(names)))
"""


def our_functions() -> dict[str, JITFunction]:
    """Every function of the kernels package that triton compiles, by module and name."""
    functions = {}
    for module in pkgutil.iter_modules(bladellm_kernels.__path__, "bladellm_kernels."):
        for thing in vars(importlib.import_module(module.name)).values():
            if isinstance(thing, JITFunction):
                functions[f"{thing.__module__}:{thing.__qualname__}"] = thing
    return functions


@pytest.mark.turns("compiled kernels")
def test_hashes_depend_neither_on_order_nor_on_addresses():
    """Triton sorts constants of one name by address: those that one kernel reaches must be equal."""
    path = os.pathsep.join(sys.path)
    # Modules are imported in other orders, with other things between: nothing lies where it lies in the first.
    text, other = (run_code(HASHES.format(seed=seed), PYTHONPATH=path).stdout for seed in range(2))
    assert len(text.splitlines()) > 50
    assert other == text
    for name, function in our_functions().items():
        assert function.cache_key
        values: dict[str, str] = {}
        for (constant, _), (value, _) in function.used_global_vals.items():
            assert values.setdefault(constant, str(value)) == str(value), f"{name} reaches two different {constant}"
