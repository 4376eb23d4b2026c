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


def threads_of(groups: int, producer_warps: int = 1) -> int:
    """Of a CTA: consumers, and warps that fetch."""
    return 4 * _WARP * groups + producer_warps * _WARP


def has_registers(tokens: int, groups: int, producer_warps: int = 1, others: int = 0) -> bool:
    """Whether threads can keep their sums and others in registers, which are dealt out to as many warps in each of four
    parts."""
    warps = -(-threads_of(groups, producer_warps) // _WARP)
    most = _REGISTERS // _WARP // (-(-warps // _WARPS_APART) * _WARPS_APART) // 8 * 8
    return tokens // 2 + others + _OTHER_REGISTERS <= min(most, _MOST_REGISTERS)


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
    return f"""// sums += 64 rows of the weight · {tokens} rows of x, of 16 inputs.
__device__ void multiply_add(float (&sums)[{count}], unsigned long long weight, unsigned long long x) {{
{_product(tokens, dtype, f"%{count}, %{count + 1}, adds, 1, 1, 0, 0")}
        : "l"(weight), "l"(x));
}}

"""


@cache
def held_product_text(tokens: int, dtype: torch.dtype) -> str:
    """`multiply_add_held`: the same of rows of the weight that warps hold in registers, as the instruction has them."""
    count = tokens // 2
    held = ", ".join(f"%{count + place}" for place in range(4))
    return f"""// sums += 64 rows of the weight, in each thread four pairs of inputs, · {tokens} rows of x.
__device__ void multiply_add_held(
    float (&sums)[{count}], unsigned a, unsigned b, unsigned c, unsigned d, unsigned long long x) {{
{_product(tokens, dtype, f"{{{held}}}, %{count + 4}, adds, 1, 1, 0")}
        : "r"(a), "r"(b), "r"(c), "r"(d), "l"(x));
}}

"""


def _product(tokens: int, dtype: torch.dtype, operands: str) -> str:
    """The instruction and its sums."""
    registers = ", ".join(f"%{place}" for place in range(tokens // 2))
    sums = ", ".join(f'"+f"(sums[{place}])' for place in range(tokens // 2))
    name = f"wgmma.mma_async.sync.aligned.m64n{tokens}k16.f32.{TYPES[dtype]}.{TYPES[dtype]}"
    return f"""    asm volatile(
        "{{\\n"
        ".reg .pred adds;\\n"
        "setp.eq.b32 adds, 0, 0;\\n"
        "{name} "
        "{{{registers}}}, {operands};\\n"
        "}}\\n"
        : {sums}"""
