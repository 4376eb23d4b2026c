"""Decode attention of 4-bit KV on a Hopper, by warps that each have a ring of their own.

`warp_rings.cu` is the kernel, behind its parts: it leaves out what makes the warps of `ring_decode_hopper.py` wait for
one another. Plans, segments and partial states are the same, and so is the merge behind it.
"""

import ctypes
import warnings
from ctypes import c_float, c_int, c_void_p
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from bladellm_kernels.cuda_compiler import compile_cuda
from bladellm_kernels.cuda_kernel import CudaKernel, KeptLaunches
from bladellm_kernels.decode_call import DecodeCall
from bladellm_kernels.decode_launch import register_limit
from bladellm_kernels.decode_shape import DecodeShape
from bladellm_kernels.early_launch import early_launch
from bladellm_kernels.hopper_device import on_hopper
from bladellm_kernels.hopper_parts import SHARED_BYTES
from bladellm_kernels.merge_attention_triton import MERGE_REGISTERS

FORMATS = ("int4", "int4_affine")
WARPS, BLOCK_KV, HEAD_DIM, MAX_GROUP = 4, 128, 128, 8
MIN_STAGES = 2

_THREADS = 32 * WARPS
_TOKEN_BYTES = 128
"""Of a key and a value."""
_PIECE_BYTES = 16
"""That a thread copies at once."""
_MOST_REGISTERS = 255
_TYPES = (torch.bfloat16, torch.float16)
_SOURCE = Path(__file__).with_suffix(".cu")
PARTS = "warp_instructions.cu", "warp_lane.cu", "warp_memory.cu", "warp_blocks.cu", "warp_rings.cu"
"""Files of the kernel's text, in this order."""

_launches = KeptLaunches()


class Problem(ctypes.Structure):
    """The kernel's argument, by its names."""

    _fields_ = (
        *((name, c_void_p) for name in ("q", "payload", "scales", "table", "base_rows", "slots", "kv_lens")),
        *((name, c_void_p) for name in ("programs", "sequences", "out", "partial", "lse")),
        *((name, c_int) for name in ("q_token_stride", "q_head_stride", "out_token_stride", "out_head_stride")),
        *((name, c_int) for name in ("head_bytes", "value_bytes", "granule_bytes")),
        *((name, c_int) for name in ("scale_head_bytes", "scale_value_bytes", "scale_plane_bytes")),
        *((name, c_int) for name in ("table_stride", "settled")),
        ("scale", c_float),
    )


@dataclass(frozen=True, slots=True)
class RingPlan:
    """What the kernel is compiled for; registers: most of a thread."""

    stages: int
    registers: int
    affine: bool
    half: bool
    kv_heads: int
    group: int
    granule_tokens: int
    row_bytes: int

    @property
    def shared_bytes(self) -> int:
        """Of a CTA: the rings of its warps, in which they leave their states, too."""
        factors = (4 if self.affine else 2) * 2
        return self.stages * BLOCK_KV * (_TOKEN_BYTES + factors)


def takes(call: DecodeCall, shape: DecodeShape) -> bool:
    """Whether the kernel can do it, and there is a compiler for it: `fits` on the current device, a Hopper."""
    if not (on_hopper(call.q) and torch._C._cuda_getDevice() == call.q.get_device() and fits(call, shape)):
        return False
    return _kernel(ring_plan(call, shape), call.q.get_device()) is not None


def fits(call: DecodeCall, shape: DecodeShape) -> bool:
    """Whether schedule, sizes and places are what the kernel is for."""
    schedule, work = call.work.schedule, call.work
    if not schedule.private_rings or schedule.idle_ns or schedule.stay_ns or call.q.dtype not in _TYPES:
        return False
    if shape.format not in FORMATS or shape.head_dim != HEAD_DIM or shape.query_len != 1 or shape.group > MAX_GROUP:
        return False
    if shape.windowed or shape.paged or not shape.one_granule or work.reads != "all" or call.scale <= 0:
        return False
    divided = (shape.block_kv, shape.warps, shape.lane_heads) == (BLOCK_KV, WARPS, 1)
    plan = ring_plan(call, shape)
    if not divided or schedule.stages < MIN_STAGES or plan.shared_bytes > SHARED_BYTES:
        return False
    return _lies_well(call)


def ring_plan(call: DecodeCall, shape: DecodeShape) -> RingPlan:
    schedule = call.work.schedule
    beside = MERGE_REGISTERS if schedule.merge_beside else 0
    registers = register_limit(_THREADS * schedule.ctas_per_sm, beside).get("maxnreg", _MOST_REGISTERS)
    half = call.q.dtype == torch.float16
    row_bytes = call.kv.payload.stride(0)
    return RingPlan(
        schedule.stages, registers, shape.affine, half, shape.kv_heads, shape.group, shape.granule_tokens, row_bytes
    )


def launch(call: DecodeCall, shape: DecodeShape) -> bool:
    """The outputs of sequences that are one segment, and the states of the others' segments: False, as in
    `launch_segments`, as a kernel behind has to merge them. The first launch of a plan compiles the kernel: not while a
    graph is captured."""
    early = early_launch(call.q.device)["EARLY"]
    plan, grid = ring_plan(call, shape), len(call.work.programs) * shape.kv_heads
    given = arguments(call, early and call.work.used)
    key = (plan, grid, early, call.q.get_device(), given)
    prepared = _launches.get(key)
    if prepared is None:
        kernel = _kernel(plan, call.q.get_device())
        if kernel is None:
            raise RuntimeError("the kernel does not take this: ask `takes` first")
        prepared = kernel.prepare((grid, 1, 1), _THREADS, plan.shared_bytes, 1, early, Problem(*given))
        _launches[key] = prepared
    prepared.run()
    # It let the next kernel start only when its own inputs, the plan among them, were complete.
    call.work.used = True
    return False


def arguments(call: DecodeCall, settled: bool) -> tuple[int | float | None, ...]:
    """The fields of `Problem`. settled: the plan can be read before the kernels in front have ended."""
    kv, work = call.kv, call.work
    assert kv.scales is not None
    assert kv.table is not None
    tensors = (
        *(call.q, kv.payload, kv.scales, kv.table, call.base_rows, call.slots, call.kv_lens),
        *(work.programs, work.sequences, call.out, work.partial, work.lse),
    )
    _, value_bytes, head_bytes, _ = kv.payload.stride()
    granule, head, value, plane, _ = (2 * stride for stride in kv.scales.stride())
    return (
        *(tensor.data_ptr() for tensor in tensors),
        *(call.q.stride(0), call.q.stride(1), call.out.stride(0), call.out.stride(1)),
        *(head_bytes, value_bytes, granule, head, value, plane, kv.table.stride(0), int(settled), call.scale),
    )


def source(plan: RingPlan) -> tuple[str, dict[str, int | str]]:
    """The kernel's text and the macros that it wants."""
    defines: dict[str, int | str] = {
        "STAGES": plan.stages,
        "REGISTERS": plan.registers,
        "AFFINE": int(plan.affine),
        "HALF": int(plan.half),
        "KV_HEADS": plan.kv_heads,
        "GROUP": plan.group,
        "GRANULE_TOKENS": plan.granule_tokens,
        "ROW_BYTES": plan.row_bytes,
    }
    return "".join(_text(name) for name in PARTS), defines


@cache
def _text(name: str) -> str:
    return _SOURCE.with_name(name).read_text()


@cache
def _kernel(plan: RingPlan, index: int) -> CudaKernel | None:
    """None, with a warning, where there is no compiler, or none whose kernels the driver takes."""
    text, defines = source(plan)
    try:
        return CudaKernel(compile_cuda(text, defines, name=_SOURCE.name), "warp_rings", index)
    except (OSError, RuntimeError) as error:
        warnings.warn(f"decode attention by rings of warps is left to Triton: {error}", stacklevel=2)
        return None


def _lies_well(call: DecodeCall) -> bool:
    """Whether pieces of codes and scales, and four queries or outputs, lie at multiples of their bytes, and strides
    and places in the table are numbers of 32 bits."""
    kv, most = call.kv, 1 << 31
    if kv.scales is None or kv.table is None:
        return False
    payload, scales = kv.payload.stride()[:3], [2 * stride for stride in kv.scales.stride()[:-1]]
    rows = [stride for tensor in (call.q, call.out) for stride in tensor.stride()[:2]]
    aligned = all(tensor.data_ptr() % _PIECE_BYTES == 0 for tensor in (kv.payload, kv.scales))
    aligned &= all(tensor.data_ptr() % 8 == 0 for tensor in (call.q, call.out))
    aligned &= all(stride % _PIECE_BYTES == 0 for stride in (*payload, *scales))
    aligned &= all(stride % 4 == 0 for stride in rows)
    counted = len(kv.table) * kv.table.stride(0), kv.kv_heads * sum(scales[1:])
    return aligned and max(*payload, *scales, *rows, *counted) < most
