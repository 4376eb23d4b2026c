"""Whether the Triton kernels can be used; apart from them, since not every host has triton and importing it is slow."""

from functools import cache
from importlib.util import find_spec


@cache
def has_triton() -> bool:
    """Whether triton is installed."""
    return find_spec("triton") is not None
