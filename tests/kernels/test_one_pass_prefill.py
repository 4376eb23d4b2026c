"""Prefill attention in one pass: its kernel run in Python, compiled without a GPU, and on one."""

import math
import random
import re
from dataclasses import replace

import pytest
import torch
from bladellm_kernels.kv_format import KV_FORMATS, NO_QUANT
from bladellm_kernels.kv_layer import KvLayer
from bladellm_kernels.one_pass_gate import one_pass_takes, one_pass_takes_numbers
from bladellm_kernels.one_pass_list import ENTRY_FIELDS, heads_of_a_tile, list_programs
from bladellm_kernels.prefill_costs import Heads
from bladellm_kernels.prefill_tiles import Span
from bladellm_kernels.ragged_prefill_attention import ragged_prefill_attention_reference

from tests.kernels.conditions import assert_close
from tests.kernels.hopper import assembler_report, compiled_launches, spilled
from tests.support.cases import drawn_of

pytest.importorskip("triton")

SCALE = 0.1
SHARED = 227 * 1024
"""Bytes of shared memory that a program may have on a Hopper."""


def problem(
    start: int, length: int, heads: int, kv_heads: int, device: str = "cpu", mapped: bool = True, dim: int = 128
) -> tuple[torch.Tensor, KvLayer, Span, torch.Tensor]:
    """Queries between others, memory of which a layer among others is NaN but for the sequence, and a result of NaN.

    mapped: K and V of a head side by side, as mapped memory has them; otherwise all K, then all V.
    """
    total, base = start + length, 3
    shape = (total + 40, 3, kv_heads, 2, dim) if mapped else (total + 40, 3, 2, kv_heads, dim)
    memory = torch.full(shape, torch.nan, dtype=torch.bfloat16, device=device)
    payload = memory[:, 1].transpose(1, 2) if mapped else memory[:, 1]
    payload[base : base + total] = torch.randn(total, 2, kv_heads, dim, device=device).bfloat16()
    q = torch.full((length + 7, heads + 2, dim), torch.nan, dtype=torch.bfloat16, device=device)[:, :heads]
    q[4 : 4 + length] = torch.randn(length, heads, dim, device=device).bfloat16() * 2
    return q, KvLayer(payload, NO_QUANT, 16), Span(4, length, start, base, 0), torch.full_like(q, torch.nan)


def expected(q: torch.Tensor, kv: KvLayer, span: Span) -> torch.Tensor:
    """Attention written out in float32."""
    end = span.base_row + span.start + span.query_len
    group = q.shape[1] // kv.kv_heads
    keys, values = (each.float().repeat_interleave(group, 1) for each in kv.payload[span.base_row : end].unbind(1))
    scores = torch.einsum("nhd,mhd->hnm", q[span.first : span.first + span.query_len].float(), keys) * SCALE
    hidden = torch.ones(scores.shape[1:], dtype=torch.bool, device=q.device).triu(1 + span.start)
    return torch.einsum("hnm,mhd->nhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), values)


def assert_right(out: torch.Tensor, q: torch.Tensor, kv: KvLayer, span: Span) -> None:
    rows = slice(span.first, span.first + span.query_len)
    assert_close(out[rows], expected(q, kv, span), torch.bfloat16)
    assert out[: span.first].isnan().all()
    assert out[rows.stop :].isnan().all()


def problems(
    chunks: list[tuple[int, int]], heads: int, kv_heads: int, device: str = "cpu"
) -> tuple[torch.Tensor, KvLayer, list[Span], torch.Tensor]:
    """The same for chunks (prefix, length), one behind the other in the batch, in memory with a gap between them."""
    total = sum(start + length + 50 for start, length in chunks)
    memory = torch.full((total, 3, kv_heads, 2, 128), torch.nan, dtype=torch.bfloat16, device=device)
    payload = memory[:, 1].transpose(1, 2)
    tokens = sum(length for _, length in chunks)
    q = torch.full((tokens + 7, heads + 2, 128), torch.nan, dtype=torch.bfloat16, device=device)[:, :heads]
    q[4 : 4 + tokens] = torch.randn(tokens, heads, 128, device=device).bfloat16() * 2
    spans, first, base = [], 4, 3
    for slot, (start, length) in enumerate(chunks):
        payload[base : base + start + length] = torch.randn(start + length, 2, kv_heads, 128, device=device).bfloat16()
        spans.append(Span(first, length, start, base, slot))
        first, base = first + length, base + start + length + 50
    return q, KvLayer(payload, NO_QUANT, 16), spans, torch.full_like(q, torch.nan)


def assert_all_right(out: torch.Tensor, q: torch.Tensor, kv: KvLayer, spans: list[Span]) -> None:
    """And nothing else is written."""
    rest = out.clone()
    for span in spans:
        rows = slice(span.first, span.first + span.query_len)
        assert_close(out[rows], expected(q, kv, span), torch.bfloat16)
        rest[rows] = torch.nan
    assert rest.isnan().all()


def run_in_python(
    q: torch.Tensor, kv: KvLayer, spans: list[Span], out: torch.Tensor, programs: int, stages: int, late: bool
) -> None:
    """All programs of a launch, in any order; inputs are there only when the kernel waits for them."""
    from bladellm_kernels import one_pass_prefill, one_pass_prefill_hopper
    from bladellm_kernels.one_pass_parts_hopper import OnePassTile, Written

    from tests.kernels.gluon_copy_engine import Described
    from tests.kernels.gluon_support import run_program

    heads, group = q.shape[1], q.shape[1] // kv.kv_heads
    asked, results = (Described(each) for each in (q, out))
    entries = torch.tensor(list_programs(spans, Heads(heads, kv.kv_heads, kv.head_dim), programs))
    entries = torch.cat([entries, torch.zeros(2, ENTRY_FIELDS, dtype=torch.int64)])
    kept = q.clone()
    for program in random.sample(range(len(entries)), len(entries)):
        q.fill_(torch.nan)
        run_program(
            one_pass_prefill_hopper.one_pass_kernel, program, late, asked, results,
            Written(out, out.stride(0), out.stride(1)), one_pass_prefill.stored(kv),
            entries, heads, group, SCALE * math.log2(math.e), on_wait=lambda: q.copy_(kept),
            TILE=OnePassTile(kv.head_dim, heads_of_a_tile(group), stages), EARLY=True,
        )  # fmt: skip


CASES = [(1, 1, 4, 1), (0, 65, 4, 4), (129, 64, 6, 1), (0, 128, 8, 2), (64, 200, 2, 2), (300, 77, 7, 7), (511, 5, 8, 1)]
"""(prefix, chunk, heads, KV heads)."""


@pytest.mark.turns
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize(("case", "dim"), [*((case, 128) for case in CASES), (CASES[5], 64)], ids=str)
def test_blocks_are_filled_read_and_written_in_order(case, dim, late):
    """Programs of several tiles, partial blocks and tiles, tiles whose last blocks some rows do not see at all."""
    for programs, stages in ((1, 2), (3, 3)):
        q, kv, span, out = problem(*case, mapped=programs == 1, dim=dim)
        run_in_python(q, kv, [span], out, programs, stages, late)
        assert_right(out, q, kv, span)


@pytest.mark.parametrize("late", [False, True])
def test_a_long_chunk(late):
    q, kv, span, out = problem(300, 777, 4, 1)
    run_in_python(q, kv, [span], out, 5, 2, late)
    assert_right(out, q, kv, span)


@pytest.mark.parametrize("late", [False, True])
def test_chunks_share_the_programs(late):
    """Chunks beside each other in the batch, sequences apart in memory, more programs than chunks and fewer."""
    for programs in (7, 2):
        q, kv, spans, out = problems([(70, 90), (0, 40), (513, 33)], 8, 2)
        run_in_python(q, kv, spans, out, programs, 2, late)
        assert_all_right(out, q, kv, spans)


def test_the_expectation_is_the_reference():
    q, kv, span, _ = problem(5, 9, 4, 2)
    reference = ragged_prefill_attention_reference(q, kv, [span], SCALE)
    torch.testing.assert_close(expected(q, kv, span), reference[span.first : span.first + 9])


LAYERS = [
    ((32, 8), torch.bfloat16, 128),
    ((40, 40), torch.bfloat16, 128),
    ((28, 4), torch.float16, 128),
    ((14, 2), torch.bfloat16, 64),
    ((32, 8), torch.float16, 64),
]


@pytest.mark.parametrize("layer", drawn_of(LAYERS, 1), ids=str)
def test_compiled_for_a_hopper(layer):
    """Copies by the copy engine, products one behind the other, no registers in memory."""
    from bladellm_kernels import one_pass_prefill as module

    heads, dtype, dim = layer
    q, kv, _, out = problem(300, 777, *heads, dim=dim)
    kv = replace(kv, payload=kv.payload.to(dtype))
    entries = torch.zeros(132, ENTRY_FIELDS, dtype=torch.int64)
    with compiled_launches() as compiled:
        module.launch_listed(q.to(dtype), kv, entries, SCALE, out.to(dtype))
    kernel = compiled["one_pass_kernel"]
    text = kernel.asm["ptx"]
    assert kernel.metadata.shared <= SHARED
    assert spilled(text) == 0
    assert "wgmma" not in assembler_report(text), "products wait for each other, or for the assembler"
    assert text.count("griddepcontrol.wait") == 1
    assert text.index("griddepcontrol.wait") < text.index("tensormap.replace"), "other kernels' memory is written"
    # A tile's first step, its masked and its other ones, and the last product of all, for each group.
    scores = 3 * dim // 16
    assert len(re.findall(rf"wgmma\.mma_async\S+m64n{dim}k16", text)) == 2 * ((3 + 1) * 8 + scores * (dim == 128))
    assert text.count("cp.async.bulk.tensor.2d.shared::cluster.global") > 0
    assert text.count("cp.async.bulk.tensor.3d.shared::cluster.global") > 0
    assert text.count("cp.async.bulk.tensor.3d.global.shared::cta") > 0


class OnHopper(torch.Tensor):
    """Memory of a CPU that says it is a GPU's."""

    is_cuda = True


@pytest.mark.parametrize(
    ("case", "taken"),
    [
        ("as they are", True),
        ("all keys, then all values", True),
        ("float16", True),
        ("float32", False),
        ("heads of 64", True),
        ("heads of 96", False),
        ("quantized", False),
        ("paged", False),
        ("rows of odd strides", False),
        ("from an odd place on", False),
        ("on another GPU", False),
        ("through a window", False),
        ("through a wide window", True),
    ],
)
def test_what_it_takes(case, taken, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8 if "another" in case else 9, 0))
    dtype, dim = getattr(torch, case, torch.bfloat16), next((each for each in (64, 96) if str(each) in case), 128)
    q, kv, _, _ = problem(5, 9, 4, 2, mapped="keys" not in case)
    q = torch.empty(9, 4, dim + ("odd" in case), dtype=dtype)
    q = q[..., 1:] if "place" in case else q[..., :dim]
    kv = replace(kv, payload=kv.payload[..., :dim].to(dtype), paged=case == "paged")
    kv = replace(kv, format=KV_FORMATS["int8"]) if case == "quantized" else kv
    window = {"through a window": 13, "through a wide window": 14}.get(case)
    out = torch.empty(9, 4, dim, dtype=dtype)
    kv = replace(kv, payload=kv.payload.as_subclass(OnHopper))
    assert one_pass_takes(q, kv, window, 14, out) is taken
    # Of codes it is made numbers, wherever those lie.
    codes = replace(kv, format=KV_FORMATS["int8"], paged=False)
    assert one_pass_takes_numbers(q, codes, window, 14, out) is (taken or case in ("quantized", "paged"))
    assert not one_pass_takes_numbers(q, replace(kv, format=NO_QUANT), window, 14, out)


ON_GPU = [*CASES, (300, 777, 32, 8), (2048, 2048, 32, 8), (0, 3000, 40, 40), (2048, 2048, 28, 4), (77, 1000, 64, 1)]


@pytest.mark.gpu(hopper=True)
@pytest.mark.parametrize("dim", [128, 64])
@pytest.mark.parametrize("case", ON_GPU, ids=str)
def test_on_a_gpu(case, dim):
    from bladellm_kernels.one_pass_prefill import launch

    for mapped in (True, False):
        q, kv, span, out = problem(*case, "cuda", mapped, dim)
        assert one_pass_takes(q, kv, None, span.start + span.query_len, out)
        launch(q, kv, [span], SCALE, out)
        assert_right(out, q, kv, span)
        first = out[4 : 4 + case[1]].clone()
        for _ in range(20):
            out.fill_(torch.nan)
            launch(q, kv, [span], SCALE, out)
            assert torch.equal(first, out[4 : 4 + case[1]])


def any_chunks() -> list[tuple[int, int]]:
    """(prefix, chunk) of up to six."""
    return [(int(4096 ** random.random()) - 1, int(4096 ** random.random())) for _ in range(int(6 ** random.random()))]


@pytest.mark.gpu(hopper=True)
def test_any_chunks_on_a_gpu():
    from bladellm_kernels.one_pass_prefill import launch

    for _ in range(40):
        kv_heads = random.choice([1, 2, 5, 8])
        q, kv, spans, out = problems(any_chunks(), kv_heads * random.choice([1, 2, 3, 4, 6, 8]), kv_heads, "cuda")
        launch(q, kv, spans, SCALE, out)
        assert_all_right(out, q, kv, spans)


@pytest.mark.gpu(hopper=True)
def test_replays_serve_what_the_list_says_then():
    """A captured launch whose inputs and list are written anew."""
    from bladellm_kernels.one_pass_prefill import launch_listed

    q, kv, spans, out = problems([(300, 777), (0, 200), (1000, 64)], 8, 2, "cuda")
    entries = torch.zeros(140, ENTRY_FIELDS, dtype=torch.int64, device="cuda")
    launch_listed(q, kv, entries, SCALE, out)
    assert out.isnan().all()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch_listed(q, kv, entries, SCALE, out)
    for chosen in (spans, spans[1:], spans[:1], spans[::-1]):
        q[4 : spans[-1].first + spans[-1].query_len].normal_()
        listed = list_programs(chosen, Heads(8, 2, 128), 132)
        entries.zero_()
        entries[: len(listed)] = torch.tensor(listed)
        out.fill_(torch.nan)
        graph.replay()
        assert_all_right(out, q, kv, chosen)
