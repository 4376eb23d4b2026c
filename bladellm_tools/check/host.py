"""Probes of the host: shared memory, environment, limits of the process, port, disk."""

import errno
import importlib
import os
import resource
import shutil
import socket
from pathlib import Path

from bladellm_tools.check.args import CheckArgs
from bladellm_tools.check.finding import Finding, failed, passed, warned
from bladellm_tools.console import gib

GIB = 1024**3
MIN_SHM = 64 * 1024**2
GOOD_OPEN_FILES, MIN_OPEN_FILES = 65_536, 1_024
GOOD_DISK, MIN_DISK = 10 * GIB, GIB
PROTOBUF_VARIABLE = "PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION"


def check_shm(args: CheckArgs, folder: str = "/dev/shm") -> Finding:
    """Shared memory: ranks and data loaders exchange tensors through it; containers get 64 MiB unless told more."""
    try:
        stat = os.statvfs(folder)
    except OSError as error:
        return failed(f"{folder} cannot be read: {error.strerror}", "mount a tmpfs there")
    size = stat.f_frsize * stat.f_blocks
    return judge_shm(size, args.tensor_parallel_size)


def judge_shm(size: int, ranks: int) -> Finding:
    """1 GiB a rank is enough for NCCL's buffers; below 64 MiB its communicators fail to start."""
    detail = f"shared memory size: {size} bytes"
    hint = f"start the container with --shm-size={ranks}g or --ipc=host"
    if size >= ranks * GIB:
        return passed(detail)
    return warned(detail, hint) if size >= MIN_SHM else failed(detail, hint)


def check_pb_env(_: CheckArgs) -> Finding:
    """The protobuf implementation: the pure Python one makes exporters and Ray many times slower."""
    value = os.environ.get(PROTOBUF_VARIABLE)
    shown = f"{PROTOBUF_VARIABLE} is {value or 'unset'}"
    if value not in (None, "", "cpp", "upb"):
        return warned(shown, f"unset {PROTOBUF_VARIABLE}")
    try:
        protobuf = importlib.import_module("google.protobuf")
    except ModuleNotFoundError:
        return passed(f"{shown}; protobuf is not installed and not needed")
    except Exception as error:
        return failed(f"importing protobuf raises {type(error).__name__}: {error}", "reinstall protobuf")
    return passed(f"{shown}; protobuf {protobuf.__version__}")


def check_ulimit(_: CheckArgs) -> Finding:
    """Open files: every connection of the server is one."""
    return judge_ulimit(*resource.getrlimit(resource.RLIMIT_NOFILE))


def judge_ulimit(soft: int, hard: int) -> Finding:
    """The soft limit counts; -1 is unlimited."""
    detail = f"open files: {limit_text(soft)} (at most {limit_text(hard)})"
    hint = f"ulimit -n {GOOD_OPEN_FILES} before the start, or raise nofile in /etc/security/limits.conf"
    if soft == resource.RLIM_INFINITY or soft >= GOOD_OPEN_FILES:
        return passed(detail)
    return warned(detail, hint) if soft >= MIN_OPEN_FILES else failed(detail, hint)


def limit_text(value: int) -> str:
    """A resource limit in words."""
    return "unlimited" if value == resource.RLIM_INFINITY else str(value)


def check_port(args: CheckArgs) -> Finding:
    """The server's port on the loopback address."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("127.0.0.1", args.port))
        except OSError as error:
            if error.errno == errno.EACCES:
                return failed(f"port {args.port} needs privileges", "use --port with a number above 1023")
            return failed(f"port {args.port} is in use{holder(args.port)}", "stop it, or serve on another --port")
    return passed(f"port {args.port} is free")


def holder(port: int) -> str:
    """` by NAME (pid N)` where the system tells."""
    import psutil

    try:
        for connection in psutil.net_connections("tcp"):
            # A socket without an address has an empty tuple here.
            local = tuple(connection.laddr)
            if connection.status == psutil.CONN_LISTEN and local[1:2] == (port,) and connection.pid:
                return f" by {psutil.Process(connection.pid).name()} (pid {connection.pid})"
    except (psutil.Error, OSError):
        pass
    return ""


def check_disk(_: CheckArgs) -> Finding:
    """Space where models are downloaded to."""
    cache = Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface")
    existing = next(folder for folder in (cache, *cache.absolute().parents) if folder.exists())
    return judge_disk(shutil.disk_usage(existing).free, str(cache))


def judge_disk(free: int, folder: str) -> Finding:
    """A 7B model takes about 15 GiB; below 1 GiB not even logs are safe."""
    detail = f"{gib(free)} free for downloads in {folder}"
    hint = "free some space, or point HF_HOME at a larger disk"
    if free >= GOOD_DISK:
        return passed(detail)
    return warned(detail, hint) if free >= MIN_DISK else failed(detail, hint)
