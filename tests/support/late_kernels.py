"""That engines of this process compile no kernel after they are ready."""

from collections.abc import Iterator
from contextlib import contextmanager

from bladellm_runtime.engine.kernel_compiles import KERNEL_COMPILES


@contextmanager
def no_late_kernels() -> Iterator[None]:
    """Meanwhile: kernels are counted for the whole process, in which other engines may have had late ones before."""
    before = list(KERNEL_COMPILES.late_names)
    yield
    assert KERNEL_COMPILES.late_names == before
