"""The Hopper kernel of `linear`: run in Python, compiled without a GPU, and on one."""

import random
import re
from dataclasses import replace
from functools import partial
from itertools import pairwise

import pytest
import torch
from bladellm_kernels.linear_schedules import HopperSchedule, default_hopper_schedule

from tests.kernels.conditions import assert_close
from tests.kernels.hopper import spilled
from tests.kernels.linear_support import linear_call
from tests.kernels.test_linear import expected_of

pytest.importorskip("triton")

SHARED_HALF = 233472 // 2 - 1024
"""Bytes of a Hopper multiprocessor's shared memory that two programs may have each."""


def run_in_python(call, schedule: HopperSchedule, programs: int, late_copies: bool) -> None:
    """A launch on the CPU, programs in any order; all but weights is NaN until the kernel waits for its inputs."""
    from bladellm_kernels import linear_hopper as module
    from bladellm_kernels.linear_launch import (
        most_segments,
        new_workspace,
        norm_arguments,
        tile_of,
        workspace_sizes,
    )

    from tests.kernels.gluon_copy_engine import Described
    from tests.kernels.gluon_support import run_program

    tile = tile_of(call, schedule)._replace(prefetch=16)
    length, blocks = -(-call.inputs // tile.inputs), -(-call.outputs // tile.outputs)
    programs = min(programs, length * blocks)
    workspace = new_workspace(call.x.device, *workspace_sizes(call, schedule, programs))
    workspace.partial.fill_(torch.nan)
    for program in random.sample(range(programs), programs):
        # The residual may lie where earlier programs have written.
        inputs = [call.x, call.residual, call.front and call.front.squares]
        inputs = [each for each in inputs if each is not None]
        values = [each.clone() for each in inputs]
        for each in inputs:
            each.fill_(torch.nan)
        prefetched = run_program(
            module.hopper_linear_kernel, program, late_copies,
            Described(call.x), Described(call.weight), call.weight, call.weight.stride(0), call.bias, call.residual,
            call.out, *norm_arguments(call), workspace.partial, workspace.counters, len(call.x), call.outputs,
            call.inputs, *call.strides[2:],
            programs=programs, on_wait=partial(copy_all, inputs, values),
            TILE=tile, SEGMENTS=most_segments(length, blocks * length, programs), EARLY=True,
        )  # fmt: skip
        for first, size in prefetched:
            row, column = first // call.weight.stride(0), first % call.weight.stride(0)
            assert ((row < len(call.weight)) & (column % 8 == 0) & (size % 16 == 0) & (size > 0)).all()
            assert (column + size // 2 <= call.inputs).all()
    assert not workspace.counters.any()


def copy_all(targets: list[torch.Tensor], values: list[torch.Tensor]) -> None:
    for target, value in zip(targets, values, strict=True):
        target.copy_(value)


@pytest.mark.parametrize("late_copies", [False, True])
@pytest.mark.parametrize("parts", [1, 2])
def test_every_stage_is_filled_before_it_is_read_and_read_before_it_is_filled(parts, late_copies):
    for programs, stages, sizes in [
        (1, 3, (5, 34, 104)), (3, 2, (8, 32, 160)), (8, 4, (1, 50, 88)), (5, 3, (7, 10, 200)), (9, 2, (3, 33, 16))
    ]:  # fmt: skip
        schedule = HopperSchedule(8, 16, 16, stages=stages, late=programs % 4)
        call = linear_call(sizes, torch.bfloat16, parts, extras=programs > 1)
        run_in_python(call, schedule, programs, late_copies)
        assert_close(call.out, expected_of(call), torch.bfloat16)
        assert call.out._base[sizes[0] :].isnan().all()
        assert call.out._base[:, sizes[1] :].isnan().all()


def check_norms(call, residual: torch.Tensor | None) -> None:
    """The outputs against float64, with the factors of the norm in front; the norm behind against the outputs."""
    dtype = call.x.dtype
    normed = call
    if call.front is not None:
        normed = replace(call, x=call.x.double() * call.front.factors().double()[:, None])
    assert_close(call.out, expected_of(replace(normed, residual=residual)), dtype)
    if call.behind is not None:
        assert_close(call.behind.weighted, call.out.float() * call.behind.weight.float(), dtype)
        blocks = torch.split(call.out.float().square(), -(-call.outputs // call.behind.squares.shape[1]), dim=1)
        expected = torch.stack([block.sum(1) for block in blocks], 1)
        torch.testing.assert_close(call.behind.squares, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("late_copies", [False, True])
@pytest.mark.parametrize(("parts", "front", "behind"), [(1, True, False), (2, True, False), (1, False, True)])
def test_norms_in_front_and_behind(parts, front, behind, late_copies):
    from tests.kernels.linear_support import with_norms

    for programs, stages, sizes in [(1, 3, (5, 32, 104)), (7, 2, (8, 64, 160)), (5, 3, (7, 16, 200))]:
        for extras in (False, True):
            call = linear_call(sizes, torch.bfloat16, parts, extras)
            call = with_norms(call, sizes[1] // 16, front, behind)
            residual = None if call.residual is None else call.residual.clone()
            if behind and extras:
                call.out.copy_(residual)
                call = replace(call, residual=call.out)
            schedule = HopperSchedule(8, 16, 16, stages=stages)
            run_in_python(call, schedule, programs, late_copies)
            check_norms(call, residual)


@pytest.mark.parametrize(("parts", "norms"), [(1, ["front"]), (2, ["front"]), (1, ["behind"])], ids=str)
@pytest.mark.parametrize("rows", [8, 16, 32])
def test_with_norms_it_fits_two_programs_to_a_multiprocessor(parts, norms, rows, monkeypatch):
    from tests.kernels.linear_support import compiled_for_hopper

    schedule = default_hopper_schedule(rows - 1, gated=parts == 2)
    compiled = compiled_for_hopper(monkeypatch, (rows - 1, 6144, 4096), schedule, parts, norms=norms)
    text = compiled.asm["ptx"]
    before, after = text.split("griddepcontrol.wait")
    assert not re.search(r"(ld|st|atom|red)\.global", before)
    assert "st.global" in after
    assert spilled(text) == 0
    assert compiled.metadata.shared <= SHARED_HALF


@pytest.mark.parametrize("late", [0, 9])
@pytest.mark.parametrize("sizes", [(8, 128, 64, 6, 1), (32, 64, 64, 5, 2), (64, 128, 64, 4, 1)], ids=str)
def test_the_weight_is_on_its_way_before_the_inputs_are_ready(sizes, late, monkeypatch):
    from tests.kernels.linear_support import compiled_for_hopper

    block_m, block_n, block_k, stages, parts = sizes
    schedule = HopperSchedule(block_m, block_n, block_k, stages=stages, late=late, prefetch=late * 4096)
    compiled = compiled_for_hopper(monkeypatch, (block_m - 1, 6144, 4096), schedule, parts)
    text = compiled.asm["ptx"]
    before, after = text.split("griddepcontrol.wait")
    assert "griddepcontrol.launch_dependents" in (after if late else before)
    assert before.count("cp.async.bulk.prefetch.L2") == (parts if late else 0)
    assert before.count("cp.async.bulk.tensor") == stages * parts
    assert after.count("cp.async.bulk.tensor") == stages + parts + 1
    assert not re.search(r"(ld|st|atom|red)\.global", before)
    assert "wgmma.mma_async" in after
    assert spilled(text) == 0
    assert compiled.metadata.shared <= SHARED_HALF


def gpu_calls(dtype):
    for parts, (outputs, inputs), extras in [
        (1, (77, 4096), True), (2, (77, 528), False), (1, (3000, 528), False), (2, (3008, 4096), True)
    ]:  # fmt: skip
        for schedule in (
            HopperSchedule(8, 128, 64), HopperSchedule(16, 64, 128, stages=5), HopperSchedule(64, 128, 64, 0, 3),
            HopperSchedule(64, 64, 64, 2, 4), HopperSchedule(128, 128, 64, 1, 4, 8),
        ):  # fmt: skip
            for rows in {1, schedule.block_m - 3, schedule.block_m}:
                yield linear_call((rows, outputs, inputs), dtype, parts, extras, "cuda"), schedule


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_on_a_gpu(dtype):
    from bladellm_kernels.linear_launch import launch

    for call, schedule in gpu_calls(dtype):
        launch(call, schedule)
        first = call.out.clone()
        assert_close(first, expected_of(call), dtype)
        rows, outputs = call.out.shape
        assert call.out._base[rows:].isnan().all()
        assert call.out._base[:, outputs:].isnan().all()
        for _ in range(3):
            call.out.fill_(torch.nan)
            launch(call, schedule)
            assert torch.equal(call.out, first), "the same bits whoever comes last"


@pytest.mark.gpu
@pytest.mark.parametrize("late", [0, 6])
@pytest.mark.parametrize("rows", [1, 8, 33])
def test_a_captured_chain_of_layers_gives_the_same_bits_at_every_replay(rows, late):
    """Every layer starts beside the one in front, whose outputs are its inputs; some have a few tiles only."""
    from bladellm_kernels.linear_launch import LinearCall, launch

    widths = [4096, 6144, 64, 4096, 1024, 28672, 4096, 4096, 160, 2048]
    dtype, device = torch.bfloat16, "cuda"
    weights = [torch.randn(n, k, dtype=dtype, device=device) * k**-0.5 for k, n in pairwise(widths)]
    values = [torch.randn(rows, width, dtype=dtype, device=device) for width in widths]
    schedule = HopperSchedule(64, 64, 64, stages=4) if rows > 8 else HopperSchedule(8, 128, 64)
    schedule = replace(schedule, late=late, prefetch=late * 4096)
    calls = [LinearCall(x, w, None, None, y, 1) for (x, y), w in zip(pairwise(values), weights, strict=True)]

    def chain() -> None:
        for call in calls:
            launch(call, schedule)

    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        for call in calls:
            launch(call, schedule)
            torch.cuda.synchronize()
            assert_close(call.out, expected_of(call), dtype)
        expected = values[-1].clone()
        with torch.cuda.graph(graph, stream=stream):
            chain()
        for _ in range(50):
            for value in values[1:]:
                value.fill_(torch.nan)
            for _ in range(3):
                graph.replay()
            assert torch.equal(values[-1], expected)


@pytest.mark.gpu
def test_it_refuses_what_the_copy_engine_cannot_read():
    from bladellm_kernels.linear_hopper import takes
    from bladellm_kernels.linear_launch import LinearCall, launch

    whole = torch.zeros(9, 65, dtype=torch.float16, device="cuda")
    x, weight = whole[:, :64], torch.zeros(32, 64, dtype=torch.float16, device="cuda")
    assert takes(weight, weight)
    assert takes(x[:1], weight)
    assert not takes(x, weight)
    assert not takes(weight, whole[:, 1:])
    assert not takes(weight[:, :60], weight[:, :60])
    with pytest.raises(ValueError, match="16 bytes"):
        launch(LinearCall(x, weight, None, None, whole.new_empty(9, 32), 1), HopperSchedule(16, 64, 64))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_norms_on_a_gpu(dtype):
    from bladellm_kernels.linear_launch import launch

    from tests.kernels.linear_support import with_norms

    for schedule in (
        HopperSchedule(8, 128, 64),
        HopperSchedule(8, 64, 64),
        HopperSchedule(64, 64, 64, stages=4),
        HopperSchedule(128, 128, 64, 1, 4, 8),
    ):
        for parts, behind, rows in [(1, False, 1), (1, True, 7), (2, False, 8), (1, True, 8)]:
            call = linear_call((rows, 3072, 4096), dtype, parts, device="cuda")
            call = with_norms(call, 3072 // schedule.block_n, not behind, behind)
            residual = torch.randn_like(call.out) if behind else None
            call = replace(call, residual=None if residual is None else call.out)
            results = []
            for _ in range(4):
                call.out.fill_(torch.nan) if residual is None else call.out.copy_(residual)
                launch(call, schedule)
                check_norms(call, residual)
                results.append((call.out.clone(), call.behind.squares.clone() if behind else call.out))
            assert all(torch.equal(*pair) for other in results for pair in zip(results[0], other, strict=True))
