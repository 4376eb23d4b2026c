"""Starting the processes of other ranks, and where all of them meet."""

import ctypes
import dataclasses
import signal
import socket
import subprocess
import sys
import threading
from dataclasses import dataclass
from pathlib import Path

import msgspec

from bladellm_runtime.config import EngineArgs, split_address
from bladellm_runtime.errors import ConfigError, UserError
from bladellm_runtime.ranks.channel import Secret

COMMAND = [sys.executable, "-m", "bladellm_runtime.engine.rank_process"]
PR_SET_PDEATHSIG = 1
FEWEST_SECRET_BYTES, MOST_SECRET_BYTES = 16, 4096


@dataclass(frozen=True, slots=True)
class Meeting:
    """Where ranks meet. plans: the ZMQ address of rank 0's step plans. group: of `distributed.communicator.connect`.
    results: the ZMQ address to which a pipeline's results go."""

    plans: str
    group: str
    results: str


class RankLaunch(msgspec.Struct, forbid_unknown_fields=True):
    """The first line of a rank's standard input; the rest never comes: end of file means that its starter is gone."""

    rank: int
    meeting: Meeting
    args: EngineArgs
    bound: bool = False

    def bind(self) -> None:
        """Have the kernel kill this process when the thread that started it ends, which reaches a halted one too, where
        that thread lives as long as its process."""
        if self.bound and sys.platform == "linux":
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def meeting_of(args: EngineArgs, folder: Path) -> Meeting:
    """Between hosts at --dist_init_addr and the two ports behind it; on one host in a folder that is this user's alone.

    Raises `ConfigError` when the host's name is unknown.
    """
    if args.dist_init_addr is None:
        return Meeting(f"ipc://{folder / 'plans'}", f"file://{folder / 'group'}", f"ipc://{folder / 'results'}")
    address = args.dist_init_addr
    host, port = split_address(address)
    try:
        family, _, _, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except (OSError, UnicodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "not a name that a host can have"
        raise ConfigError(f"--dist_init_addr {address}: {host} is not known here ({why})") from error
    numeric = f"[{place[0]}]" if family == socket.AF_INET6 else str(place[0])
    return Meeting(*(f"tcp://{numeric}:{port + number}" for number in range(3)))


def read_secret(args: EngineArgs) -> Secret | None:
    """The secret of --dist_token_file; None on one host. Raises `ConfigError` for one that cannot be used."""
    path = args.dist_token_file
    if path is None:
        return None
    try:
        with open(path, "rb") as file:
            shared = file.read(MOST_SECRET_BYTES + 1).strip()
    except OSError as error:
        raise ConfigError(f"--dist_token_file {path} cannot be read: {error.strerror}") from error
    if not FEWEST_SECRET_BYTES <= len(shared) <= MOST_SECRET_BYTES:
        raise ConfigError(
            f"--dist_token_file {path} must hold {FEWEST_SECRET_BYTES} to {MOST_SECRET_BYTES} bytes; "
            "openssl rand -hex 32 writes a good one"
        )
    return Secret(shared)


def flags_of(args: EngineArgs) -> dict[str, object]:
    """The fields of `args` that `EngineArgs` has."""
    return {item.name: getattr(args, item.name) for item in dataclasses.fields(EngineArgs)}


def start_rank(rank: int, meeting: Meeting, args: EngineArgs) -> "subprocess.Popen[bytes]":
    """Start the process of a rank; its standard input is to stay open for as long as it shall live.

    It gets a session of its own: Ctrl-C is for who started it. Raises `UserError` when it cannot be started.
    """
    try:
        process = subprocess.Popen(COMMAND, stdin=subprocess.PIPE, start_new_session=True)
    except OSError as error:
        raise UserError(f"rank {rank} cannot be started: {COMMAND[0]}: {error.strerror}") from error
    assert process.stdin is not None
    bound = threading.current_thread() is threading.main_thread()
    line = {"rank": rank, "meeting": meeting, "args": flags_of(args), "bound": bound}
    try:
        process.stdin.write(msgspec.json.encode(line) + b"\n")
        process.stdin.flush()
    except BrokenPipeError:
        pass  # it has ended already, which its exit code says
    return process
