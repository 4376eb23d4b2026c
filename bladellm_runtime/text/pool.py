"""Tokenizing and rendering in threads, so that a long prompt never holds up the event loop."""

import asyncio
import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ParamSpec, TypeVar

from bladellm_runtime.errors import ParameterError
from bladellm_runtime.text.chat import render_chat
from bladellm_runtime.text.tokenizer import Tokenizer

TIME_LIMIT = 30.0

P = ParamSpec("P")
T = TypeVar("T")


class TextPool:
    """A few threads for text work. The tokenizer releases the interpreter lock while it works, so they help.

    A call that takes longer than `time_limit` seconds, waiting for a thread included, is a `ParameterError`. Native
    code cannot be interrupted: its thread is free again only when it is done.
    """

    def __init__(self, max_workers: int = 4, time_limit: float = TIME_LIMIT) -> None:
        self.time_limit = time_limit
        self._threads = ThreadPoolExecutor(max_workers, thread_name_prefix="text")

    async def run(self, param: str, work: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """`work(*args, **kwargs)` in a thread; `param` is the request field to name when it takes too long."""
        loop = asyncio.get_running_loop()
        future = loop.run_in_executor(self._threads, functools.partial(work, *args, **kwargs))
        try:
            # Not asyncio.wait_for: in Python 3.11 it can swallow a cancellation that comes as the work ends.
            async with asyncio.timeout(self.time_limit):
                return await future
        except TimeoutError:
            raise ParameterError(
                f"{param} took more than {self.time_limit:g} s to tokenize; send a shorter text", param
            ) from None

    async def encode(
        self, tokenizer: Tokenizer, text: str, *, add_special_tokens: bool = True, param: str = "prompt"
    ) -> list[int]:
        """`Tokenizer.encode` in a thread."""
        return await self.run(param, tokenizer.encode, text, add_special_tokens=add_special_tokens, param=param)

    async def render_chat(self, tokenizer: Tokenizer, messages: list[dict[str, Any]], **options: Any) -> list[int]:
        """`chat.render_chat` in a thread, with its options."""
        return await self.run("messages", render_chat, tokenizer, messages, **options)

    def close(self) -> None:
        """Drop what waits and let the threads end."""
        self._threads.shutdown(wait=False, cancel_futures=True)
