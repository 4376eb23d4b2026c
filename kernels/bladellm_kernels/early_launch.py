"""Programmatic dependent launch: a kernel may start while the one before it on its stream still runs (sm_90 on).

A kernel launched with `early_launch(...)` must call `wait_for_inputs` in every program, where groups of warps run apart
in each of them, before it reads anything that an earlier kernel wrote and before it writes anything at all; what came
before that call (index arithmetic, weights, tables made once a step) overlaps the end of the kernel before.
`let_next_start` says that the next kernel may begin to start; it orders no memory, so it may come at once. In a
captured CUDA graph the two become a programmatic edge. Source: CUDA C++ Programming Guide, "Programmatic Dependent
Launch".
"""

from functools import cache

import torch
import triton
import triton.language as tl

from bladellm_kernels.shared_memory import prefer_shared_memory


def early_launch(device: torch.device) -> dict[str, bool]:
    """Launch options, EARLY among them for the kernel's constexpr of that name."""
    if not can_launch_early(device):
        return {"EARLY": False}
    prefer_shared_memory()
    return {"EARLY": True, "launch_pdl": True}


@cache
def can_launch_early(device: torch.device) -> bool:
    """Whether the device has programmatic dependent launch."""
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device) >= (9, 0)


@triton.jit  # type: ignore[untyped-decorator]
def wait_for_inputs(EARLY: tl.constexpr) -> None:
    """Wait until the kernels before this one have ended and what they wrote can be read."""
    if EARLY:
        tl.extra.cuda.gdc_wait()


@triton.jit  # type: ignore[untyped-decorator]
def let_next_start(EARLY: tl.constexpr) -> None:
    """Allow the next kernel on the stream to start its programs where there is room for them."""
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit  # type: ignore[untyped-decorator]
def clock() -> tl.tensor:
    """Nanoseconds, the lower 32 bits; a Hopper counts them in steps of 32."""
    return tl.inline_asm_elementwise("mov.u32 $0, %globaltimer_lo;", "=r", [], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit  # type: ignore[untyped-decorator]
def leave_after(STAY: tl.constexpr) -> tl.tensor:
    """When a program may leave its multiprocessor that stays for STAY ns from now; for `stay_until`."""
    leaves = 0
    if STAY > 0:
        leaves = clock() + STAY
    return leaves


@triton.jit  # type: ignore[untyped-decorator]
def stay_until(leaves: tl.tensor, STAY: tl.constexpr) -> None:
    """Keep a program, also one with work, on its multiprocessor: programs of the next kernel start where there is room
    for them, and two would share one that is left early. STAY: as in `leave_after`; 0 for not at all."""
    if STAY > 0:
        # The clock overflows every 4 s, its differences do not.
        while clock() - leaves < 0:
            pass


@triton.jit  # type: ignore[untyped-decorator]
def linger(without_work: tl.tensor, IDLE: tl.constexpr, STAY: tl.constexpr) -> tl.tensor:
    """Keep a program without work on its multiprocessor for IDLE ns, until the programs of the next linear layer have
    theirs. Returns `leave_after` of those that have work.

    They start where there is room: without this two of them share one of those that are left first, others have none,
    and since each linear layer starts beside the one before it that goes on through the whole step (on an H200 4.8 ms
    instead of 4.3 for one sequence of 512 tokens).
    """
    leaves = leave_after(STAY)
    if IDLE > 0:
        tl.inline_asm_elementwise(
            "nanosleep.u32 $1; mov.u32 $0, 0;", "=r,r", [without_work.to(tl.int32) * IDLE],
            dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip
    return leaves
