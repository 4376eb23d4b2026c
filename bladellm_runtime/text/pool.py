"""Tokenizing and rendering in threads, so that a long prompt never holds up the event loop."""

import asyncio
import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from time import monotonic
from typing import Any, ParamSpec, TypeVar

from bladellm_runtime.errors import ParameterError
from bladellm_runtime.text.chat import render_chat
from bladellm_runtime.text.tokenizer import Tokenizer

TIME_LIMIT = 30.0
SHORT_TEXT = 256
"""Characters that are tokenized in less time than it takes to hand them to a thread and back."""
LONG_TEXT = 2**18
"""Characters. A text of so many takes a tenth of a second or more, and one of megabytes many seconds."""

P = ParamSpec("P")
T = TypeVar("T")


class PoolBusyError(Exception):
    """The work of others took the time that a call had."""


class TextPool:
    """A few threads for text work. The tokenizer releases the interpreter lock while it works, so they help.

    Long texts have threads of their own: others do not wait for them. A call that takes longer than `time_limit`
    seconds is a `ParameterError`, or a `PoolBusyError` when most of these went by before a thread took it up. Native
    code cannot be interrupted: its thread is free again only when it is done.
    """

    def __init__(self, max_workers: int = 4, time_limit: float = TIME_LIMIT) -> None:
        self.time_limit = time_limit
        self._threads = ThreadPoolExecutor(max_workers, thread_name_prefix="text")
        self._long = ThreadPoolExecutor(max(1, max_workers // 2), thread_name_prefix="long-text")

    async def run(self, param: str, work: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """`work(*args, **kwargs)` in a thread; `param` is the request field to name when it takes too long."""
        return await self._run(0, param, functools.partial(work, *args, **kwargs))

    async def _run(self, size: int, param: str, work: Callable[[], T]) -> T:
        """Work on a text of `size` characters."""
        begun = float("inf")

        def begin() -> T:
            nonlocal begun
            begun = monotonic()
            return work()

        threads = self._threads if size < LONG_TEXT else self._long
        future = asyncio.get_running_loop().run_in_executor(threads, begin)
        try:
            # Not asyncio.wait_for: in Python 3.11 it can swallow a cancellation that comes as the work ends.
            async with asyncio.timeout(self.time_limit):
                return await future
        except TimeoutError:
            if monotonic() - begun < self.time_limit / 2:
                raise PoolBusyError from None
            raise ParameterError(
                f"{param} took more than {self.time_limit:g} s to tokenize; send a shorter text", param
            ) from None

    async def encode(
        self, tokenizer: Tokenizer, text: str, *, add_special_tokens: bool = True, param: str = "prompt"
    ) -> list[int]:
        """`Tokenizer.encode`, in a thread unless the text is short."""
        if len(text) <= SHORT_TEXT:
            return tokenizer.encode(text, add_special_tokens=add_special_tokens, param=param)
        work = functools.partial(tokenizer.encode, text, add_special_tokens=add_special_tokens, param=param)
        return await self._run(len(text), param, work)

    async def render_chat(self, tokenizer: Tokenizer, messages: list[dict[str, Any]], **options: Any) -> list[int]:
        """`chat.render_chat` in a thread, with its options."""
        work = functools.partial(render_chat, tokenizer, messages, **options)
        return await self._run(sum(map(_size, messages)), "messages", work)

    def close(self) -> None:
        """Drop what waits and let the threads end."""
        for threads in (self._threads, self._long):
            threads.shutdown(wait=False, cancel_futures=True)


def _size(message: dict[str, Any]) -> int:
    """Characters of a message's content, about."""
    content = message.get("content")
    parts = content if isinstance(content, list) else [content]
    return sum(len(part if isinstance(part, str) else str(part)) for part in parts)
