"""The kernel of linear layers of many rows: run in Python, compiled without a GPU, and on one."""

import random
import re
from itertools import product
from unittest import mock

import pytest
import torch
from bladellm_kernels.linear import linear_reference, linear_silu_mul_reference
from bladellm_kernels.linear_schedules import GATE_ROWS, MANY_ROWS
from bladellm_kernels.silu_mul import silu_mul_reference

from tests.kernels.conditions import assert_close
from tests.kernels.hopper import compiled_launches, spilled
from tests.support.cases import some_pairs

pytest.importorskip("triton")

SHARED = 227 * 1024
"""Bytes of shared memory that a program may have on a Hopper."""


def problem(rows: int, outputs: int, inputs: int, parts: int, device: str = "cpu") -> tuple[torch.Tensor, ...]:
    """x, weight, and a result inside of a larger matrix of NaN."""
    x = torch.randn(rows, inputs, device=device).bfloat16()
    weight = (torch.randn(parts * outputs, inputs, device=device) * inputs**-0.5).bfloat16()
    return x, weight, result(rows, outputs, device)


def result(rows: int, outputs: int, device: str = "cpu") -> torch.Tensor:
    out = torch.full((rows + 3, outputs + 8), torch.nan, device=device, dtype=torch.bfloat16)
    return out[:rows, :outputs]


def assert_right(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, parts: int) -> None:
    reference = linear_silu_mul_reference if parts == 2 else linear_reference
    assert_close(out, reference(x, weight).float(), torch.bfloat16)
    assert out._base[len(x) :].isnan().all()
    assert out._base[:, out.shape[1] :].isnan().all()


@pytest.mark.turns
@pytest.mark.parametrize("late_copies", [False, True])
@pytest.mark.parametrize("parts", [1, 2])
def test_stages_and_blocks_are_filled_read_and_written_in_order(parts, late_copies):
    """Programs with several tiles, rings longer and shorter than a tile's stages, partial tiles at every side."""
    from bladellm_kernels import many_rows_hopper as module
    from bladellm_kernels.many_rows_hopper import ManyRowsTile

    from tests.kernels.gluon_copy_engine import Described
    from tests.kernels.gluon_support import run_program

    cases = [(1, 3, 1, (300, 200, 100)), (3, 2, 2, (400, 520, 64)), (2, 4, 16, (129, 136, 24)), (5, 3, 3, (70, 72, 56))]
    for (programs, stages, band, (rows, outputs, inputs)), groups, columns in product(cases, (1, 2), (128, 256)):
        tile = ManyRowsTile(groups, columns, 16, stages, parts, band)
        x, weight, out = problem(rows, outputs, inputs, parts)
        kept = x.clone()
        for program in random.sample(range(programs), programs):
            x.fill_(torch.nan)
            run_program(
                module.many_rows_kernel, program, late_copies, Described(x), Described(weight), Described(out),
                rows, outputs, inputs, programs=programs, on_wait=lambda x=x, kept=kept: x.copy_(kept),
                TILE=tile, EARLY=True,
            )  # fmt: skip
        assert_right(x, weight, out, parts)


@pytest.mark.parametrize(("tall", "wide"), some_pairs([(8192, 2), (64, 1)], product((128, 256), (1, 2)), 2), ids=str)
def test_compiled_for_a_hopper(tall, wide, monkeypatch):
    """Products follow each other without registers in memory, one under way at every wait for a stage."""
    from bladellm_kernels import many_rows_linear as module

    (rows, groups), (columns, parts) = tall, wide
    monkeypatch.setattr(module, "multiprocessors", lambda device: 132)
    x, weight = (torch.empty(each, 4096, dtype=torch.bfloat16) for each in (rows, 14336))
    with compiled_launches() as compiled:
        module.launch_many_rows(x, weight, result(rows, 14336 // parts), parts, columns)
    kernel = compiled["many_rows_kernel"]
    text = kernel.asm["ptx"]
    assert kernel.metadata.shared <= SHARED
    assert spilled(text) == 0
    assert text.count("griddepcontrol.wait") > groups
    assert len(re.findall(rf"wgmma\.mma_async\S+m64n{columns}k16", text)) == groups * module.INPUTS // 16
    assert text.count("wgmma.wait_group.sync.aligned 1") == groups


@pytest.mark.parametrize(
    ("rows", "outputs", "columns"),
    [
        (64, 14336, 256), (64, 13824, 256), (128, 7168, 128), (32, 6912, 128), (64, 18944, None), (64, 4096, None),
        (MANY_ROWS, 18944, 256), (8192, 4096, 256),
    ],
)  # fmt: skip
def test_tiles_of_few_rows_fill_the_multiprocessors_once(rows, outputs, columns, monkeypatch):
    """Or cuBLAS has the layer: its tiles would leave many without work, or come in two waves."""
    from bladellm_kernels import many_rows_linear

    monkeypatch.setattr(many_rows_linear, "multiprocessors", lambda device: 132)
    assert many_rows_linear.gate_columns(rows, outputs, torch.device("cpu")) == columns


class OnHopper(torch.Tensor):
    """A matrix on a CPU that says it is on a GPU."""

    is_cuda = True


@pytest.mark.parametrize(
    ("case", "taken"),
    [
        ("as they are", True),
        ("float16", True),
        ("float32", False),
        ("too few rows", False),
        ("x from an odd place on", False),
        ("outputs of odd strides", False),
        ("into wider rows", True),
        ("into rows of odd strides", False),
        ("on another GPU", False),
    ],
)
def test_the_gate_of_many_rows_takes_the_kernel(case, taken, monkeypatch):
    """Or cuBLAS, where the copy engine cannot read or write the matrices."""
    from bladellm_kernels import linear, many_rows_linear

    launched = []

    def launch(x, weight, out, parts, columns):
        launched.append(parts)
        out.copy_(linear_silu_mul_reference(x, weight))

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8 if "another" in case else 9, 0))
    monkeypatch.setattr(many_rows_linear, "launch_many_rows", launch)
    monkeypatch.setattr(many_rows_linear, "multiprocessors", lambda device: 132)
    monkeypatch.setattr(linear, "silu_mul", lambda y, out: out.copy_(silu_mul_reference(y)))
    dtype = getattr(torch, case, torch.bfloat16)
    outputs = 12 if "outputs" in case else 16
    x = torch.randn(MANY_ROWS - ("few" in case), 40).to(dtype)
    x = x[:, 1:33] if "place" in case else x[:, :32]
    weight = (torch.randn(2 * outputs, 32) / 32**0.5).to(dtype)
    out = None
    if "into" in case:
        out = torch.empty(len(x), outputs + (8 if "wider" in case else 1), dtype=dtype)[:, :outputs]
    found = linear.linear_silu_mul(x.as_subclass(OnHopper), weight.as_subclass(OnHopper), out)
    assert launched == ([2] if taken else [])
    assert out is None or found is out
    assert_close(found.as_subclass(torch.Tensor), linear_silu_mul_reference(x, weight).float(), dtype)


@pytest.mark.gpu(hopper=True)
def test_the_gate_of_many_rows_on_a_gpu(monkeypatch):
    from bladellm_kernels import many_rows_linear
    from bladellm_kernels.linear import linear_silu_mul

    cases = {
        (MANY_ROWS - 1, 1416): False, (MANY_ROWS, 1416): True, (2 * MANY_ROWS + 77, 1416): True,
        (GATE_ROWS[0], 14336): True, (65, 14336): True, (GATE_ROWS[-1], 7168): True, (40, 7168): True, (57, 6928): True,
        (GATE_ROWS[0] - 1, 14336): False, (GATE_ROWS[-1] + 1, 14336): False, (64, 1416): False,
    }  # fmt: skip
    for (rows, outputs), taken in cases.items():
        x, weight, _ = problem(rows, outputs, 520, 2, "cuda")
        with mock.patch.object(many_rows_linear, "launch_many_rows", wraps=many_rows_linear.launch_many_rows) as launch:
            found = linear_silu_mul(x, weight)
        assert launch.call_count == taken
        assert_close(found, linear_silu_mul_reference(x, weight).float(), torch.bfloat16)


@pytest.mark.gpu(hopper=True)
def test_replays_read_what_is_there_then():
    """A captured launch, its inputs written anew: nothing of the host's is needed."""
    from bladellm_kernels.linear import linear_silu_mul

    x, weight, _ = problem(MANY_ROWS + 3, 264, 136, 2, "cuda")
    linear_silu_mul(x, weight)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = linear_silu_mul(x, weight)
    for _ in range(3):
        x.copy_(torch.randn_like(x))
        found.fill_(torch.nan)
        graph.replay()
        assert_close(found, linear_silu_mul_reference(x, weight).float(), torch.bfloat16)


@pytest.mark.gpu(hopper=True)
@pytest.mark.parametrize(
    "sizes",
    [(8192, 14336, 4096), (1000, 6144, 4096), (257, 1000, 136), (128, 14336, 4096), (33, 7168, 4096), (5, 8, 8)],
    ids=str,
)
@pytest.mark.parametrize("columns", [128, 256])
@pytest.mark.parametrize("parts", [1, 2])
def test_on_a_gpu(sizes, columns, parts):
    from bladellm_kernels.many_rows_linear import launch_many_rows

    x, weight, out = problem(*sizes, parts, "cuda")
    launch_many_rows(x, weight, out, parts, columns)
    assert_right(x, weight, out, parts)
    first = out.clone()
    launch_many_rows(x, weight, out.fill_(torch.nan), parts, columns)
    assert torch.equal(first, out)
