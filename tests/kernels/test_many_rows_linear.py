"""The kernel of linear layers of many rows: run in Python, compiled without a GPU, and on one."""

import random
import re

import pytest
import torch
from bladellm_kernels.linear import linear_reference, linear_silu_mul_reference

from tests.kernels.conditions import assert_close
from tests.kernels.hopper import compiled_launches, spilled

pytest.importorskip("triton")

SHARED = 227 * 1024
"""Bytes of shared memory that a program may have on a Hopper."""
ON_HOPPER = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9, reason="needs a Hopper"
)


def problem(rows: int, outputs: int, inputs: int, parts: int, device: str = "cpu") -> tuple[torch.Tensor, ...]:
    """x, weight, and a result inside of a larger matrix of NaN."""
    x = torch.randn(rows, inputs, device=device).bfloat16()
    weight = (torch.randn(parts * outputs, inputs, device=device) * inputs**-0.5).bfloat16()
    out = torch.full((rows + 3, outputs + 8), torch.nan, device=device, dtype=torch.bfloat16)
    return x, weight, out[:rows, :outputs]


def assert_right(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, parts: int) -> None:
    reference = linear_silu_mul_reference if parts == 2 else linear_reference
    assert_close(out, reference(x, weight).float(), torch.bfloat16)
    assert out._base[len(x) :].isnan().all()
    assert out._base[:, out.shape[1] :].isnan().all()


@pytest.mark.parametrize("late_copies", [False, True])
@pytest.mark.parametrize("parts", [1, 2])
def test_stages_and_blocks_are_filled_read_and_written_in_order(parts, late_copies):
    """Programs with several tiles, rings longer and shorter than a tile's stages, partial tiles at every side."""
    from bladellm_kernels import many_rows_hopper as module
    from bladellm_kernels.many_rows_hopper import ManyRowsTile

    from tests.kernels.gluon_copy_engine import Described
    from tests.kernels.gluon_support import run_program

    cases = [(1, 3, 1, (300, 200, 100)), (3, 2, 2, (400, 520, 64)), (2, 4, 16, (129, 136, 24)), (5, 3, 3, (70, 72, 56))]
    for programs, stages, band, (rows, outputs, inputs) in cases:
        tile = ManyRowsTile(256, 16, stages, parts, band)
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


@pytest.mark.parametrize("parts", [1, 2])
def test_compiled_for_a_hopper(parts, monkeypatch):
    """Products follow each other without registers in memory, one under way at every wait for a stage."""
    from bladellm_kernels import many_rows_linear as module

    monkeypatch.setattr(module, "multiprocessors", lambda device: 132)
    with compiled_launches() as compiled:
        module.launch_many_rows(*problem(8192, 14336 // parts, 4096, parts), parts)
    kernel = compiled["many_rows_kernel"]
    text = kernel.asm["ptx"]
    assert kernel.metadata.shared <= SHARED
    assert spilled(text) == 0
    assert text.count("griddepcontrol.wait") == 1
    assert len(re.findall(r"wgmma\.mma_async\S+m64n256k16", text)) == 2 * module.INPUTS // 16
    assert text.count("wgmma.wait_group.sync.aligned 1") == 2


@ON_HOPPER
@pytest.mark.gpu
@pytest.mark.parametrize("sizes", [(8192, 14336, 4096), (1000, 6144, 4096), (257, 1000, 136), (5, 8, 8)], ids=str)
@pytest.mark.parametrize("parts", [1, 2])
def test_on_a_gpu(sizes, parts):
    from bladellm_kernels.many_rows_linear import launch_many_rows

    x, weight, out = problem(*sizes, parts, "cuda")
    launch_many_rows(x, weight, out, parts)
    assert_right(x, weight, out, parts)
    first = out.clone()
    launch_many_rows(x, weight, out.fill_(torch.nan), parts)
    assert torch.equal(first, out)
