"""Tensor maps: how the tensor memory accelerator (sm_90 on) copies boxes of a tensor to shared memory and back."""

import ctypes
from collections.abc import Sequence
from ctypes import c_uint32, c_uint64

import torch

from bladellm_kernels.cuda_kernel import DriverLibrary, driver_library

DATA_TYPES = {torch.uint8: 0, torch.float16: 6, torch.float32: 7, torch.bfloat16: 9}
"""CUtensorMapDataType."""

SWIZZLES = {0: 0, 32: 1, 64: 2, 128: 3}
"""CUtensorMapSwizzle by the bytes within which pieces of 16 change places."""

PROMOTIONS = {0: 0, 64: 1, 128: 2, 256: 3}
"""CUtensorMapL2promotion by bytes."""

BYTES, ALIGNMENT = 128, 64
"""Of a map."""

MIN_RANK, MAX_RANK = 2, 5
MAX_SIZE, MAX_STRIDE, MAX_BOX = 1 << 32, 1 << 40, 256
PIECE = 16
"""Bytes that addresses, strides and rows of boxes are multiples of."""


class TensorMap(ctypes.Structure):
    """CUtensorMap: opaque; an argument of a kernel as `const __grid_constant__`."""

    _fields_ = (("data", c_uint64 * (BYTES // 8)),)


def tensor_map(
    pointer: int,
    dtype: torch.dtype,
    sizes: Sequence[int],
    strides_in_bytes: Sequence[int],
    box: Sequence[int],
    swizzle: int = 128,
    promotion: int = 256,
    driver: DriverLibrary | None = None,
) -> TensorMap:
    """The map of a tensor of 2 to 5 dimensions, the fastest first, whose numbers lie one after another.

    pointer: of its first number; sizes: numbers; strides_in_bytes: of the dimensions but the first; box: numbers that a
    copy takes along each, the first as many as swizzle has bytes; swizzle: 0, 32, 64 or 128; promotion: bytes that L2
    reads at once, as many, 256 too. What a box has outside of the tensor is read as zeros. The tensor must stay.

    Raises ValueError that says what of it cannot be mapped, OSError without a driver, RuntimeError with its error.
    """
    _check(pointer, dtype, sizes, strides_in_bytes, box, swizzle, promotion)
    memory = ctypes.create_string_buffer(BYTES + ALIGNMENT)
    made = TensorMap.from_buffer(memory, -ctypes.addressof(memory) % ALIGNMENT)
    rank, none = len(sizes), 0
    (driver or driver_library()).call(
        *("cuTensorMapEncodeTiled", ctypes.addressof(made), DATA_TYPES[dtype], rank, pointer),
        *((c_uint64 * rank)(*sizes), (c_uint64 * (rank - 1))(*strides_in_bytes)),
        *((c_uint32 * rank)(*box), (c_uint32 * rank)(*(1,) * rank)),
        *(none, SWIZZLES[swizzle], PROMOTIONS[promotion], none),
    )
    return made


def _check(
    pointer: int,
    dtype: torch.dtype,
    sizes: Sequence[int],
    strides: Sequence[int],
    box: Sequence[int],
    swizzle: int,
    promotion: int,
) -> None:
    """Raises ValueError for what the driver would only call an invalid value."""
    for what, given, known in (
        *(("type", dtype, DATA_TYPES), ("swizzle", swizzle, SWIZZLES), ("promotion", promotion, PROMOTIONS)),
    ):
        if given not in known:
            raise ValueError(f"tensor maps have no {what} {given}, only {', '.join(map(str, known))}")
    rank = len(sizes)
    if not MIN_RANK <= rank <= MAX_RANK or len(strides) != rank - 1 or len(box) != rank:
        raise ValueError(
            f"{rank} sizes, {len(strides)} strides and a box of {len(box)}: a tensor map has {MIN_RANK} to {MAX_RANK} "
            "dimensions, and strides of all but the first"
        )
    if pointer % PIECE or pointer <= 0:
        raise ValueError(f"address {pointer:#x} is not a multiple of {PIECE}")
    if any(stride % PIECE or not 0 <= stride < MAX_STRIDE for stride in strides):
        raise ValueError(f"strides {tuple(strides)} are not multiples of {PIECE} bytes below {MAX_STRIDE}")
    if not all(1 <= size <= MAX_SIZE for size in sizes):
        raise ValueError(f"sizes {tuple(sizes)} are not between 1 and {MAX_SIZE}")
    if not all(1 <= length <= MAX_BOX for length in box):
        raise ValueError(f"box {tuple(box)} is not between 1 and {MAX_BOX} along each dimension")
    inner = box[0] * dtype.itemsize
    if inner != swizzle if swizzle else inner % PIECE:
        wanted = f"{swizzle}, the bytes of the swizzle" if swizzle else f"a multiple of {PIECE}"
        raise ValueError(f"box {tuple(box)} has rows of {inner} bytes, not {wanted}")
