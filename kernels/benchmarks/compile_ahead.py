"""Compile the CUDA C++ kernels of a benchmark's candidates side by side, before each of them asks for its own."""

import os
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor

from bladellm_kernels.cuda_compiler import compile_cuda

Source = tuple[str, Mapping[str, int | str]]
"""A text and the values of its macros."""


def compile_ahead(sources: Iterable[Source], name: str) -> None:
    """Keep the cubins of all sources on disk, where `compile_cuda` of the same name finds them."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(lambda source: compile_cuda(*source, name=name), sources))
