"""What linear layers on a Hopper in CUDA C++ have in common: their texts' first part, registers, maps of matrices."""

from collections.abc import Sequence
from functools import cache
from pathlib import Path

import torch

from bladellm_kernels.hopper_device import on_hopper
from bladellm_kernels.tensor_map import TensorMap, tensor_map

TYPES = {torch.bfloat16: "bf16", torch.float16: "f16"}
"""Of matrices, by their names in instructions."""
SHARED_BYTES = 232448
"""Most shared memory of a CTA on a Hopper."""
GROUP_ROWS, STEP_INPUTS, ROW_BYTES = 64, 64, 128
"""Rows of the weight of a consumer warpgroup; inputs of a copy, and their bytes."""

_WARP = 32
_REGISTERS, _MOST_REGISTERS, _WARPS_APART = 65536, 255, 4
_OTHER_REGISTERS = 28
"""What a thread has beside its sums."""


def threads_of(groups: int) -> int:
    """Of a CTA: consumers, and a warp that fetches."""
    return 4 * _WARP * groups + _WARP


def has_registers(tokens: int, groups: int) -> bool:
    """Whether threads can keep their sums in registers, which are dealt out to as many warps in each of four parts."""
    warps = -(-threads_of(groups) // _WARP)
    most = _REGISTERS // _WARP // (-(-warps // _WARPS_APART) * _WARPS_APART) // 8 * 8
    return tokens // 2 + _OTHER_REGISTERS <= min(most, _MOST_REGISTERS)


def kernel_text(paths: Sequence[Path], tokens: int, dtype: torch.dtype) -> str:
    """The text of the kernel in some files, behind what it uses, for tiles of so many rows of x."""
    return _product_text(tokens, dtype) + "".join(map(_read, (Path(__file__).with_suffix(".cu"), *paths)))


def mapped(matrix: torch.Tensor, box_rows: int, box_columns: int = STEP_INPUTS) -> TensorMap:
    """Boxes of so many rows and columns, swizzled within a box's row: of 32, 64 or 128 bytes."""
    rows, columns = matrix.shape
    # The stride of a single row is never used, but must be whole 16 bytes.
    stride = matrix.stride(0) if rows > 1 else -(-columns // 8) * 8
    box, swizzle = (box_columns, box_rows), 2 * box_columns
    return tensor_map(matrix.data_ptr(), matrix.dtype, (columns, rows), (2 * stride,), box, swizzle=swizzle)


def matrices_fit(
    x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, residual: torch.Tensor | None = None
) -> bool:
    """Whether kernels of linear layers can read and write them: on the current device, a Hopper, of one half precision,
    rows at whole 16 bytes."""
    given = [x, weight, out] if residual is None else [x, weight, out, residual]
    if not on_hopper(x) or x.dtype not in TYPES or any(matrix.dtype != x.dtype for matrix in given):
        return False
    if torch._C._cuda_getDevice() != x.get_device():
        return False
    return len(x) > 0 and out.shape[1] % 8 == 0 and all(_lies_well(matrix) for matrix in given)


def _lies_well(matrix: torch.Tensor) -> bool:
    """Whether its rows, some numbers each, begin at whole 16 bytes."""
    aligned = matrix.data_ptr() % 16 == 0 and (len(matrix) == 1 or matrix.stride(0) % 8 == 0)
    return aligned and matrix.numel() > 0 and matrix.stride(1) == 1


@cache
def _read(path: Path) -> str:
    return path.read_text()


@cache
def _product_text(tokens: int, dtype: torch.dtype) -> str:
    """`multiply_add` of so many columns: the instruction names each of its registers."""
    count = tokens // 2
    registers = ", ".join(f"%{place}" for place in range(count))
    sums = ", ".join(f'"+f"(sums[{place}])' for place in range(count))
    name = f"wgmma.mma_async.sync.aligned.m64n{tokens}k16.f32.{TYPES[dtype]}.{TYPES[dtype]}"
    return f"""// sums += 64 rows of the weight · {tokens} rows of x, of 16 inputs.
__device__ void multiply_add(float (&sums)[{count}], unsigned long long weight, unsigned long long x) {{
    asm volatile(
        "{{\\n"
        ".reg .pred adds;\\n"
        "setp.eq.b32 adds, 0, 0;\\n"
        "{name} "
        "{{{registers}}}, %{count}, %{count + 1}, adds, 1, 1, 0, 0;\\n"
        "}}\\n"
        : {sums}
        : "l"(weight), "l"(x));
}}

"""
