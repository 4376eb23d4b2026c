"""Where a benchmark was measured and with which flags: what a reader needs to repeat it, and nothing secret."""

import dataclasses
import importlib.metadata
import os
import platform
import re
import subprocess
import time
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import psutil

from bladellm_runtime import __version__
from bladellm_tools.console import gib

PACKAGES = ("aiohttp", "uvloop", "orjson", "numpy")
PROBE_SECONDS = 10.0
HIDDEN = "***"
SECRET_OPTION = re.compile(r"(?i)(--?[\w-]*(?:api[_-]?key|secret|password|token)[= ]+)(\"[^\"]*\"|'[^']*'|\S+)")
SECRET_FIELD = re.compile(r"(?i)key|secret|password|token$|authorization")


def environment() -> dict[str, str]:
    """Versions, machine, GPUs, git commit and clock, each as text; what does not exist is left out."""
    clock = time.get_clock_info("perf_counter")
    facts = {
        "date": datetime.now().astimezone().isoformat(timespec="seconds"),
        "BladeLLM Open": __version__,
        "git commit": git_commit(Path(__file__).parent),
        "Python": platform.python_version(),
        **{name: package_version(name) for name in PACKAGES},
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "processor": processor(),
        "cores for the client": str(len(os.sched_getaffinity(0))),
        "memory": gib(psutil.virtual_memory().total),
        "GPU": gpus(),
        "clock": f"time.perf_counter, {clock.implementation}, resolution {clock.resolution:g} s",
    }
    return {name: value for name, value in facts.items() if value}


def package_version(name: str) -> str:
    """The installed version, or nothing."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def output_of(*command: str, folder: Path | None = None) -> str:
    """What a program prints, stripped; nothing where it is missing, fails or hangs."""
    try:
        done = subprocess.run(
            command, cwd=folder, capture_output=True, text=True, timeout=PROBE_SECONDS, check=False, errors="replace"
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def git_commit(folder: Path) -> str:
    """The commit of the source tree, and whether files differ from it; nothing for an installed package."""
    commit = output_of("git", "rev-parse", "--short=12", "HEAD", folder=folder)
    if not commit:
        return ""
    changed = output_of("git", "status", "--porcelain", "--untracked-files=no", folder=folder)
    return f"{commit} (changed)" if changed else commit


def processor() -> str:
    """The processor's name, from Linux where it says."""
    try:
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        found = None
    return f"{found[1] if found else platform.machine()}, {os.cpu_count()} cores"


def gpus() -> str:
    """The GPUs of this machine and their driver, by nvidia-smi."""
    lines = output_of("nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader")
    names = lines.splitlines()
    return "; ".join(f"{names.count(name)} × {name}" for name in dict.fromkeys(names))


def flags_in_effect(sections: Sequence[Any]) -> dict[str, object]:
    """The values of argument dataclasses but where results go and secrets: of headers, the names are kept."""
    values: dict[str, object] = {}
    for section in sections:
        values |= {item.name: getattr(section, item.name) for item in dataclasses.fields(section)}
    for name in ("api_key", "out"):
        values.pop(name, None)
    if isinstance(texts := values.get("endpoint"), list):
        values["endpoint"] = [without_secrets(text) for text in texts]
    if isinstance(headers := values.get("header"), list):
        values["header"] = [f"{text.partition(':')[0]}:{HIDDEN}" for text in headers]
    if isinstance(body := values.get("extra_body"), str) and SECRET_FIELD.search(body):
        values["extra_body"] = HIDDEN
    return values


def without_secrets(endpoint: str) -> str:
    """`NAME=URL` without a password, `NAME=cmd:LINE` without the values of options that hold keys."""
    name, _, value = endpoint.partition("=")
    if value.startswith("cmd:"):
        return f"{name}=" + SECRET_OPTION.sub(rf"\g<1>{HIDDEN}", value)
    return f"{name}={shown_url(value)}"


def shown_url(url: str | None) -> str:
    """An address without its password and its query; None is a server of a command line."""
    if url is None:
        return "started here"
    parts = urlsplit(url)
    host = parts.netloc.rpartition("@")[2]
    query = HIDDEN if parts.query else ""
    return urlunsplit((parts.scheme, host, parts.path, query, ""))
