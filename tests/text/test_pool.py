import asyncio
import threading
import time

import pytest

from bladellm_runtime.errors import ParameterError
from bladellm_runtime.text.chat import render_chat
from bladellm_runtime.text.pool import LONG_TEXT, SHORT_TEXT, PoolBusyError, TextPool
from tests.support.cases import drawn_of
from tests.text.samples import demo, sentencepiece

SECONDS = 60.0
"""Longer than any call here takes."""
CHAT = [{"role": "user", "content": "Hello <|im_end|>"}]


def run(work):
    async def main():
        pool = TextPool(2)
        try:
            return await work(pool)
        finally:
            pool.close()

    return asyncio.run(main())


def test_results_and_errors_are_those_of_the_calls():
    async def work(pool):
        assert await pool.encode(demo(), "hi <|im_end|>") == demo().encode("hi <|im_end|>")
        assert await pool.encode(sentencepiece(), "hi", add_special_tokens=False) == sentencepiece().encode("hi")
        assert await pool.render_chat(demo(), CHAT, add_generation_prompt=False) == render_chat(
            demo(), CHAT, add_generation_prompt=False
        )
        with pytest.raises(ParameterError, match="surrogate") as caught:
            await pool.encode(demo(), "\ud800", param="suffix")
        assert caught.value.param == "suffix"
        with pytest.raises(ParameterError, match="no chat template"):
            await pool.render_chat(sentencepiece(), CHAT)

    run(work)


def test_many_calls_at_once_share_the_threads_and_one_tokenizer():
    texts = [f"text {i} <|im_start|>" * i for i in range(40)]

    async def work(pool):
        prompts = [pool.encode(demo(), text) for text in texts]
        chats = [pool.render_chat(demo(), [{"role": "user", "content": text}]) for text in texts]
        return await asyncio.gather(*prompts, *chats)

    expected = [demo().encode(text) for text in texts]
    expected += [render_chat(demo(), [{"role": "user", "content": text}]) for text in texts]
    assert run(work) == expected


@pytest.mark.parametrize("unit", drawn_of(["a", " ", "é", "<|im_end|>"], 1, always=["<|im_end|>"]))
def test_a_megabyte_of_one_character_does_not_hang_the_event_loop(unit):
    text = unit * (2**20 // len(unit))
    longest = 0.0

    async def tick():
        nonlocal longest
        while True:
            begin = time.perf_counter()
            await asyncio.sleep(0.002)
            longest = max(longest, time.perf_counter() - begin)

    async def work(pool):
        ticker = asyncio.create_task(tick())
        await asyncio.sleep(0.01)
        ids = await pool.encode(demo(), text)
        ticker.cancel()
        return ids

    begin = time.perf_counter()
    ids = run(work)
    took = time.perf_counter() - begin
    assert demo().decode(ids, skip_special_tokens=False) == text
    assert longest < max(0.5, took / 2)


def test_other_threads_go_on_while_a_million_tokens_are_decoded():
    ids, waits, done = [5] * 1_000_000, [], threading.Event()

    def wait():
        while not done.is_set():
            begin = time.perf_counter()
            time.sleep(0.001)
            waits.append(time.perf_counter() - begin)

    waiter = threading.Thread(target=wait)
    waiter.start()
    begin = time.perf_counter()
    text = demo().decode(ids)
    took = time.perf_counter() - begin
    done.set()
    waiter.join()
    assert text == demo().decode([5]) * len(ids)
    assert max(waits) < took / 2


def test_a_call_that_takes_too_long_is_a_parameter_error():
    async def work(pool):
        pool.time_limit = 0.05
        with pytest.raises(ParameterError, match=r"messages took more than 0\.05 s") as caught:
            await pool.run("messages", may_end.wait, SECONDS)
        assert caught.value.param == "messages"
        # Both threads busy: a call that waits for one is not to blame; it ends in time, and works once one is free.
        blocker = asyncio.ensure_future(pool.run("x", may_end.wait, SECONDS))
        await asyncio.sleep(0)
        with pytest.raises(PoolBusyError):
            await pool.encode(demo(), "hi " * SHORT_TEXT)
        assert await pool.encode(demo(), "hi") == demo().encode("hi")
        await asyncio.gather(blocker, return_exceptions=True)
        may_end.set()
        pool.time_limit = SECONDS
        assert await pool.encode(demo(), "hi " * SHORT_TEXT) == demo().encode("hi " * SHORT_TEXT)

    may_end = threading.Event()

    run(work)


def test_short_texts_do_not_wait_for_long_ones(monkeypatch):
    tokenizer, may_end = demo(), threading.Event()

    def encode(text, **options):
        assert len(text) < LONG_TEXT or may_end.wait(SECONDS)
        return [len(text)]

    monkeypatch.setattr(tokenizer, "encode", encode)

    async def work(pool):
        long = [asyncio.ensure_future(pool.encode(tokenizer, "a" * LONG_TEXT)) for _ in range(9)]
        await asyncio.sleep(0)
        for characters in (2, SHORT_TEXT + 1):
            assert await pool.encode(tokenizer, "a" * characters) == [characters]
        may_end.set()
        assert await asyncio.gather(*long) == [[LONG_TEXT]] * 9

    run(work)
