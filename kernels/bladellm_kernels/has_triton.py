"""Whether the Triton kernels can be used; apart from them, since importing triton takes long and not every host has it."""

from functools import cache
from importlib.util import find_spec


@cache
def has_triton() -> bool:
    """Whether triton is installed."""
    return find_spec("triton") is not None
