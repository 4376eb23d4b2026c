"""Processes that have ended before whoever starts them can say anything to them, as a busy machine brings about."""

import asyncio
from typing import Any

import pytest


def start_too_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that asyncio starts has ended, and its loop has seen that, when who starts it gets hold of it."""
    start = asyncio.create_subprocess_exec

    async def start_and_wait(*command: Any, **options: Any) -> asyncio.subprocess.Process:
        process = await start(*command, **options)
        await process.wait()
        await asyncio.sleep(0.05)
        return process

    monkeypatch.setattr(asyncio, "create_subprocess_exec", start_and_wait)
