"""Probes of the GPUs. Without a GPU each says so as a WARNING; torch is imported only where there is one."""

import ctypes
import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bladellm_tools.check.args import CheckArgs
from bladellm_tools.check.finding import Finding, failed, passed, warned
from bladellm_tools.console import gib

MIB = 1024**2
QUERY = "index,name,memory.total,memory.used"
IDLE_SHARE, BUSY_SHARE = 0.01, 0.05
EVEN_RATIO, UNEVEN_RATIO = 1.05, 1.15
MATMUL_SIZE, MATMUL_REPEATS = 8192, 10
NO_DEVICE = warned("skipped: no device")


@dataclass(frozen=True)
class Gpu:
    """A device as the driver's tool lists it; sizes in bytes."""

    index: int
    name: str
    total: int
    used: int


def device_nodes(root: Path = Path("/dev")) -> bool:
    """True when the kernel offers a GPU, whether or not any library can use it."""
    return any(root.glob("nvidia[0-9]*")) or (root / "kfd").exists() or (root / "dxg").exists()


def list_gpus() -> list[Gpu]:
    """The driver's list; empty where its tool is missing or finds none."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    command = [tool, f"--query-gpu={QUERY}", "--format=csv,noheader,nounits"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return parse_gpus(done.stdout) if done.returncode == 0 else []


def parse_gpus(text: str) -> list[Gpu]:
    """nvidia-smi's comma-separated lines, sizes in MiB; lines that are something else are left out."""
    gpus = []
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) == 4 and all(cells[place].isdigit() for place in (0, 2, 3)):
            gpus.append(Gpu(int(cells[0]), cells[1], int(cells[2]) * MIB, int(cells[3]) * MIB))
    return gpus


def check_gpu_visible(_: CheckArgs) -> Finding:
    """torch sees every device that the driver lists and CUDA_VISIBLE_DEVICES leaves."""
    gpus = list_gpus()
    if not gpus and not device_nodes():
        return NO_DEVICE
    import torch

    return judge_visible(gpus, torch.cuda.device_count(), os.environ.get("CUDA_VISIBLE_DEVICES"), torch.__version__)


def judge_visible(gpus: list[Gpu], seen: int, visible: str | None, torch_version: str) -> Finding:
    """Devices hidden on purpose are a WARNING when none is left; devices lost otherwise are a FAILED."""
    names = ", ".join(f"{gpu.name} {gib(gpu.total)}" for gpu in gpus)
    detail = f"torch sees {seen} of {len(gpus) or 'an unknown number of'} devices{f': {names}' if names else ''}"
    if visible is not None:
        expected = len([item for item in visible.split(",") if item.strip() not in ("", "-1")])
        detail += f"; CUDA_VISIBLE_DEVICES={visible}"
        if seen == 0 and expected == 0:
            return warned(detail, "unset CUDA_VISIBLE_DEVICES to use the GPUs")
        if seen == expected:
            return passed(detail)
    elif seen and seen >= len(gpus):
        return passed(detail)
    return failed(detail, f"torch {torch_version} does not match the driver; install a build for its CUDA version")


def check_driver_cuda(_: CheckArgs) -> Finding:
    """The driver is new enough for torch's CUDA, and torch has code for the devices."""
    if not list_gpus() and not device_nodes():
        return NO_DEVICE
    import torch

    if torch.version.cuda is None:
        if getattr(torch.version, "hip", None):
            return passed(f"torch {torch.__version__} for ROCm {torch.version.hip}")
        return failed(f"torch {torch.__version__} is a build without CUDA", "install torch for CUDA")
    devices = range(torch.cuda.device_count())
    capabilities = [torch.cuda.get_device_capability(device) for device in devices]
    return judge_driver(driver_version(), torch.version.cuda, capabilities, torch.cuda.get_arch_list())


def driver_version() -> tuple[int, int] | None:
    """The newest CUDA version the driver supports, or None where there is no driver library."""
    version = ctypes.c_int()
    try:
        status = ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    except (OSError, AttributeError):
        return None
    return (version.value // 1000, version.value % 1000 // 10) if status == 0 else None


def judge_driver(
    driver: tuple[int, int] | None, cuda: str, capabilities: list[tuple[int, int]], built: list[str]
) -> Finding:
    """Within a major version an older driver runs newer code, but cannot compile its PTX."""
    if driver is None:
        return failed(f"torch is built for CUDA {cuda}, but there is no driver library", "install the NVIDIA driver")
    runtime = tuple(int(part) for part in cuda.split(".")[:2])
    detail = f"driver for CUDA {driver[0]}.{driver[1]}, torch built for {cuda}"
    if driver[0] < runtime[0]:
        return failed(detail, "update the driver, or install a torch for an older CUDA")
    for capability in sorted(set(capabilities)):
        if not any(runs_on(name, capability) for name in built):
            name = "sm_{}{}".format(*capability)
            return failed(f"{detail}, without code for {name}", "install a torch built for this device")
    if driver < runtime:
        return warned(detail, "update the driver: kernels compiled at run time may not load")
    return passed(detail)


def runs_on(built: str, capability: tuple[int, int]) -> bool:
    """Code for sm_XY runs on devices of the same major version from minor Y on; PTX (compute_XY) on all later ones."""
    kind, _, digits = built.partition("_")
    version = divmod(int(digits.rstrip("af")), 10)
    return version <= capability and (kind == "compute" or version[0] == capability[0])


def check_gpu_free_memory(_: CheckArgs) -> Finding:
    """No other process holds GPU memory."""
    gpus = list_gpus()
    if gpus:
        return judge_free_memory(gpus)
    return warned("skipped: nvidia-smi is missing or lists no device") if device_nodes() else NO_DEVICE


def judge_free_memory(gpus: list[Gpu]) -> Finding:
    """The fullest device decides; a driver alone keeps less than 1 %."""
    fullest = max(gpus, key=lambda gpu: gpu.used / gpu.total)
    share = fullest.used / fullest.total
    detail = f"{gib(fullest.used)} of {gib(fullest.total)} in use on device {fullest.index}, the fullest of {len(gpus)}"
    hint = "nvidia-smi names the process; or lower --max_gpu_memory_utilization"
    if share < IDLE_SHARE:
        return passed(detail)
    return warned(detail, hint) if share < BUSY_SHARE else failed(detail, hint)


def check_flops_diff(_: CheckArgs) -> Finding:
    """All GPUs are equally fast: in tensor parallelism the slowest sets the pace."""
    if not list_gpus() and not device_nodes():
        return NO_DEVICE
    import torch

    if not torch.cuda.is_available():
        return warned("skipped: torch sees no device")
    return judge_flops([matmul_flops(torch, device) for device in range(torch.cuda.device_count())])


def matmul_flops(torch: Any, device: int) -> float:
    """Operations a second of a bfloat16 matrix product on one device, the best of `MATMUL_REPEATS`."""
    shape = (MATMUL_SIZE, MATMUL_SIZE)
    with torch.cuda.device(device):
        left, right = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        times = []
        for _ in range(MATMUL_REPEATS + 3):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            torch.mm(left, right)
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) / 1000)
    return float(2 * MATMUL_SIZE**3 / min(times[3:]))


def judge_flops(speeds: list[float]) -> Finding:
    """The fastest device's speed over the slowest's."""
    ratio = max(speeds) / min(speeds)
    listed = ", ".join(f"{speed / 1e12:.0f}" for speed in speeds)
    detail = f"max flops ratio between {len(speeds)} GPUs: {ratio:.2f} ({listed} TFLOP/s)"
    hint = "compare clocks, power limits and temperatures with nvidia-smi -q"
    if ratio <= EVEN_RATIO:
        return passed(detail)
    return warned(detail, hint) if ratio <= UNEVEN_RATIO else failed(detail, hint)
