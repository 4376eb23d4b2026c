"""Probes of memory and CPU: what the host has, and what the control group leaves of it."""

import math
import os
from dataclasses import dataclass
from pathlib import Path

from bladellm_tools.check.args import CheckArgs
from bladellm_tools.check.finding import Finding, failed, passed, warned
from bladellm_tools.console import gib

GIB = 1024**3
GOOD_MEMORY, MIN_MEMORY = 2 * GIB, GIB // 2
CGROUP_ROOT = Path("/sys/fs/cgroup")
NO_LIMIT_V1 = 1 << 60
"""Version 1 writes `no limit` as a number near 2^63."""


@dataclass(frozen=True)
class CgroupLimits:
    """What the control group allows; None is no limit. `memory_used` counts against `memory`."""

    cpus: float | None = None
    memory: int | None = None
    memory_used: int = 0


def check_memory(_: CheckArgs) -> Finding:
    """Memory that a new process can still take."""
    import psutil

    return judge_memory(psutil.virtual_memory().total, available_memory())


def available_memory() -> int:
    """The host's free memory, or what the control group has left where that is less."""
    import psutil

    limits, available = cgroup_limits(), int(psutil.virtual_memory().available)
    return available if limits.memory is None else min(available, max(limits.memory - limits.memory_used, 0))


def judge_memory(total: int, available: int) -> Finding:
    """A model of 7B parameters wants far more; below the lower limit not even the demo's process fits."""
    detail = f"{gib(available)} of {gib(total)} available"
    hint = "stop other processes, or raise the container's memory limit"
    if available >= GOOD_MEMORY:
        return passed(detail)
    return warned(detail, hint) if available >= MIN_MEMORY else failed(detail, hint)


def check_cgroup(_: CheckArgs) -> Finding:
    """CPU quota and memory limit of the control group against the host's view."""
    import psutil

    return judge_cgroup(cgroup_limits(), os.cpu_count() or 1, psutil.virtual_memory().total)


def judge_cgroup(limits: CgroupLimits, cpus: int, memory: int) -> Finding:
    """With a quota below the CPUs it sees, a process starts too many threads and is throttled inside its steps."""
    seen = f"{cpus} CPUs and {gib(memory)} visible"
    parts = []
    if limits.cpus is not None and limits.cpus < cpus:
        parts.append(f"CPU quota {limits.cpus:g}")
    if limits.memory is not None and limits.memory < memory:
        parts.append(f"memory limit {gib(limits.memory)}")
    if not parts:
        return passed(f"{seen}, no lower limit")
    threads = max(1, math.floor(limits.cpus)) if limits.cpus is not None and limits.cpus < cpus else None
    hint = f"set OMP_NUM_THREADS={threads}" if threads else "size kv_cache_gib to the memory limit"
    return warned(f"{seen}, but {' and '.join(parts)}", hint)


def cgroup_limits(membership: Path = Path("/proc/self/cgroup"), root: Path = CGROUP_ROOT) -> CgroupLimits:
    """The tightest limits of this process's control groups and their parents, versions 1 and 2."""
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return CgroupLimits()
    found = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            found += [_limits_v2(folder) for folder in lineage(root, path)]
        else:
            names = controllers.split(",")
            found += [_limits_v1(folder, names) for folder in lineage(root / controllers, path)]
    return tightest(found)


def lineage(root: Path, path: str) -> list[Path]:
    """A group's folder and its parents up to the root; a container often sees only the root."""
    folder = root / path.lstrip("/")
    parents = [parent for parent in folder.parents if parent.is_relative_to(root)]
    return [folder, *parents]


def tightest(found: list[CgroupLimits]) -> CgroupLimits:
    """The lowest of each limit."""
    cpus = [limits.cpus for limits in found if limits.cpus is not None]
    memory = [limits for limits in found if limits.memory is not None]
    least = min(memory, key=lambda limits: limits.memory or 0, default=CgroupLimits())
    return CgroupLimits(min(cpus, default=None), least.memory, least.memory_used)


def _limits_v2(folder: Path) -> CgroupLimits:
    words = _read(folder / "cpu.max").split()
    cpus = int(words[0]) / int(words[1]) if len(words) == 2 and words[0].isdigit() else None
    memory = _read_int(folder / "memory.max")
    return CgroupLimits(cpus, memory, _read_int(folder / "memory.current") or 0)


def _limits_v1(folder: Path, controllers: list[str]) -> CgroupLimits:
    cpus = memory = None
    if "cpu" in controllers:
        quota, period = _read(folder / "cpu.cfs_quota_us"), _read(folder / "cpu.cfs_period_us")
        cpus = int(quota) / int(period) if quota.isdigit() and period.isdigit() else None
    if "memory" in controllers:
        memory = _read_int(folder / "memory.limit_in_bytes")
        memory = None if memory is not None and memory >= NO_LIMIT_V1 else memory
    return CgroupLimits(cpus, memory, _read_int(folder / "memory.usage_in_bytes") or 0)


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _read_int(path: Path) -> int | None:
    text = _read(path)
    return int(text) if text.isdigit() else None
