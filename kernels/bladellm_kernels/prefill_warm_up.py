"""What the first prefill chunks would wait for, done at start: cuDNN's plans, and the compilation of Triton's kernels.

A plan takes cuDNN some 45 ms, a kernel some 1 s where Triton's cache on disk has none. torch keeps plans a thread, so
they are made in the thread that will run the steps.
"""

import logging
import time
from collections.abc import Iterable, Sequence

import torch

from bladellm_kernels.has_triton import has_triton
from bladellm_kernels.kv_dequantize import Stretch
from bladellm_kernels.kv_format import NO_QUANT
from bladellm_kernels.kv_layer import KvLayer
from bladellm_kernels.one_pass_gate import one_pass_serves, one_pass_serves_numbers
from bladellm_kernels.prefill_calls import CudnnCall, PlannedCalls, calls_to_plan
from bladellm_kernels.prefill_sdpa import MERGED_AT_ONCE, cudnn_attention, in_place, longest_piece
from bladellm_kernels.ragged_prefill_attention import cudnn_takes

# Longest time for plans: what is not planned by then is never asked of cuDNN. One plan more may be under way.
PLAN_SECONDS = 4.0

logger = logging.getLogger(__name__)


def warm_up(
    heads: int, dtype: torch.dtype, layers: Sequence[KvLayer], windows: Sequence[int | None], tokens: int, length: int
) -> PlannedCalls | None:
    """Make `ragged_prefill_attention` ready for queries [T, heads, D] of `dtype`, contiguous, on those layers, which
    see `windows`, in steps of up to `tokens` query tokens and sequences of up to `length`.

    Returns the calls that cuDNN has plans for, to be given to the operator, None on a CPU. There are none where cuDNN
    cannot be had, and Triton does all, or is not wanted, since attention in one pass does. Nothing is run, so layers
    need not have memory behind their rows yet. Takes up to PLAN_SECONDS and the compilations; memory for some
    `2 * tokens` queries meanwhile.
    """
    first, device = layers[0], layers[0].payload.device
    if device.type != "cuda" or not has_triton():
        return None
    from bladellm_kernels.kv_dequantize_triton import launch as dequantize
    from bladellm_kernels.merge_attention_triton import compile_merges
    from bladellm_kernels.ragged_prefill_triton import compile_ahead

    empty = torch.empty(0, heads, first.head_dim, dtype=dtype, device=device)
    for kv in {kv.payload.stride(): kv for kv in layers}.values():
        for window in {None if window is None else 1 for window in windows}:
            compile_ahead(empty, kv, window)
        if kv.format.quantized or kv.paged:
            dequantize(
                kv, (Stretch(0, 0, 0, 0),), torch.empty(0, 2, kv.kv_heads, kv.head_dim, dtype=dtype, device=device)
            )
    calls: list[CudnnCall] = []
    capability = torch.cuda.get_device_capability(device)
    served = _compile_one_pass(heads, dtype, layers)
    if not served and any(cudnn_takes(first.head_dim, dtype, window, length, capability) for window in windows):
        calls = calls_to_plan(tokens, length, longest_piece(first), in_place(first), first.granule_tokens)
        calls = plan_calls(heads, dtype, layers, calls, PLAN_SECONDS)
        if any(not call.causal for call in calls):
            compile_merges(empty, MERGED_AT_ONCE)
    return PlannedCalls(calls, in_place(first), first.granule_tokens)


def _compile_one_pass(heads: int, dtype: torch.dtype, layers: Sequence[KvLayer]) -> bool:
    """Compile attention in one pass for the layers, or numbers made of them; False where it does not serve all of them
    as they are stored."""
    from bladellm_kernels.one_pass_prefill import compile_ahead

    for kv in {kv.payload.stride(): kv for kv in layers}.values():
        if kv.format.quantized and one_pass_serves_numbers(kv, dtype):
            numbers = torch.empty(1, 2, kv.kv_heads, kv.head_dim, dtype=dtype, device=kv.payload.device)
            compile_ahead(numbers.new_empty(1, heads, kv.head_dim), KvLayer(numbers, NO_QUANT, kv.granule_tokens))
        elif one_pass_serves(kv, dtype):
            compile_ahead(torch.empty(1, heads, kv.head_dim, dtype=dtype, device=kv.payload.device), kv)
    return all(one_pass_serves(kv, dtype) for kv in layers)


def plan_calls(
    heads: int, dtype: torch.dtype, layers: Sequence[KvLayer], calls: Iterable[CudnnCall], seconds: float
) -> list[CudnnCall]:
    """Have cuDNN plan for the calls, in order, until `seconds` are over or one fails. Returns those with a plan.

    The calls are recorded in a graph that is never run: nothing is read or written.
    """
    planned: list[CudnnCall] = []
    kinds = list({kv.payload.stride(): kv for kv in layers}.values())
    rows = min(kv.payload.shape[0] for kv in kinds)
    calls = [call for call in calls if call.copied or call.keys <= rows]
    shape = (max((call.rows for call in calls), default=1), heads, kinds[0].head_dim)
    end = time.monotonic() + seconds
    try:
        q = torch.empty(shape, dtype=dtype, device=kinds[0].payload.device)
        # Handles are made by a call outside a recording.
        few = torch.zeros(128, 1, shape[2], dtype=dtype, device=q.device)
        cudnn_attention(few, few, few, True, 1.0)
        torch.cuda.synchronize(q.device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="relaxed"):
            for call in calls:
                if time.monotonic() > end:
                    break
                for kv in kinds:
                    _plan(q[: call.rows], kv, call)
                planned.append(call)
        graph.reset()
    except RuntimeError as error:
        logger.warning("cuDNN planned %d of %d calls of prefill attention: %s", len(planned), len(calls), error)
    return planned


def _plan(q: torch.Tensor, kv: KvLayer, call: CudnnCall) -> None:
    if call.copied:
        keys = torch.empty(call.keys, 2, kv.kv_heads, kv.head_dim, dtype=q.dtype, device=q.device)
    else:
        keys = kv.payload[: call.keys]
    cudnn_attention(q, keys[:, 0], keys[:, 1], call.causal, 1.0)
