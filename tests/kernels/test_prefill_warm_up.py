"""What is planned at start: few calls, the only ones that chunks take afterwards, and nothing is run for them."""

import pytest
import torch
from bladellm_kernels import prefill_warm_up
from bladellm_kernels.kv_format import KV_FORMATS
from bladellm_kernels.kv_layer import KvLayer
from bladellm_kernels.prefill_calls import CudnnCall, PlannedCalls, calls_to_plan
from bladellm_kernels.prefill_costs import Heads
from bladellm_kernels.prefill_plan import plan_chunk, plan_cost
from bladellm_kernels.prefill_routes import choose_routes, cudnn_cost
from bladellm_kernels.prefill_sdpa import State, attend_chunk, empty_queries
from bladellm_kernels.prefill_tiles import Span
from bladellm_kernels.prefill_warm_up import plan_calls, warm_up
from bladellm_kernels.ragged_prefill_attention import ragged_prefill_attention
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels.conditions import assert_close
from tests.kernels.prefill_support import prefill_case
from tests.kernels.test_ragged_prefill_sdpa import ON_CUDA, attention

HEADS = Heads(32, 8, 128)


def planned_calls(tokens, length, granule_tokens=128, in_place=True, longest=65536, share=1.0):
    calls = calls_to_plan(tokens, length, longest, in_place, granule_tokens)
    return PlannedCalls(calls[: int(len(calls) * share)], in_place, granule_tokens)


class Recorder:
    """Stands for cuDNN: notes what it is asked, and does nothing."""

    def __init__(self, kv: KvLayer) -> None:
        self.kv = kv
        self.calls: list[CudnnCall] = []

    def __call__(self, q, k, v, causal, scale) -> State:
        copied = k.untyped_storage().data_ptr() != self.kv.payload.untyped_storage().data_ptr()
        self.calls.append(CudnnCall(q.shape[0], k.shape[0], causal, copied))
        return State(torch.empty_like(q), torch.empty(q.shape[:2]))


@settings(max_examples=60)
@given(
    st.integers(1, 2048),
    st.integers(0, 6000),
    st.sampled_from(["no_quant", "int8"]),
    st.sampled_from([128, 48]),
    st.sampled_from([0.0, 0.3, 1.0]),
)
def test_chunks_take_planned_calls_only(query_len, start, name, granule_tokens, share):
    """Whatever was planned before time was over; seen at the calls themselves, in place and copied."""
    rows = -(-(start + query_len) // granule_tokens) * granule_tokens
    format = KV_FORMATS[name]
    payload = torch.zeros(rows, 2, 1, 8, dtype=format.dtype(torch.float32))
    scales = torch.zeros(rows // granule_tokens, 1, 2, 1, granule_tokens).half() if format.quantized else None
    table = torch.arange(rows // granule_tokens, dtype=torch.int32)[None]
    kv = KvLayer(payload, format, granule_tokens, table, scales)
    planned = planned_calls(2048, 32768, granule_tokens, not format.quantized, share=share)
    q, span, asked = (
        empty_queries((query_len, 1, 8), torch.float32, "cpu"),
        Span(0, query_len, start, 0, 0),
        Recorder(kv),
    )
    if plan_chunk(HEADS, query_len, start, planned=planned) is None:
        assert share < 1
        assert choose_routes((span,), HEADS, True, True, planned=planned).cudnn == ()
        with pytest.raises(ValueError, match="not planned"):
            attend_chunk(q, kv, span, 0.1, None, asked, planned=planned)
        return
    attend_chunk(q, kv, span, 0.1, None, asked, planned=planned)
    assert asked.calls
    assert set(asked.calls) <= planned.calls


@pytest.mark.parametrize(("tokens", "length", "most"), [(2048, 32768, 65), (2048, 131072, 71), (8192, 131072, 191)])
def test_plans_are_few_and_those_that_gain_most_come_first(tokens, length, most):
    calls = calls_to_plan(tokens, length, 65536, True, 128)
    assert len(calls) == len(set(calls)) <= most
    assert all(call.rows <= tokens + 128 and call.keys <= length and not call.copied for call in calls)
    assert [call.rows for call in calls[:15]] == [tokens] * 15
    early = PlannedCalls(calls[:60], True, 128)
    assert plan_chunk(HEADS, tokens, 0, planned=early).square == tokens
    assert plan_chunk(HEADS, tokens, 4 * tokens, planned=early).pieces == (4 * tokens,)


def test_plans_cost_little_more_than_any_call_would():
    planned = planned_calls(2048, 131072)
    for query_len in (700, 1500, 2000, 2048):
        for start in (0, 2048, 5000, 8192, 30000, 100000):
            span = Span(0, query_len, start, 0, 0)
            free = cudnn_cost(HEADS, span, True)
            assert plan_cost(HEADS, plan_chunk(HEADS, query_len, start, planned=planned)) < 1.35 * free
    assert choose_routes((Span(0, 2048, 8192, 0, 0),), HEADS, True, False, planned=planned).cudnn


def test_chunks_without_plans_leave_the_others_to_cudnn():
    planned = PlannedCalls([CudnnCall(6016, 6016, True, False)], True, 128)
    spans = (Span(0, 8000, 0, 0, 0), Span(8000, 6000, 0, 9000, 1))
    routes = choose_routes(spans, HEADS, True, False, planned=planned)
    assert (routes.cudnn, routes.stored) == (spans[1:], spans[:1])


def test_what_fails_or_comes_too_late_is_not_planned(monkeypatch, caplog):
    """Without CUDA the first call fails: a warning, and no plans."""
    kv = KvLayer(torch.zeros(512, 2, 1, 8, dtype=torch.bfloat16), KV_FORMATS["no_quant"], 128)
    assert plan_calls(2, torch.bfloat16, [kv], calls_to_plan(512, 512, 65536, True, 128), 9.0) == []
    assert "cuDNN planned 0 of" in caplog.text
    assert warm_up(2, torch.bfloat16, [kv], [None], 512, 512) is None


@pytest.mark.parametrize("marked", [pytest.param(None, marks=ON_CUDA)])
@pytest.mark.parametrize(("name", "head_dim"), [("no_quant", 96), ("int8", 128)])
def test_warming_up_on_cuda_runs_nothing_and_is_enough(marked, name, head_dim, monkeypatch):
    """Of layers that attention in one pass does not serve."""
    q, kv, [span] = prefill_case(name, torch.bfloat16, (8, 2, head_dim), [(2048, 1024)], "cuda", mapped=True)
    kept = kv.payload.clone()
    planned = warm_up(8, torch.bfloat16, [kv], [None], 1024, 3072)
    assert torch.equal(kv.payload.float().nan_to_num(), kept.float().nan_to_num())
    assert len(planned.calls) == len(calls_to_plan(1024, 3072, 65536, name == "no_quant", kv.granule_tokens))
    monkeypatch.setattr(prefill_warm_up, "PLAN_SECONDS", 0.0)
    assert warm_up(8, torch.bfloat16, [kv], [None], 1024, 3072).calls == set()
    rows = slice(span.first, span.first + span.query_len)
    expected = ragged_prefill_attention(q, kv, [span], 0.1)[rows].float()
    assert_close(ragged_prefill_attention(q, kv, [span], 0.1, planned=planned)[rows], expected, torch.bfloat16)
    if name == "no_quant":
        stored = kv.payload[span.base_row : span.base_row + 3072].float()
        exact = attention(q[rows].float(), stored[:, 0], stored[:, 1], True, 0.1, 2048).out
        assert_close(expected, exact, torch.bfloat16)


@pytest.mark.gpu(hopper=True)
def test_nothing_is_planned_where_attention_in_one_pass_serves():
    _, kv, _ = prefill_case("no_quant", torch.bfloat16, (8, 2, 128), [(0, 256)], "cuda", mapped=True)
    assert warm_up(8, torch.bfloat16, [kv], [None], 1024, 3072).calls == set()
