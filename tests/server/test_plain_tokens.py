"""Tokens that are written as they come: what a client gets is what pieces at the end of each step would have said."""

import asyncio
import json
import random
import time
from types import SimpleNamespace

import pytest

from bladellm_runtime.request import FinishReason, SamplingParams
from bladellm_runtime.server.answer import Heading, answer_stream
from bladellm_runtime.server.generation import Generation, PromptWork
from bladellm_runtime.server.listener import ChunkWriter, Gate
from bladellm_runtime.server.metrics import Metrics
from bladellm_runtime.server.state import ServerState
from bladellm_runtime.wire.messages import RequestDelta
from tests.text.samples import demo, sentencepiece

TEXT = "One two 👩🏽‍🚀 three, “four”\n\\ and five é 你好 six. "


class Client:
    """What a generation needs of an engine's client; `step` is one step of the engine."""

    def __init__(self):
        self.sinks = []
        self.aborted = []

    def next_id(self):
        return len(self.sinks) + 1

    def submit(self, request, sink, token_sink):
        self.sinks.append((request.request_id, sink, token_sink))

    def abort(self, request_ids):
        self.aborted += request_ids


class Server:
    """A stream over a transport that is full now and then, and may break."""

    def __init__(self, tokenizer, **params):
        self.client, self.metrics, self.touched, self.sent = Client(), Metrics(), [], b""
        state = SimpleNamespace(
            client=self.client, metrics=self.metrics, tokenizer=tokenizer, generations=set(), touched=self.touched
        )
        self.state = state
        self.gate = Gate()
        self.cycle = SimpleNamespace(
            response_complete=False,
            chunked_encoding=True,
            transport=SimpleNamespace(write=self.write),
        )
        self.broken = False
        self.writes = 0
        self.ended = asyncio.Event()
        work = [PromptWork([600], SamplingParams(max_tokens=4000, **params))]
        self.generation = Generation(state, work, None, time.monotonic(), lambda: None)
        self.generation.submit()
        self.answer = asyncio.create_task(answer_stream(self, self.generation, HEADING))

    # Of an exchange:

    @property
    def writer(self):
        return ChunkWriter(self.cycle, self.gate)

    async def start_stream(self, headers):
        pass

    async def send(self, message):
        while not self.gate.open:
            await asyncio.sleep(0)
        self.sent += message["body"]

    async def end(self, body):
        self.sent += body

    # Of a transport:

    def write(self, chunk):
        if self.broken:
            raise RuntimeError("the transport is closed")
        size, rest = chunk.split(b"\r\n", 1)
        assert rest[int(size, 16) :] == b"\r\n"
        self.sent += rest[:-2]
        self.writes += 1

    # Of an engine:

    async def step(self, tokens, finish=None):
        for place, (request_id, sink, token_sink) in enumerate(self.client.sinks):
            if finish is None and self.generation.started:
                token_sink.on_token(tokens[place % len(tokens)], time.monotonic())
            else:
                sink(RequestDelta(request_id, [tokens[place % len(tokens)]], finish))
        ServerState.on_step(self.state, SimpleNamespace(steps=0))
        await asyncio.sleep(0)

    def choices(self):
        """All choices of all events."""
        parts = self.sent.decode().split("\n\n")
        return [json.loads(part[6:])["choices"][0] for part in parts if part and part != "data: [DONE]"]

    def text(self, index=0):
        return "".join(choice["text"] for choice in self.choices() if choice["index"] == index)


HEADING = Heading("completion", "cmpl-1", 1, "m", False, False, ())


@pytest.mark.parametrize("tokenizer", [demo(), sentencepiece()])
@pytest.mark.parametrize("params", [{}, {"n": 2}, {"stop": ("zzz",)}])
@pytest.mark.parametrize("slow", [0.0, 0.3])
def test_a_stream_says_its_tokens_in_order_however_slow_its_reader(tokenizer, params, slow):
    async def body():
        server = Server(tokenizer, **params)
        tokens = tokenizer.encode(TEXT * 4)
        await asyncio.sleep(0)
        for token in tokens[:-1]:
            server.gate.open = random.random() >= slow
            await server.step([token])
        server.gate.open = True
        await server.step(tokens[-1:], FinishReason.LENGTH)
        await server.answer
        for index in range(params.get("n", 1)):
            assert server.text(index) == " " * (tokenizer is sentencepiece()) + TEXT * 4
        counted = server.generation.usage.completion_tokens
        assert counted == len(tokens) * params.get("n", 1)
        assert sum(server.metrics.inter_token_latency.reading().counts) == (len(tokens) - 1) * params.get("n", 1)
        if not slow and not params and tokenizer is demo():
            assert server.writes > 0.5 * len(tokens)

    asyncio.run(body())


def test_a_token_written_at_once_makes_the_same_event_as_a_piece():
    async def body():
        plain, pieces = Server(demo()), Server(demo(), stop=("zzz",))
        for server in (plain, pieces):
            await asyncio.sleep(0)
            for token in demo().encode(TEXT.replace("z", "")):
                await server.step([token])
            await server.step([600], FinishReason.STOP)
            await server.answer
        assert plain.sent == pieces.sent

    asyncio.run(body())


def test_a_stream_whose_transport_breaks_is_ended():
    async def body():
        server = Server(demo())
        await asyncio.sleep(0)
        await server.step([600])
        await server.step([601])
        server.broken = True
        await server.step([602])
        assert server.client.aborted == [1]
        assert server.generation.error.code == "generation_failed"
        await server.answer

    asyncio.run(body())
