"""Whether the Triton kernels can be used, and how Triton is imported; apart from them, since not every host has it and
importing it is slow."""

import os
from functools import cache
from importlib.util import find_spec
from pathlib import Path


@cache
def has_triton() -> bool:
    """Whether triton is installed."""
    return find_spec("triton") is not None


def use_own_backends() -> None:
    """Have Triton, when it is imported, take the backends that came with it, unless its user says otherwise.

    It looks for others among all installed distributions, whose files it reads one by one: of 218 on a slow disk that
    is 1.2 s of the 1.3 that importing it takes.
    """
    spec = find_spec("triton")
    folders = [] if spec is None else spec.submodule_search_locations or []
    if any((Path(folder) / "backends" / "nvidia").is_dir() for folder in folders):
        os.environ.setdefault("TRITON_BACKENDS_IN_TREE", "1")
