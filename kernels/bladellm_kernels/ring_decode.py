"""Launches `ring_decode_kernel`."""

import torch
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from bladellm_kernels.decode_call import DecodeCall
from bladellm_kernels.decode_kv_triton import KvArguments
from bladellm_kernels.decode_launch import kv_arguments, plan_arguments, register_limit, row_arguments
from bladellm_kernels.decode_results_hopper import States
from bladellm_kernels.decode_ring_hopper import (
    PRODUCER_WARPS,
    buffer_units,
    buffers,
    scale_boxes_layout,
    scale_planes,
)
from bladellm_kernels.decode_shape import DecodeShape
from bladellm_kernels.decode_work import DecodeWork
from bladellm_kernels.early_launch import early_launch
from bladellm_kernels.hopper_device import on_hopper
from bladellm_kernels.kv_layer import KvLayer
from bladellm_kernels.linear_hopper import described
from bladellm_kernels.merge_attention_triton import MERGE_REGISTERS
from bladellm_kernels.ring_decode_hopper import ring_decode_kernel

_STEP_BYTES = 16
"""That a thread copies at once."""
_WARPS = 4
"""Registers are dealt out by groups of as many."""
_MOST_SEGMENTS = 4
"""Of a sequence, on average, that the last program to have one merges."""


def takes(q: torch.Tensor, kv: KvLayer, shape: DecodeShape) -> bool:
    """Whether the kernel can do it: 16-bit queries on a Hopper, blocks of four warps that lie in a granule, and numbers
    of a head at whole 16 bytes."""
    aligned = shape.step * 2 == _STEP_BYTES and kv.payload.data_ptr() % _STEP_BYTES == 0
    whole = shape.one_granule and shape.units == shape.units_padded
    return on_hopper(q) and q.dtype.itemsize == 2 and shape.warps == _WARPS and whole and aligned


def joins(work: DecodeWork) -> bool:
    """Whether the kernel merges the segments itself, of any sequence."""
    return work.reads == "all" and len(work.programs) <= _MOST_SEGMENTS * len(work.sequences)


def launch(call: DecodeCall, shape: DecodeShape) -> bool:
    """The outputs of sequences that are one segment, and, where True is returned, of all others; else their states."""
    work, schedule = call.work, call.work.schedule
    # Of few sequences, many segments each, a kernel merges all rows at once.
    joined = joins(work)
    # Those that stay leave the other half of an SM to the next kernel.
    ctas_per_sm = max(schedule.ctas_per_sm, 2) if schedule.idle_ns or schedule.stay_ns else schedule.ctas_per_sm
    beside = MERGE_REGISTERS if schedule.merge_beside and not joined else 0
    early = early_launch(call.q.device)
    ring_decode_kernel[(len(work.programs) * shape.lanes,)](
        row_arguments(call.q),
        _in_words(kv_arguments(call.kv, shape.step, schedule.block_kv), call.kv),
        *_boxes(call.kv, shape),
        *plan_arguments(call),
        work.empties,
        row_arguments(call.out),
        States(work.partial, work.lse, work.arrived),
        call.scale, work.window or 0,
        SHAPE=shape,
        STAGES=schedule.stages,
        JOINED=joined,
        LATE=joined and schedule.late,
        SETTLED=call.beside or (early["EARLY"] and work.used),
        BESIDE=call.beside,
        num_warps=schedule.warps,
        **register_limit(32 * (schedule.warps + PRODUCER_WARPS.value) * ctas_per_sm, beside),
        **early,
    )  # fmt: skip
    # It let the next kernel start only when its own inputs, the plan among them, were complete.
    work.used = True
    return joined


def _boxes(kv: KvLayer, shape: DecodeShape) -> tuple[TensorDescriptor | None, ...]:
    """What the copy engine reads of a layer, a descriptor for each buffer of the ring and one for scales: rows, with
    keys and values of all heads side by side; scales, with the tokens of a granule side by side."""
    if not shape.boxed:
        return None, None, None
    payload = kv.payload.view(torch.int16) if kv.format.quantized else kv.payload
    row, value, head, _ = payload.stride()
    columns = value + head * (kv.kv_heads - 1) + payload.shape[3]
    rows = payload.as_strided((len(payload), columns), (row, 1))
    first = described(rows, shape.block_kv, buffer_units(shape, 0))
    second = described(rows, shape.block_kv, buffer_units(shape, 1)) if buffers(shape) > 1 else None
    return first, second, None if kv.scales is None else _scale_boxes(kv.scales, shape)


def _scale_boxes(scales: torch.Tensor, shape: DecodeShape) -> TensorDescriptor:
    """Words of two scales, [all planes of granules and heads, granule_tokens / 2]."""
    words = scales.view(torch.int32).flatten(0, -2)
    box = [scale_planes(shape), shape.block_kv // 2]
    return TensorDescriptor(words, list(words.shape), list(words.stride()), box, scale_boxes_layout(shape))


def _in_words(arguments: KvArguments, kv: KvLayer) -> KvArguments:
    """With scales as words of two."""
    if kv.scales is None:
        return arguments
    words = kv.scales.view(torch.int32)
    granule, head, value, plane = words.stride()[:-1]
    return arguments._replace(
        scales=words,
        scale_granule_stride=granule,
        scale_head_stride=head,
        scale_value_stride=value,
        scale_plane_stride=plane,
    )
