"""What each rank's process does in the tests of `AllReduce`."""

import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from bladellm_kernels.all_reduce import AllReduce, Bounds, all_reduce_reference
from bladellm_kernels.rms_norm import rms_norm_reference

from tests.kernels.conditions import DTYPES, assert_close

ONE_STEP, TWO_STEPS, COLLECTIVES = Bounds(64 << 20, 0), Bounds(0, 64 << 20), Bounds(0, 0)
SHAPES = [
    (torch.bfloat16, 64), (torch.bfloat16, 1000), (torch.bfloat16, 8192), (torch.float16, 4096), (torch.float32, 1000),
    (torch.float32, 8192),
]  # fmt: skip
EPS, CALLS, REPLAYS, MOST_ROWS = 1e-5, 125, 8, 80


def connect(rank: int, ranks: int, meet: str) -> torch.device:
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", init_method=f"file://{meet}", rank=rank, world_size=ranks, device_id=device)
    return device


@contextmanager
def group_of(rank: int, ranks: int, meet: str) -> Iterator[torch.device]:
    yield connect(rank, ranks, meet)
    torch.cuda.synchronize()
    dist.destroy_process_group()


def everyones(x: torch.Tensor, ranks: int) -> list[torch.Tensor]:
    parts = [torch.empty_like(x) for _ in range(ranks)]
    dist.all_gather(parts, x.contiguous())
    return parts


def assert_same_bits(x: torch.Tensor, ranks: int) -> None:
    for other in everyones(x.view(torch.uint8), ranks):
        assert torch.equal(x.view(torch.uint8), other)


def shared_random(*shape: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """The same on all ranks."""
    x = torch.randn(shape, device=device).to(dtype)
    dist.broadcast(x, 0)
    return x


def check_sums(rank: int, ranks: int, meet: str, seed: int) -> None:
    with group_of(rank, ranks, meet) as device:
        torch.manual_seed(seed + rank)
        for dtype, hidden in SHAPES:
            for bounds in (ONE_STEP, TWO_STEPS, COLLECTIVES):
                group = AllReduce(dist.group.WORLD, rows=300, hidden=hidden, dtype=dtype, device=device, bounds=bounds)
                assert (group.fast_rows > 0) == (bounds is not COLLECTIVES)
                for rows in (1, 3, 17, 300, 301):
                    exact = bounds is not COLLECTIVES and rows <= group.fast_rows
                    check_sum(group, rows, hidden, dtype, device, exact)


def check_sum(group: AllReduce, rows: int, hidden: int, dtype: torch.dtype, device: torch.device, exact: bool) -> None:
    y = torch.randn(rows, hidden, device=device).to(dtype)
    y[torch.rand(y.shape, device=device) < 0.05] = -0.0
    residual, weight = (shared_random(*shape, dtype=dtype, device=device) for shape in ((rows, hidden), (hidden,)))
    total = all_reduce_reference(everyones(y, group.size))
    reduced = group.all_reduce(y.clone())
    normed, stream = group.add_norm(y.clone(), residual.clone(), weight, EPS)
    again, norm = group.add_delayed_norm(y.clone(), residual.clone(), weight, EPS)
    for each in (reduced, normed, stream, again, norm.weighted, norm.squares):
        assert_same_bits(each, group.size)
    if exact:
        assert torch.equal(reduced, total.to(dtype))
        assert torch.equal(stream, (total + residual.float()).to(dtype))
    assert_close(reduced / group.size, total / group.size, dtype)
    assert_close(stream / group.size, (total + residual.float()) / group.size, dtype)
    assert torch.equal(stream, again)
    assert_close(normed, rms_norm_reference(stream, weight, EPS), dtype)
    torch.testing.assert_close(norm.squares.sum(1), stream.float().square().sum(1), rtol=1e-5, atol=1e-3)
    assert torch.equal(norm.weighted, stream * weight)


def check_copies(rank: int, ranks: int, meet: str, seed: int) -> None:
    """Random layers in parts, ranks late by chance, beside products that hold all multiprocessors; then one whole."""
    with group_of(rank, ranks, meet) as device:
        chance, late = random.Random(seed), random.Random(seed + 1 + rank)
        torch.manual_seed(seed)
        group = AllReduce(
            dist.group.WORLD, rows=8, hidden=1000, dtype=torch.bfloat16, device=device, copied_rows=5000
        )  # fmt: skip
        assert group.copied_rows == (5000 if ranks == 2 else 0)
        weight, busy = torch.randn(1000, device=device).bfloat16(), torch.randn(4096, 4096, device=device).bfloat16()
        for _ in range(200):
            rows = chance.choice([2, 17, 300, 4999, 5000, 5001])
            y, residual = (torch.randn(*size, rows, 1000, device=device).bfloat16() for size in ((ranks,), ()))
            cut, normed, total = chance.randint(1, rows - 1), torch.empty_like(residual), residual.clone()
            mine, parts, sums = torch.empty_like(residual), (slice(0, cut), slice(cut, rows)), []
            for part in parts:
                torch.cuda._sleep(late.randint(0, 300_000))
                mine[part] = y[rank, part]
                sums.append(group.start_sum(mine[part], part.start))
                busy.matmul(busy)
            for part, pending in zip(parts, sums, strict=True):
                pending.add_norm(total[part], weight, EPS, normed[part])
                torch.cuda._sleep(late.randint(0, 100_000))
            # Their memory may be had by what comes next.
            mine.fill_(torch.nan)
            expected = all_reduce_reference(list(y)) + residual.float()
            if ranks == 2 and rows <= 5000:
                assert torch.equal(total, expected.bfloat16())
            assert_close(total / ranks, expected / ranks, torch.bfloat16)
            assert_close(normed, rms_norm_reference(total, weight, EPS), torch.bfloat16)
            assert_same_bits(total, ranks)
        group.all_reduce(torch.ones(3, 1000, dtype=torch.bfloat16, device=device))


def check_gathers(rank: int, ranks: int, meet: str, seed: int) -> None:
    with group_of(rank, ranks, meet) as device:
        torch.manual_seed(seed + rank)
        for dtype in DTYPES:
            for columns in (64, 4032, 16032):
                group = AllReduce(
                    dist.group.WORLD, rows=64, hidden=64, dtype=dtype, device=device,
                    gather_rows=64, gather_columns=columns, gather_dtype=dtype,
                )  # fmt: skip
                for rows in (1, 5, 64, 65):
                    x = torch.randn(rows, columns, device=device).to(dtype)
                    found = group.all_gather_last(x)
                    assert torch.equal(found, torch.cat(everyones(x, ranks), 1))
                    assert torch.equal(group.all_gather_last(x[0]), found[0])


@dataclass
class Call:
    """One call of a graph: what goes in, of rank 0, scaled anew for each replay, and what came out."""

    first: torch.Tensor
    residual: torch.Tensor
    scaled: torch.Tensor
    stream: torch.Tensor
    normed: torch.Tensor


def check_graphs(rank: int, ranks: int, meet: str, seed: int) -> None:
    """1,000 calls of random kinds and rows, ranks late by chance in each; replays begin in different turns."""
    with group_of(rank, ranks, meet) as device:
        torch.manual_seed(seed)
        for bounds in (ONE_STEP, TWO_STEPS, Bounds(ranks * (64 << 10), 64 << 20)):
            group = AllReduce(
                dist.group.WORLD, rows=MOST_ROWS, hidden=2048, dtype=torch.bfloat16, device=device, bounds=bounds
            )
            chance, late = random.Random(seed), random.Random(seed + 1 + rank)
            scale = torch.ones((), device=device)
            weight = shared_random(2048, dtype=torch.bfloat16, device=device)
            calls = [make_call(chance.randint(1, MOST_ROWS), device) for _ in range(CALLS)]
            kinds = [chance.choice(["sum", "norm", "delayed"]) for _ in calls]
            graph = captured(group, calls, kinds, scale, weight, late)
            for replay in range(REPLAYS):
                scale.fill_(1 + replay / 4)
                graph.replay()
                torch.cuda.synchronize()
                for call, kind in zip(calls, kinds, strict=True):
                    check_call(call, kind, float(scale), weight, ranks)


def make_call(rows: int, device: torch.device) -> Call:
    first, residual = (shared_random(rows, 2048, dtype=torch.bfloat16, device=device) for _ in range(2))
    return Call(first, residual, *(torch.empty_like(first) for _ in range(3)))


def captured(
    group: AllReduce, calls: list[Call], kinds: list[str], scale: torch.Tensor, weight: torch.Tensor,
    late: random.Random,
) -> torch.cuda.CUDAGraph:  # fmt: skip
    def run() -> None:
        for call, kind in zip(calls, kinds, strict=True):
            if late.random() < 0.3:
                torch.cuda._sleep(late.randint(0, 200_000))
            call.scaled.copy_(call.first * (dist.get_rank() + 1) * scale)
            call.stream.copy_(call.residual)
            if kind == "sum":
                call.stream.copy_(group.all_reduce(call.scaled.clone()))
            elif kind == "norm":
                call.normed.copy_(group.add_norm(call.scaled.clone(), call.stream, weight, EPS)[0])
            else:
                call.normed.copy_(group.add_delayed_norm(call.scaled.clone(), call.stream, weight, EPS)[1].normed())

    graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()
    torch.cuda.current_stream().wait_stream(side)
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        run()
    return graph


def check_call(call: Call, kind: str, scale: float, weight: torch.Tensor, ranks: int) -> None:
    """A rank's rows are rank + 1 times those of rank 0, so that each knows all."""
    total = all_reduce_reference([call.first * (rank + 1) * scale for rank in range(ranks)])
    if kind == "sum":
        assert torch.equal(call.stream, total.bfloat16())
        return
    assert torch.equal(call.stream, (total + call.residual.float()).bfloat16())
    assert_close(call.normed, rms_norm_reference(call.stream, weight, EPS), torch.bfloat16)


def check_absence(rank: int, ranks: int, meet: str) -> None:
    """Rank 1 does not make the call: the kernel of rank 0 ends with an error after so many looks, not never."""
    from bladellm_kernels.rank_sums_triton import launch_sum_ranks

    device = connect(rank, ranks, meet)
    group = AllReduce(dist.group.WORLD, rows=8, hidden=256, dtype=torch.float32, device=device)
    assert group._one is not None
    y = torch.ones(2, 256, device=device)
    group.all_reduce(y)
    assert torch.equal(y, torch.full_like(y, ranks))
    if rank == 0:
        launch_sum_ranks(group._one, y, y, 1, polls=1000)
        with pytest.raises(RuntimeError, match="CUDA error"):
            torch.cuda.synchronize()
    # The device of rank 0 is of no use to this process any more, so the group cannot be left in good order.
    os._exit(0)
