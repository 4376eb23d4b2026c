"""What launches of the decode kernels have in common: what they are given, and a limit of registers."""

import torch

from bladellm_kernels.decode_call import DecodeCall
from bladellm_kernels.decode_kv_triton import KvArguments
from bladellm_kernels.decode_queries_triton import RowArguments
from bladellm_kernels.decode_shape import unit_strides
from bladellm_kernels.kv_layer import KvLayer

_REGISTERS = 65536
"""Of an SM."""
_QUARTER_WARPS = 4
"""Of a kernel that fits beside another one: each quarter of an SM has registers of its own."""


def row_arguments(rows: torch.Tensor) -> RowArguments:
    """Queries or outputs."""
    return RowArguments(rows, rows.stride(0), rows.stride(1))


def plan_arguments(call: DecodeCall) -> tuple[torch.Tensor, ...]:
    """Where each sequence is, and the plan: what is not there is not read."""
    work = call.work
    shares = call.kv_lens if work.shares is None else work.shares
    return call.base_rows, call.slots, call.kv_lens, shares, work.programs, work.sequences


def kv_arguments(kv: KvLayer, step: int, block_kv: int) -> KvArguments:
    """A layer, its strides in steps of `step` units."""
    payload = kv.payload.view(torch.int16) if kv.format.quantized else kv.payload
    row, head, value = (stride // step for stride in unit_strides(kv))
    if row * step * block_kv >= 2**31:
        raise ValueError(f"rows {row * step} units apart: {block_kv} of them must lie within 2^31")
    # What is not there is not read.
    scales = payload if kv.scales is None else kv.scales
    granule, scale_head, scale_value, plane = (0, 0, 0, 0) if kv.scales is None else kv.scales.stride()[:-1]
    table = payload if kv.table is None else kv.table
    return KvArguments(
        payload, row, head, value, scales, granule, scale_head, scale_value, plane, table, table.stride(0)
    )


def register_limit(threads: int, beside: int = 0) -> dict[str, int]:
    """An option that leaves registers for so many threads, all those of an SM, and for a warp in each of its quarters
    of a kernel whose threads take `beside` of them."""
    registers = (_REGISTERS - _QUARTER_WARPS * 32 * beside) // threads // 8 * 8
    return {"maxnreg": registers} if registers < 256 else {}
