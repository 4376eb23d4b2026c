"""Triton kernels as their launches compile them for sm_90, without a GPU."""

import io
import os
import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

import pytest

REPORTS: dict[str, str] = {}
"""What the assembler said of the PTX of `compiled_launches`."""


@contextmanager
def compiled_launches() -> Iterator[dict[str, Any]]:
    """What the kernels launched inside compile to, by name; none runs. Launches are early ones, as on a Hopper."""
    from bladellm_kernels import early_launch
    from triton import knobs
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    class Hopper:
        def get_current_device(self) -> int:
            return 0

        def get_current_stream(self, device: int) -> int:
            return 0

        def get_current_target(self) -> GPUTarget:
            return GPUTarget("cuda", 90, 32)

    compiled: dict[str, Any] = {}
    run = JITFunction.run

    def compile_only(self: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> None:
        with redirect_stdout(io.StringIO()) as printed:
            kernel = run(self, *arguments, grid=grid, warmup=True, **options)
        compiled[self.__name__] = kernel
        assert not products_left_under_way(kernel.asm["ttgir"]), self.__name__
        if "ptxas info" in printed.getvalue():  # not where triton's cache had the kernel
            REPORTS[kernel.asm["ptx"]] = printed.getvalue()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(knobs.nvidia, "dump_ptxas_log", True)
        patch.setattr(driver, "_active", Hopper())
        patch.setattr(JITFunction, "run", compile_only)
        patch.setattr(early_launch, "can_launch_early", lambda device: True)
        yield compiled


def products_left_under_way(ttgir: str) -> list[str]:
    """Products that a round of a loop leaves to the next one unwaited for, although their left operands, in registers,
    can be made anew there before anything has waited. Triton 3.6 compiles such kernels; an H200 gets them wrong."""
    made_of: dict[str, set[str]] = {}
    waits: set[str] = set()
    products: dict[str, str] = {}
    left = []
    for line in ttgir.splitlines():
        results, _, rest = line.partition(" = ")
        names = re.findall(r"%\w+", rest)
        if made := re.match(r"\s*(%\w+)(:\d+)?$", results):
            made_of[made[1]] = set(names)
            if "warp_group_dot_wait" in rest and "pendings = 0" in rest:
                waits.add(made[1])
            if re.search(r"warp_group_dot %.*isAsync = true.*ttg\.dot_op<", rest):
                products[made[1]] = names[0]
        elif "scf.yield" in line:
            unwaited = [name for name in re.findall(r"%\w+(?![#\w])", line) if name in products]
            left += [name for name in unwaited if not waits & _sources(products[name], made_of)]
    return left


def _sources(name: str, made_of: dict[str, set[str]]) -> set[str]:
    """Everything that a value was made of."""
    found, asked = {name}, [name]
    while asked:
        for source in made_of.get(asked.pop(), set()) - found:
            found.add(source)
            asked.append(source)
    return found


def spilled(ptx: str) -> int:
    """Bytes of registers that the assembler puts into memory."""
    report = REPORTS.get(ptx) or assembler_report(ptx)
    return sum(int(part.split()[-1]) for part in report.split(" bytes spill stores")[:-1])


def assembler_report(ptx: str) -> str:
    triton = pytest.importorskip("triton")
    assembler = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas"
    line = [str(assembler), "-v", "-arch=sm_90a", "-", "-o", os.devnull]
    return subprocess.run(line, input=ptx, capture_output=True, text=True, check=True).stderr


def waits_before_it_writes(ptx: str) -> bool:
    """Whether every program waits for the kernels before it, and allows the next, ahead of its first store."""
    first_store = ptx.find("st.global")
    return -1 < ptx.find("griddepcontrol.wait") < first_store and -1 < ptx.find("griddepcontrol.launch") < first_store
