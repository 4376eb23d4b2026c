"""The Gluon kernels of unit weights run in Python, for tensors on the CPU."""

import itertools
import random
from functools import partial

import pytest
import torch


def run_units_in_python(monkeypatch: pytest.MonkeyPatch, late_copies: bool, *inputs: torch.Tensor) -> None:
    """From now on their launches run in Python, programs in random order; `inputs` are what other kernels write."""
    from bladellm_kernels import ring_launch, unit_launch

    from tests.kernels.gluon_copy_engine import Described

    for module, name in (
        (unit_launch, "gemv_units_kernel"), (unit_launch, "stream_units_kernel"), (ring_launch, "ring_units_kernel")
    ):  # fmt: skip
        monkeypatch.setattr(module, name, InPython(getattr(module, name), inputs, late_copies))
    count = random.randint(1, 9)
    monkeypatch.setattr(unit_launch, "multiprocessors", lambda device: count)
    monkeypatch.setattr(ring_launch, "multiprocessors", lambda device: count)
    monkeypatch.setattr(ring_launch, "described", lambda matrix, *block: Described(matrix))
    monkeypatch.setattr(
        ring_launch, "_described_units", lambda weight, tile: Described(ring_launch.units_by_part(weight, tile.parts))
    )


class InPython:
    """Stands for a kernel: its programs are run in Python; what other kernels write is NaN until one waits for it."""

    def __init__(self, kernel, inputs, late_copies) -> None:
        self.kernel, self.inputs, self.late_copies = kernel, inputs, late_copies

    def __getitem__(self, grid):
        from tests.kernels.gluon_support import run_program

        def launch(*arguments, num_warps, EARLY, maxnreg=None, **constants) -> None:
            programs = list(itertools.product(*map(range, grid)))
            for program in random.sample(programs, len(programs)):
                values = [each.clone() for each in self.inputs]
                for each in self.inputs:
                    each.fill_(torch.nan)
                run_program(
                    self.kernel, program, self.late_copies, *arguments, programs=grid[0], EARLY=True,
                    on_wait=partial(copy_all, self.inputs, values), **constants,
                )  # fmt: skip

        return launch


def copy_all(targets, values) -> None:
    for target, value in zip(targets, values, strict=True):
        target.copy_(value)
