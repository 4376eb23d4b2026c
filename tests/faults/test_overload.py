"""More load than the server can carry. Each test is named after its row of the fault table."""

import asyncio
import json

import aiohttp
import pytest

from tests.faults.conftest import warm_up
from tests.faults.sockets import LONG, SHORT
from tests.support.cases import drawn_of
from tests.support.live import (
    LiveServer,
    OpenStream,
    completion_text,
    fake_answer,
    fake_command,
    until,
)

# Row 38: more than it can do.


def test_row_38_ten_times_its_capacity():
    with LiveServer(fake_command(step_seconds=0.005), max_running_requests=4, max_queue_size=8) as server:
        warm_up(server)
        descriptors = server.open_fds()
        beside = OpenStream(server, {**LONG, "max_tokens": 300})
        text = completion_text(beside.read(1))
        answers = asyncio.run(flood(server, 120))
        text += completion_text(beside.rest())
        beside.close()
        assert text == fake_answer(LONG["prompt"], 300)
        assert {status for status, _, _ in answers} == {200, 429}
        accepted = [body for status, body, _ in answers if status == 200]
        assert len(accepted) >= 11
        for status, body, headers in answers:
            if status == 429:
                assert int(headers["Retry-After"]) >= 1
                assert json.loads(body)["error"]["code"] == "queue_full"
            else:
                assert json.loads(body)["choices"][0]["text"] == fake_answer("flood", 30)
        until(lambda: server.gauges() == (0, 0, 0), what="an idle engine")
        until(lambda: server.open_fds() <= descriptors, what="closed connections")
        assert server.metrics()["blade_llm:num_requests_open"] == 0


async def flood(server, count):
    body = {**SHORT, "prompt": "flood", "max_tokens": 30}

    async def ask(session):
        async with session.post(server.url + "/v1/completions", json=body) as response:
            return response.status, await response.read(), dict(response.headers)

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        return await asyncio.gather(*(ask(session) for _ in range(count)))


def test_row_38_choices_count_each(narrow_server):
    holder = OpenStream(narrow_server, LONG)
    holder.read(1)
    status, body = narrow_server.json("/v1/completions", {**SHORT, "n": 4})
    assert status == 429, body
    three = OpenStream(narrow_server, {**SHORT, "n": 3})
    until(lambda: narrow_server.metrics()["blade_llm:num_requests_open"] == 4, what="three choices in the queue")
    status, body = narrow_server.json("/v1/completions", SHORT)
    assert status == 429, body
    holder.close()
    chunks = three.rest()
    assert {choice["index"] for chunk in chunks for choice in chunk["choices"]} == {0, 1, 2}
    three.close()
    status, body = narrow_server.json("/v1/completions", {**SHORT, "n": 5})
    assert (status, body["error"]["param"]) == (400, "n")
    until(lambda: narrow_server.gauges() == (0, 0, 0), what="an idle engine")


@pytest.mark.parametrize("stream", drawn_of([True, False], 1))
def test_row_38_waited_too_long(narrow_server, stream):
    holder = OpenStream(narrow_server, {**LONG, "max_tokens": 800})
    text = completion_text(holder.read(1))
    status, body, headers = narrow_server.request("/v1/completions", {**SHORT, "stream": stream})
    assert (status, json.loads(body)["error"]["code"]) == (503, "queue_timeout")
    assert "retry-after" in headers
    text += completion_text(holder.rest())
    assert text == fake_answer(LONG["prompt"], 800)
    holder.close()
    until(lambda: narrow_server.gauges() == (0, 0, 0), what="an idle engine")
