"""Processes that have ended before whoever starts them can say anything to them, as a busy machine brings about."""

import asyncio
from typing import Any

import pytest

from bladellm_runtime.wire.engine_process import EngineProcess


def start_too_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that asyncio starts has ended, and its loop has seen that, when who starts it gets hold of it; an
    engine's has when it is told something."""
    start = asyncio.create_subprocess_exec

    async def start_and_wait(*command: Any, **options: Any) -> asyncio.subprocess.Process:
        process = await start(*command, **options)
        await process.wait()
        await asyncio.sleep(0.05)
        return process

    tell = EngineProcess.write

    def wait_and_tell(process: EngineProcess, line: bytes) -> None:
        process.wait()
        tell(process, line)

    monkeypatch.setattr(asyncio, "create_subprocess_exec", start_and_wait)
    monkeypatch.setattr(EngineProcess, "write", wait_and_tell)
