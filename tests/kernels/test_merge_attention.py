"""The merge of attention over parts of a sequence against attention over all of it."""

import dataclasses
import random

import pytest
import torch
from bladellm_kernels.decode_schedule import DecodeSchedule
from bladellm_kernels.decode_work import DecodeWork
from bladellm_kernels.merge_attention import merge_attention, merge_attention_reference

from tests.kernels.conditions import DEVICES, DTYPES, TOLERANCE
from tests.kernels.hopper import compiled_launches
from tests.kernels.interpreted import run_interpreted


def attention(q, k, v):
    """q [T, H, D], k and v [n, H, D] -> output [T, H, D] and logarithm [T, H], float64."""
    scores = torch.einsum("thd,nhd->thn", q, k)
    return torch.einsum("thn,nhd->thd", scores.softmax(-1), v), scores.logsumexp(-1)


def split_attention(tokens, heads, head_dim, cuts, dtype):
    """Attention over all of a sequence, and over its parts: outputs of `dtype`, logarithms transposed in memory."""
    q, k, v = (torch.randn(n, heads, head_dim).double() for n in (tokens, sum(cuts), sum(cuts)))
    whole, _ = attention(q * 2, k, v)
    parts = [attention(q * 2, a, b) for a, b in zip(k.split(cuts), v.split(cuts), strict=True)]
    outs = [torch.cat((out, out), -1).to(dtype)[..., :head_dim] for out, _ in parts]
    return whole, outs, [lse.float().t().contiguous().t() for _, lse in parts]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("shape", "cuts"), [((7, 3, 20), [5, 1]), ((1, 1, 8), [3, 70, 2]), ((33, 5, 64), [9])])
def test_parts_merge_to_the_whole(device, dtype, shape, cuts):
    whole, outs, lses = split_attention(*shape, cuts, dtype)
    tolerance = TOLERANCE[dtype]
    total = torch.full((shape[0], 2 * shape[1]), 7.0, device=device)[:, ::2]
    merged = merge_attention([out.to(device) for out in outs], [lse.to(device) for lse in lses], lse=total)
    assert merged.dtype == dtype
    torch.testing.assert_close(merged.double().cpu(), whole, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(total.cpu(), torch.stack(lses).logsumexp(0), atol=1e-5, rtol=1e-5)
    reference = merge_attention_reference(outs, lses)
    torch.testing.assert_close(reference, whole, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("device", DEVICES)
def test_empty_parts_do_not_count_and_nothing_is_zero(device):
    whole, outs, lses = split_attention(6, 2, 8, [4, 5], torch.float32)
    nothing = torch.full((6, 2, 8), torch.nan)
    never = torch.full((6, 2), -torch.inf)
    given = [part.to(device) for part in (nothing, outs[0], nothing, outs[1])]
    logs = [lse.to(device) for lse in (never, lses[0], never, lses[1])]
    out = torch.full((8, 2, 8), 7.0, device=device)
    merge_attention(given, logs, out[1:-1])
    torch.testing.assert_close(out[1:-1].cpu().double(), whole, atol=1e-5, rtol=1e-5)
    assert (out[[0, -1]] == 7).all()
    total = torch.zeros(6, 2, device=device)
    assert (merge_attention(given[::2], logs[::2], lse=total) == 0).all()
    assert (total == -torch.inf).all()


@pytest.mark.parametrize("device", DEVICES)
def test_large_logarithms_and_the_place_of_the_first_part(device):
    whole, outs, lses = split_attention(6, 2, 8, [4, 5], torch.float32)
    outs, lses = [out.to(device) for out in outs], [lse.to(device) + 3000 for lse in lses]
    merge_attention(outs, lses, outs[0])
    torch.testing.assert_close(outs[0].cpu().double(), whole, atol=2e-3, rtol=2e-3)


def test_wrong_arguments_are_refused():
    out, lse = torch.zeros(3, 2, 8), torch.zeros(3, 2)
    for outs, lses in (
        ([], []),
        ([out], [lse, lse]),
        ([out, out[:2]], [lse, lse[:2]]),
        ([out], [lse[:, :1]]),
        ([out, out.half()], [lse, lse]),
        ([out], [lse.half()]),
        ([torch.zeros(3, 8, 2).transpose(1, 2)], [lse]),
    ):
        with pytest.raises(ValueError, match=r"outputs|logarithms"):
            merge_attention(outs, lses)


def interpreted():
    from bladellm_kernels.merge_attention_triton import merge_parts

    for shape, cuts, dtype in (((7, 3, 20), [5, 1, 3], torch.float16), ((1, 1, 8), [3], torch.float32)):
        whole, outs, lses = split_attention(*shape, cuts, dtype)
        outs.insert(1, torch.full_like(outs[0], torch.nan))
        lses.insert(1, torch.full_like(lses[0], -torch.inf))
        out = torch.full((*shape[:2], 2 * shape[2]), torch.nan, dtype=dtype)[..., : shape[2]]
        merge_parts(outs, lses, out)
        torch.testing.assert_close(out.double(), whole, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
        lse = torch.full((shape[1], shape[0]), torch.nan).t()
        merge_parts(outs[1:2], lses[1:2], out, lse)
        assert (out == 0).all()
        assert (lse == -torch.inf).all()
        merge_parts(outs, lses, out, lse)
        torch.testing.assert_close(lse, torch.stack(lses).logsumexp(0), atol=1e-5, rtol=1e-5)


def check_segments(device, batch, programs, heads, head_dim, stays):
    """States of up to `programs` segments a sequence, with none, one that is written already, and those that are to be
    merged among them."""
    from bladellm_kernels.merge_attention_triton import merge_segments

    counts = [random.choice([0, 1, 2, random.randint(2, programs + 1)]) for _ in range(batch)]
    firsts = [sum(counts[:sequence]) + sequence for sequence in range(batch)]
    partial = torch.full((sum(counts) + batch, heads, head_dim), torch.nan)
    lse = torch.full(partial.shape[:2], torch.nan)
    expected = torch.full((batch, heads, head_dim), 7.0)
    for first, count, whole in zip(firsts, counts, expected, strict=True):
        if count != 1:
            states, logs = torch.randn(count, heads, head_dim), torch.randn(count, heads) * 5
            partial[first : first + count], lse[first : first + count] = states, logs
            whole[:] = (states * logs.softmax(0)[:, :, None]).sum(0)
    listed = [sequence for sequence, count in enumerate(counts) if count != 1]
    merges = torch.tensor([len(listed), *listed, *[0] * (batch - len(listed))], dtype=torch.int32)
    sequences = torch.tensor([[0, 0, 0, *pair] for pair in zip(firsts, counts, strict=True)], dtype=torch.int32)
    ranges = torch.zeros(programs, 3, dtype=torch.int32)
    given = (each.to(device) for each in (ranges, sequences, merges, merges * 0, merges, partial, lse))
    out = torch.full((batch, 2 * heads, head_dim), 7.0, device=device)
    schedule = DecodeSchedule(64, 3, 4, 1, stay_ns=4500 * stays)
    merge_segments(DecodeWork(*given, None, 1, schedule), out[:, heads:])
    torch.testing.assert_close(out[:, heads:].cpu(), expected, atol=1e-5, rtol=1e-5)
    assert (out[:, :heads] == 7).all()


def interpreted_segments(device="cpu"):
    for batch, programs, head_dim in ((1, 33, 18), (2, 66, 64), (1, 132, 128), (5, 20, 256), (3, 4, 512)):
        check_segments(device, batch, programs, 3, head_dim, stays=False)
        check_segments(device, batch, programs, 3, head_dim, stays=True)


def test_segments_interpreted():
    pytest.importorskip("triton")
    run_interpreted("tests.kernels.test_merge_attention", "interpreted_segments")


@pytest.mark.gpu
def test_segments_on_the_gpu():
    interpreted_segments("cuda")


def test_tiles_of_a_merge_fit_registers_and_few_rounds():
    pytest.importorskip("triton")
    from bladellm_kernels.merge_attention_triton import merge_tile

    for programs in (*range(1, 140), 264, 1056):
        for batch in (1, 2, 3, 8, 64, 256):
            for width in (16, 64, 128, 256, 512):
                stays, beside = random.choice([(4500, False), (0, False), (0, True)])
                schedule = DecodeSchedule(64, 4, 4, 2, stay_ns=stays, merge_beside=beside)
                segments, columns, warps = merge_tile(programs, batch, width, schedule)
                assert segments & (segments - 1) == 0
                assert segments > 0
                assert segments * columns <= (1024 if beside else 2048) * warps <= 8192
                assert width % columns == 0
                if stays:
                    assert columns == width
                else:
                    assert warps == 1
                    assert segments > min(programs // batch, 63)
    plain = DecodeSchedule(64, 4, 4, 2)
    assert merge_tile(33, 4, 128, plain) == (16, 128, 1)
    assert merge_tile(33, 1, 128, plain) == merge_tile(264, 1, 128, plain) == (64, 32, 1)
    assert merge_tile(33, 1, 128, dataclasses.replace(plain, stay_ns=4500)) == (32, 128, 4)
    assert merge_tile(33, 1, 128, dataclasses.replace(plain, merge_beside=True)) == (64, 16, 1)


def test_interpreted():
    pytest.importorskip("triton")
    run_interpreted("tests.kernels.test_merge_attention", "interpreted")


def chunk_states(parts: int, heads: int, lead: int, tokens: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Outputs and logarithms as `prefill_sdpa` merges them: rows of cuDNN's, of the square from `lead` on."""
    rows = [128 * random.randint(5, 9) for _ in range(parts)]
    outs = [torch.zeros(each, heads, 64, dtype=torch.bfloat16) for each in rows]
    lses = [torch.zeros(heads, each).t() for each in rows]
    firsts = [0] * (parts - 1) + [lead]
    states = [(out[at : at + tokens], lse[at : at + tokens]) for out, lse, at in zip(outs, lses, firsts, strict=True)]
    return [out for out, _ in states], [lse for _, lse in states]


def test_no_chunk_waits_for_a_kernel():
    """What is compiled at the start serves all numbers of pieces, wherever a chunk and its pieces begin and end."""
    pytest.importorskip("triton")
    from bladellm_kernels.merge_attention_triton import compile_merges, merge_parts, merge_parts_kernel
    from bladellm_kernels.prefill_sdpa import MERGED_AT_ONCE, empty_logs

    heads = random.choice([4, 5, 16, 32])

    def kernels() -> int:
        return sum(len(cache[0]) for cache in merge_parts_kernel.device_caches.values())

    with compiled_launches():
        merge_parts_kernel.device_caches.clear()
        compile_merges(torch.empty(0, heads, 64, dtype=torch.bfloat16), MERGED_AT_ONCE)
        ready = kernels()
        assert ready == 2 * (MERGED_AT_ONCE - 1) + 1
        for parts in range(2, MERGED_AT_ONCE + 1):
            for lead in (0, 1, 4, 511):
                outs, lses = chunk_states(parts, heads, lead, random.randint(1, 129))
                merge_parts(outs, lses, torch.zeros_like(outs[0]))
        outs, lses = chunk_states(MERGED_AT_ONCE - 1, heads, 0, 100)
        logs = empty_logs(100, heads, torch.device("cpu"))
        merge_parts(outs, lses, torch.zeros_like(outs[0]), logs)
        merge_parts(outs[:3], [logs, *lses[:2]], torch.zeros_like(outs[0]))
        assert kernels() == ready
        merge_parts(outs, [lse.contiguous() for lse in lses], outs[0])
        assert kernels() == ready + 1
