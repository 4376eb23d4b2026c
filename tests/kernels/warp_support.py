"""Kernels of warps with rings of their own: random calls of decode attention, and their sources for the host."""

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from bladellm_kernels.decode_call import DecodeCall
from bladellm_kernels.decode_schedule import PRIVATE_SCHEDULE, DecodeSchedule
from bladellm_kernels.decode_work import DecodeWork

from tests.kernels.decode_support import Case
from tests.kernels.test_ring_decode import random_work

HERE = Path(__file__).parent
TYPES = [torch.bfloat16, torch.float16]
SCHEDULES = {
    2: PRIVATE_SCHEDULE,
    3: DecodeSchedule(128, 4, 4, 3, merge_beside=True, private_rings=True),
    4: DecodeSchedule(128, 3, 4, 4, merge_beside=True, private_rings=True),
}
"""By programs of an SM."""
MERGE_SHARED_BYTES = 1336
LENS = (1, 31, 32, 33, 127, 128, 129, 0)


def planned_call(case: Case, schedule: DecodeSchedule, programs: int) -> DecodeCall:
    """With cuts anywhere, and all that is written poisoned."""
    work = random_work(case, schedule, None, programs)
    return DecodeCall(*case.memory, case.scale, work, torch.full_like(case.q, torch.nan))


def merged(work: DecodeWork, out: torch.Tensor) -> torch.Tensor:
    """What the kernel behind makes of the states, float32: by the definition of the logarithms."""
    whole = out.float()
    for sequence, (_, _, _, first, count) in enumerate(work.sequences.tolist()):
        if count == 0:
            assert out[sequence].isnan().all(), "nothing is written for a sequence of length 0"
            whole[sequence] = 0
        elif count > 1:
            weights = work.lse[first : first + count].softmax(0)
            whole[sequence] = (work.partial[first : first + count] * weights[:, :, None]).sum(0)
    return whole


def compile_on_host(
    kernel: list[Path], runner: Path, defines: dict[str, int | str], threads: int, folder: Path
) -> ctypes.CDLL:
    """A kernel's source, but for the instructions that it names, compiled for the host; `run` of the runner starts it.
    threads: of a CTA."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("there is no compiler for the host")
    files = HERE / "warp_on_host.h", *kernel, HERE / "warp_ctas_on_host.h", runner
    (folder / "host.cpp").write_text("\n".join(file.read_text() for file in files))
    macros = [f"-D{name}={value}" for name, value in {"HOST_THREADS": threads, **defines}.items()]
    line = [compiler, "-std=c++17", "-O1", "-w", "-shared", "-fPIC", *macros, "host.cpp", "-o", "host.so"]
    subprocess.run(line, cwd=folder, check=True, capture_output=True, timeout=300)
    library = ctypes.CDLL(str(folder / "host.so"))
    library.run.restype = ctypes.c_long
    return library
