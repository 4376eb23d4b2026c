"""Endpoints as `--endpoint` names them, and the servers of `cmd:` endpoints: started, awaited, stopped with all they
started themselves."""

import asyncio
import os
import re
import shlex
import signal
import socket
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import aiohttp

from bladellm_runtime.errors import ConfigError, UserError

NAME = re.compile(r"[\w.-]{1,64}")
READY_PATHS = ("/health", "/v1/models")
POLL_SECONDS = 0.2
STOP_SECONDS = 20.0
"""Between SIGTERM and SIGKILL."""
LOG_TAIL_BYTES = 4096


@dataclass(frozen=True)
class Endpoint:
    """A server to measure: at a URL, or started by a command line in which `{port}` stands for a free port."""

    name: str
    url: str | None = None
    command: tuple[str, ...] = ()


def parse_endpoints(texts: list[str]) -> list[Endpoint]:
    """The endpoints of `--endpoint`. Raises `ConfigError` for one that cannot be read or two of one name."""
    endpoints = [parse_endpoint(text) for text in texts]
    names = [endpoint.name for endpoint in endpoints]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"--endpoint has two of the name {name!r}; names tell the curves apart")
    return endpoints


def parse_endpoint(text: str) -> Endpoint:
    """`NAME=URL` or `NAME=cmd:COMMAND LINE`."""
    name, equals, value = text.partition("=")
    if not equals or not NAME.fullmatch(name):
        raise ConfigError(
            f"--endpoint {text!r} must be NAME=URL, as ours=http://127.0.0.1:8081; names have letters, digits, . _ -"
        )
    if value.startswith("cmd:"):
        return Endpoint(name, command=parse_command(name, value.removeprefix("cmd:")))
    try:
        parts = urlsplit(value)
        valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        valid = False
    if not valid:
        raise ConfigError(f"--endpoint {name}: {value!r} is neither an http:// URL nor cmd:COMMAND LINE")
    if not re.fullmatch(r"[!-~]+", value) or set("?#") & set(value):
        raise ConfigError(
            f"--endpoint {name}: {value!r} must be ASCII without spaces, ? and #, because routes are added to its end; "
            "write other characters as %XX, and give keys with --header or --api_key"
        )
    return Endpoint(name, url=value.rstrip("/"))


def parse_command(name: str, line: str) -> tuple[str, ...]:
    """The words of a command line, quoted as in a shell; no shell runs it."""
    try:
        words = tuple(shlex.split(line))
    except ValueError as error:
        raise ConfigError(f"--endpoint {name}: the command line cannot be read: {error}") from error
    if not any("{port}" in word for word in words):
        raise ConfigError(f"--endpoint {name}: the command line needs {{port}} where the server takes its port")
    return words


def free_port() -> int:
    """A port of the loopback interface that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Server:
    """The server of a `cmd:` endpoint, from `start` to `stop`; `url` is where it answers.

    Its log goes to `NAME.server.log` in `folder`.
    """

    def __init__(self, endpoint: Endpoint, folder: Path, start_timeout: float) -> None:
        self.endpoint = endpoint
        self.url = ""
        self._log = folder / f"{endpoint.name}.server.log"
        self._start_timeout = start_timeout
        self._process: asyncio.subprocess.Process | None = None

    @property
    def ended(self) -> str | None:
        """Why a server that was started here no longer runs; None while it does."""
        if self._process is None or self._process.returncode is None:
            return None
        code = self._process.returncode
        how = f"was killed by signal {-code}" if code < 0 else f"exited with code {code}"
        return f"the server of {self.endpoint.name} {how}{self._last_words()}"

    async def start(self) -> None:
        """Start it and wait until it answers. Raises `UserError` when it does not; it is stopped then."""
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        words = [word.replace("{port}", str(port)) for word in self.endpoint.command]
        try:
            await self._launch(words)
            async with asyncio.timeout(self._start_timeout):
                await self._await_ready()
        except TimeoutError as error:
            late = f"the server of {self.endpoint.name} did not answer within {self._start_timeout:g} s"
            last_words = self._last_words()
            await self.stop()
            raise UserError(f"{late} (--start_timeout){last_words}") from error
        except BaseException:
            await self.stop()
            raise

    async def _launch(self, words: list[str]) -> None:
        with self._log.open("ab") as log:
            try:
                # A session of its own: Ctrl-C reaches only this process, and stop() reaches the server's children.
                self._process = await asyncio.create_subprocess_exec(
                    *words, stdin=asyncio.subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
                )
            except OSError as error:
                name = self.endpoint.name
                raise UserError(f"--endpoint {name}: {words[0]!r} cannot be run: {error.strerror}") from error

    async def _await_ready(self) -> None:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=5)) as session:
            while not await self._is_ready(session):
                if self.ended is not None:
                    raise UserError(f"{self.ended}")
                await asyncio.sleep(POLL_SECONDS)

    async def _is_ready(self, session: aiohttp.ClientSession) -> bool:
        for path in READY_PATHS:
            try:
                async with session.get(self.url + path) as response:
                    if response.status == 200:
                        return True
            except (aiohttp.ClientError, TimeoutError, OSError):
                return False
        return False

    async def stop(self) -> None:
        """SIGTERM to the server and all it started, SIGKILL to what is left after `STOP_SECONDS`."""
        process, self._process = self._process, None
        if process is None:
            return
        try:
            signal_group(process.pid, signal.SIGTERM)
            async with asyncio.timeout(STOP_SECONDS):
                await process.wait()
        except TimeoutError:
            pass
        finally:
            # Also when the wait was cancelled by a second Ctrl-C, and for children that outlived their parent.
            signal_group(process.pid, signal.SIGKILL)
        await process.wait()

    def _last_words(self) -> str:
        """`: LAST LINE (LOG FILE)`, what the server said last."""
        with self._log.open("rb") as file:
            file.seek(max(0, self._log.stat().st_size - LOG_TAIL_BYTES))
            lines = file.read().decode(errors="replace").strip().splitlines()
        return f": {lines[-1].strip()} ({self._log})" if lines else f" ({self._log})"


def signal_group(leader: int, number: signal.Signals) -> None:
    """Send a signal to a process group, if any of it is left."""
    try:
        os.killpg(leader, number)
    except ProcessLookupError:
        return
