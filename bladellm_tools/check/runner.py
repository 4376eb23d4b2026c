"""Run probes in processes of their own, so that a hung driver or a crash costs one line and not the report."""

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Callable, Sequence

import msgspec

from bladellm_tools.check.args import CheckArgs
from bladellm_tools.check.catalog import GPU_CHECKS
from bladellm_tools.check.finding import Finding, failed

PARALLEL = 4
REAP_SECONDS = 2.0
WORKER = "bladellm_tools.check.worker"


def run_checks(names: Sequence[str], args: CheckArgs, on_finding: Callable[[str, Finding], None]) -> None:
    """Call `on_finding` for every check, in the order of `names`, each as soon as it and those before it are done."""
    asyncio.run(_run_checks(names, args, on_finding))


async def _run_checks(names: Sequence[str], args: CheckArgs, on_finding: Callable[[str, Finding], None]) -> None:
    # GPU probes take turns: they measure speed and free memory, and must not meet each other's.
    host_turns, gpu_turns = asyncio.Semaphore(PARALLEL), asyncio.Semaphore(1)

    async def in_turn(name: str) -> Finding:
        async with gpu_turns if name in GPU_CHECKS else host_turns:
            return await run_probe([sys.executable, "-P", "-m", WORKER, name], args)

    async with asyncio.TaskGroup() as group:
        tasks = [(name, group.create_task(in_turn(name))) for name in names]
        for name, task in tasks:
            on_finding(name, await task)


async def run_probe(command: list[str], args: CheckArgs) -> Finding:
    """Start a probe's process and wait for its finding, `args.timeout` seconds at most."""
    # The child looks for modules where this process does, and with -P nowhere else.
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        *command, stdin=pipe, stdout=pipe, stderr=pipe, env=environment, start_new_session=True
    )
    try:
        answer, noise = await asyncio.wait_for(process.communicate(msgspec.json.encode(args)), args.timeout)
    except TimeoutError:
        return failed(f"no answer within {args.timeout:g} s", "a driver may hang: see dmesg; or raise --timeout")
    finally:
        await end(process)
    return read_finding(process.returncode or 0, answer, noise)


async def end(process: asyncio.subprocess.Process) -> None:
    """Kill what is left of a probe and its children; one stuck inside the driver cannot be reaped, and stays."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(process.wait(), REAP_SECONDS)


def read_finding(returncode: int, answer: bytes, noise: bytes) -> Finding:
    """The finding a probe wrote, or what its death tells."""
    if returncode == 0:
        try:
            return msgspec.json.decode(answer, type=Finding)
        except msgspec.MsgspecError:
            return failed("the check's process gave no answer")
    cause = f"signal {signal.Signals(-returncode).name}" if returncode < 0 else f"exit code {returncode}"
    lines = noise.decode(errors="replace").strip().splitlines()
    return failed(f"the check's process died with {cause}" + (f": {lines[-1][:200]}" if lines else ""))
