"""Kernels of `cuda_compiler` on a GPU, launched with clusters, early or in a captured graph; by the driver's functions.

A launch goes through ctypes with structures that are filled beforehand: `CudaKernel.prepare` does the work, and
`PreparedLaunch.run` is one call. The values of `cuda.h` (CUDA 13) are those in use.
"""

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from ctypes import (
    POINTER,
    addressof,
    byref,
    c_char,
    c_char_p,
    c_float,
    c_int,
    c_int32,
    c_int64,
    c_size_t,
    c_uint32,
    c_uint64,
    c_void_p,
    sizeof,
)
from enum import IntEnum
from functools import cache
from typing import Any

import torch

MAX_CLUSTER, MAX_PORTABLE_CLUSTER = 16, 8
MAX_THREADS = 1024
MAX_LAUNCHES = 4096

INVALID_VALUE = 1
"""CUresult, CUDA_ERROR_INVALID_VALUE."""


class LaunchAttributeId(IntEnum):
    """CUlaunchAttributeID."""

    CLUSTER_DIMENSION = 4
    PROGRAMMATIC_STREAM_SERIALIZATION = 6


class FunctionAttribute(IntEnum):
    """CUfunction_attribute."""

    MAX_DYNAMIC_SHARED_SIZE_BYTES = 8
    PREFERRED_SHARED_MEMORY_CARVEOUT = 9
    NON_PORTABLE_CLUSTER_SIZE_ALLOWED = 14


class LaunchAttributeValue(ctypes.Union):
    """CUlaunchAttributeValue: blocks of a cluster along x, y and z, or whether a launch is early."""

    _fields_ = (("cluster", c_uint32 * 3), ("early", c_int), ("whole", c_uint64 * 8))


class LaunchAttribute(ctypes.Structure):
    """CUlaunchAttribute."""

    _fields_ = (("id", c_int), ("pad", c_char * 4), ("value", LaunchAttributeValue))


class LaunchConfig(ctypes.Structure):
    """CUlaunchConfig; grid in blocks, block in threads, shared in bytes."""

    _fields_ = (
        ("grid", c_uint32 * 3),
        ("block", c_uint32 * 3),
        ("shared", c_uint32),
        ("stream", c_void_p),
        ("attributes", POINTER(LaunchAttribute)),
        ("attribute_count", c_uint32),
    )


SIGNATURES: dict[str, tuple[type, ...]] = {
    "cuInit": (c_uint32,),
    "cuGetErrorName": (c_int, POINTER(c_char_p)),
    "cuDeviceGet": (POINTER(c_int), c_int),
    "cuDevicePrimaryCtxRetain": (POINTER(c_void_p), c_int),
    "cuCtxPushCurrent_v2": (c_void_p,),
    "cuCtxPopCurrent_v2": (POINTER(c_void_p),),
    "cuModuleLoadData": (POINTER(c_void_p), c_char_p),
    "cuModuleGetFunction": (POINTER(c_void_p), c_void_p, c_char_p),
    "cuFuncSetAttribute": (c_void_p, c_int, c_int),
    "cuFuncLoad": (c_void_p,),
    # Function, number of the parameter, its offset, its bytes.
    "cuFuncGetParamInfo": (c_void_p, c_size_t, POINTER(c_size_t), POINTER(c_size_t)),
    # Configuration, function, addresses of the arguments, other ways to pass them.
    "cuLaunchKernelEx": (c_void_p, c_void_p, c_void_p, c_void_p),
    # Target, source, bytes, stream.
    "cuMemcpyHtoDAsync_v2": (c_uint64, c_void_p, c_size_t, c_void_p),
    "cuMemcpyDtoHAsync_v2": (c_void_p, c_uint64, c_size_t, c_void_p),
    # Map, type, rank, tensor, sizes, strides, box, steps in it, interleaving, swizzle, promotion, what is outside.
    "cuTensorMapEncodeTiled": (c_void_p, c_int, c_uint32, c_void_p, *(c_void_p,) * 4, *(c_int,) * 4),
}
"""Arguments of the functions in use; all of them return a status, 0 where it went well."""


class DriverLibrary:
    """The functions of libcuda that kernels, tensor maps and copies take."""

    def __init__(self, functions: Any) -> None:
        """functions: as `ctypes.CDLL` has them. Raises AttributeError where one is missing."""
        self.functions = functions
        for name, arguments in SIGNATURES.items():
            function = getattr(functions, name)
            function.argtypes, function.restype = arguments, c_int

    def call(self, name: str, *arguments: object) -> None:
        """Call a function by its name. Raises RuntimeError with the name of its error."""
        self.check(name, getattr(self.functions, name)(*arguments))

    def check(self, name: str, status: int) -> None:
        """Raises RuntimeError unless the status is 0."""
        if status:
            error = c_char_p()
            self.functions.cuGetErrorName(status, byref(error))
            raise RuntimeError(f"{name}: {error.value.decode() if error.value else status}")


@cache
def driver_library() -> DriverLibrary:
    """The driver of this machine. Raises OSError where there is none, or one from before CUDA 12.4."""
    try:
        library = DriverLibrary(ctypes.CDLL("libcuda.so.1"))
    except AttributeError as error:
        raise OSError(f"the CUDA driver is too old: {error}") from error
    library.call("cuInit", 0)
    return library


class CudaKernel:
    """A kernel of a cubin on one device. It stays loaded for the life of the process: captured graphs may hold it.

    parameters: bytes of each. Like Triton's kernels that start early it prefers shared memory to L1 cache: only where
    both want the same can one start beside the end of the other.
    """

    def __init__(
        self, cubin: bytes, name: str, device: torch.device | int, driver: DriverLibrary | None = None
    ) -> None:
        """device: with an index, or its index. Make it before a graph is captured.

        Raises OSError without a driver, RuntimeError where the cubin is not for the device or has no such kernel.
        """
        self.name, self.driver = name, driver or driver_library()
        self.index = device if isinstance(device, int) else device.index
        self._shared, self._cluster = 0, 1
        handle, context, module, function = c_int(), c_void_p(), c_void_p(), c_void_p()
        self.driver.call("cuDeviceGet", byref(handle), self.index)
        # torch's own context, held for good: a thread that has not used the device yet has none.
        self.driver.call("cuDevicePrimaryCtxRetain", byref(context), handle)
        self._context = context.value
        with self._in_context():
            self.driver.call("cuModuleLoadData", byref(module), cubin)
            self.driver.call("cuModuleGetFunction", byref(function), module, name.encode())
            self.function = function.value
            self._set(FunctionAttribute.PREFERRED_SHARED_MEMORY_CARVEOUT, 100)
            # Not at the first launch, which may be one that waits for others or is being captured.
            self.driver.call("cuFuncLoad", self.function)
            self.parameters = self._read_parameters()

    def prepare(
        self, grid: tuple[int, int, int], threads: int, shared: int, cluster: int, early: bool, *arguments: Any
    ) -> "PreparedLaunch":
        """A launch to `run` any number of times.

        grid: blocks; threads: of a block; shared: bytes of dynamic shared memory of a block; cluster: blocks along x
        that share theirs; early: the kernel calls `griddepcontrol.wait` before it reads what others wrote and before it
        writes, and may start while the one before it runs. arguments: tensors for their addresses, addresses, numbers
        of 32 bits, tensor maps and other values of ctypes, each as large as the kernel's parameter; memory at addresses
        is the caller's to keep, and values of ctypes are read at each launch.

        Raises ValueError for what no kernel can be launched with, RuntimeError for more than the device has.
        """
        _check_shape(grid, threads, cluster)
        if len(arguments) != len(self.parameters):
            raise ValueError(f"{self.name} takes {len(self.parameters)} arguments, not {len(arguments)}")
        values = [_value(given, size) for given, size in zip(arguments, self.parameters, strict=True)]
        self._allow(shared, cluster)
        attributes = []
        if cluster > 1:
            dimension = LaunchAttributeValue(cluster=(cluster, 1, 1))
            attributes.append(LaunchAttribute(LaunchAttributeId.CLUSTER_DIMENSION, b"", dimension))
        if early:
            serialized = LaunchAttributeValue(early=1)
            attributes.append(LaunchAttribute(LaunchAttributeId.PROGRAMMATIC_STREAM_SERIALIZATION, b"", serialized))
        listed = (LaunchAttribute * len(attributes))(*attributes)
        config = LaunchConfig(grid, (threads, 1, 1), shared, None, listed, len(attributes))
        return PreparedLaunch(self, config, values)

    def _allow(self, shared: int, cluster: int) -> None:
        """Tell the driver of the most shared memory and of the largest clusters so far."""
        if shared <= self._shared and cluster <= max(self._cluster, MAX_PORTABLE_CLUSTER):
            return
        with self._in_context():
            if shared > self._shared:
                self._set(FunctionAttribute.MAX_DYNAMIC_SHARED_SIZE_BYTES, shared)
                self._shared = shared
            if cluster > MAX_PORTABLE_CLUSTER:
                self._set(FunctionAttribute.NON_PORTABLE_CLUSTER_SIZE_ALLOWED, 1)
                self._cluster = MAX_CLUSTER

    def _set(self, attribute: FunctionAttribute, value: int) -> None:
        self.driver.call("cuFuncSetAttribute", self.function, attribute, value)

    def _read_parameters(self) -> tuple[int, ...]:
        sizes: list[int] = []
        offset, size = c_size_t(), c_size_t()
        read = self.driver.functions.cuFuncGetParamInfo
        while (status := read(self.function, len(sizes), byref(offset), byref(size))) == 0:
            sizes.append(size.value)
        if status != INVALID_VALUE:  # which says that there are no more
            self.driver.check("cuFuncGetParamInfo", status)
        return tuple(sizes)

    @contextmanager
    def _in_context(self) -> Iterator[None]:
        self.driver.call("cuCtxPushCurrent_v2", self._context)
        try:
            yield
        finally:
            self.driver.call("cuCtxPopCurrent_v2", byref(c_void_p()))


class PreparedLaunch:
    """A launch with everything that it takes but the stream; by one thread at a time. `CudaKernel.prepare` makes it."""

    def __init__(self, kernel: CudaKernel, config: LaunchConfig, values: list[Any]) -> None:
        """values: of ctypes, as large as the kernel's parameters."""
        self.kernel, self._config, self._values = kernel, config, values
        self._parameters = (c_void_p * len(values))(*(addressof(value) for value in values))
        self._launch, self._index = kernel.driver.functions.cuLaunchKernelEx, kernel.index
        self._given = (addressof(config), kernel.function, addressof(self._parameters), None)

    def run(self) -> None:
        """Launch on the current stream of the device, which is torch's current one and has been used in this thread.

        Raises RuntimeError with the driver's error. While a graph is captured the launch becomes part of it, with the
        arguments as they are now.
        """
        self._config.stream = torch._C._cuda_getCurrentRawStream(self._index)
        status = self._launch(*self._given)
        if status:
            self.kernel.driver.check(f"launch of {self.kernel.name}", status)


class KeptLaunches(dict[tuple[object, ...], PreparedLaunch | None]):
    """Launches by what they are for, the addresses among it; None where a kernel does not do it. With more than `most`
    of them all are made anew."""

    def __init__(self, most: int = MAX_LAUNCHES) -> None:
        super().__init__()
        self._most = most

    def __setitem__(self, key: tuple[object, ...], launch: PreparedLaunch | None) -> None:
        if len(self) >= self._most and key not in self:
            self.clear()
        super().__setitem__(key, launch)

    def run(self, key: tuple[object, ...], prepare: Callable[[], PreparedLaunch | None]) -> bool:
        """Run the launch of a key, prepared if there is none yet. Whether a kernel does it."""
        try:
            launch = self[key]
        except KeyError:
            launch = self[key] = prepare()
        if launch is None:
            return False
        launch.run()
        return True


def _check_shape(grid: tuple[int, int, int], threads: int, cluster: int) -> None:
    """Raises ValueError where no kernel can be launched so."""
    if not 1 <= cluster <= MAX_CLUSTER:
        raise ValueError(f"clusters have 1 to {MAX_CLUSTER} blocks, not {cluster}")
    if min(grid) < 1 or grid[0] % cluster:
        raise ValueError(f"a grid of {grid} blocks is not one of whole clusters of {cluster}")
    if not 1 <= threads <= MAX_THREADS:
        raise ValueError(f"blocks have 1 to {MAX_THREADS} threads, not {threads}")


def _value(given: Any, size: int) -> Any:
    """A ctypes value of so many bytes, of its own or the given one. Raises ValueError where it does not fit."""
    if isinstance(given, torch.Tensor):
        given = c_void_p(given.data_ptr())
    elif isinstance(given, int):
        bits = 8 * size
        if size not in (4, 8) or not -(1 << (bits - 1)) <= given < 1 << bits:
            raise ValueError(f"{given} is no argument for a parameter of {size} bytes")
        given = c_int32(given) if size == 4 else c_int64(given)
    elif isinstance(given, float):
        given = c_float(given)
    if sizeof(given) != size:
        raise ValueError(f"an argument of {sizeof(given)} bytes is given for a parameter of {size}")
    return given
