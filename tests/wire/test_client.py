"""The engine client against the fake engine, as a thread and as a process."""

import asyncio
import os
import sys
import threading
import time

import pytest
import uvloop

from bladellm_runtime.config import EngineArgs, ServingArgs
from bladellm_runtime.errors import UserError
from bladellm_runtime.request import FinishReason, SamplingParams
from bladellm_runtime.wire.client import EngineClient
from bladellm_runtime.wire.engine_process import EngineProcess
from bladellm_runtime.wire.host import ProcessHost
from bladellm_runtime.wire.messages import AddRequest, EngineFailed, RequestDelta
from tests.support.fake_engine import FakeSettings, fake_ready, run_fake_engine
from tests.support.fake_tokens import expected_tokens, tokenizer
from tests.support.late import start_too_late

FAKE = [sys.executable, "-m", "tests.support.fake_engine"]


class Answer:
    """Collects the deltas of one request."""

    def __init__(self):
        self.deltas: list[RequestDelta] = []
        self.ended = asyncio.Event()

    def __call__(self, delta):
        assert not self.ended.is_set(), "a delta after the last one"
        self.deltas.append(delta)
        if delta.finish is not None:
            self.ended.set()

    @property
    def tokens(self):
        return [token for delta in self.deltas for token in delta.tokens]

    @property
    def finish(self):
        return self.deltas[-1].finish


def request(client, prompt, **params):
    if isinstance(prompt, str):
        prompt = tokenizer().encode(prompt).ids
    return AddRequest(client.next_id(), prompt, SamplingParams(seed=1, **params), 0, time.monotonic())


async def ask(client, prompt, **params):
    answer = Answer()
    client.submit(request(client, prompt, **params), answer)
    await asyncio.wait_for(answer.ended.wait(), 10)
    return answer


async def until(condition, seconds=5.0):
    """Poll; a poll counts for its pause alone, however long a busy machine takes over it."""
    for _ in range(int(seconds / 0.01)):
        if condition():
            return
        await asyncio.sleep(0.01)
    assert condition(), f"did not happen within {seconds} s"


async def started_thread(**settings):
    return await EngineClient.start_thread(lambda port: run_fake_engine(port, FakeSettings(**settings)), 10)


async def started_process():
    return await EngineClient.start_process(EngineProcess(FAKE), EngineArgs(), 20)


@pytest.mark.parametrize("start", [started_thread, started_process])
def test_many_requests_each_get_their_own_tokens(start):
    async def body():
        client = await start()
        assert client.ready.vocab_size == 8192
        prompts = [[300 + i, 301, 302] for i in range(40)]
        answers = await asyncio.gather(
            *(ask(client, p, max_tokens=5 + i, ignore_eos=True) for i, p in enumerate(prompts))
        )
        for i, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
            assert answer.tokens == expected_tokens(prompt, 5 + i)
            assert answer.finish == FinishReason.LENGTH
        assert client.open_requests == 0
        await until(lambda: client.stats.running == 0 and client.stats.kv_granules_used == 0)
        await client.close(5)

    asyncio.run(body())


def test_an_aborted_request_is_heard_of_no_more_and_its_slot_is_freed():
    async def body():
        client = await started_thread()
        answer, beside = Answer(), Answer()
        mine, other = request(client, [400, 401], max_tokens=3000), request(client, [500, 501], max_tokens=50)
        client.submit(mine, answer)
        client.submit(other, beside)
        await until(lambda: len(answer.deltas) > 3)
        client.abort([mine.request_id, mine.request_id, 10**15])
        heard = len(answer.deltas)
        await asyncio.wait_for(beside.ended.wait(), 10)
        assert beside.tokens == expected_tokens(other.prompt, 50)
        await until(lambda: client.stats.running == 0)
        assert len(answer.deltas) == heard
        assert client.open_requests == 0
        await client.close(5)

    asyncio.run(body())


class Tokens(Answer):
    """An answer whose plain tokens come without deltas."""

    def on_token(self, token, at):
        assert not self.ended.is_set(), "a token after the last delta"
        assert time.monotonic() - 5 < at <= time.monotonic()
        self.deltas.append(RequestDelta(0, [token]))
        self.taken = getattr(self, "taken", 0) + 1


def test_plain_tokens_go_to_the_token_sink_until_the_end_or_an_abort():
    async def body():
        client = await started_thread()
        whole, cut = Tokens(), Tokens()
        mine, other = request(client, [410, 411], max_tokens=50), request(client, [510], max_tokens=3000)
        client.submit(mine, whole, whole)
        client.submit(other, cut, cut)
        await until(lambda: len(cut.deltas) > 3)
        client.abort([other.request_id])
        heard = len(cut.deltas)
        await asyncio.wait_for(whole.ended.wait(), 10)
        assert whole.tokens == expected_tokens(mine.prompt, 50)
        assert whole.taken == 48  # neither the first one nor the last
        await until(lambda: client.stats.running == 0)
        assert len(cut.deltas) == heard
        await client.close(5)

    asyncio.run(body())


def test_garbage_from_the_engine_is_survived():
    async def body():
        client = await started_process()
        answer = await ask(client, "@fake:garbage", max_tokens=4)
        assert answer.finish == FinishReason.LENGTH
        assert client.failure is None
        await client.close(5)

    asyncio.run(body())


@pytest.mark.parametrize("command", ["@fake:die", "@fake:fail"])
def test_engine_death_ends_every_request_within_a_second(command):
    async def body():
        client = await started_process()
        told = []
        client.on_failure.append(told.append)
        answers = [Answer() for _ in range(10)]
        for answer in answers:
            client.submit(request(client, [600, 601], max_tokens=4000), answer)
        await until(lambda: all(answer.deltas for answer in answers))
        client.submit(request(client, command, max_tokens=4), Answer())
        await until(lambda: client.failure is not None)
        await asyncio.wait_for(asyncio.gather(*(answer.ended.wait() for answer in answers)), 1.0)
        assert {(answer.finish, answer.deltas[-1].error) for answer in answers} == {(FinishReason.ERROR, "engine_dead")}
        assert told == [client.failure]
        late = await ask(client, [1, 2], max_tokens=3)
        assert late.deltas[-1].error == "engine_dead"
        await client.close(5)

    asyncio.run(body())


def test_a_sink_that_raises_harms_only_itself():
    async def body():
        client = await started_thread()

        def broken(delta):
            raise RuntimeError("a fault of one request")

        client.submit(request(client, [700], max_tokens=20), broken)
        answer = await ask(client, [701, 702], max_tokens=20)
        assert answer.tokens == expected_tokens([701, 702], 20)
        await client.close(5)

    asyncio.run(body())


def test_heartbeat_age_grows_only_while_the_engine_is_silent():
    async def body():
        client = await started_process()
        await asyncio.sleep(0.6)
        await until(lambda: client.heartbeat_age() < 0.3)
        client.submit(request(client, "@fake:hang", max_tokens=4), Answer())
        await until(lambda: client.heartbeat_age() > 1.2)
        assert client.failure is None
        started = time.monotonic()
        await client.close(0.3)
        assert time.monotonic() - started < 20, "a hanging engine is killed"
        assert not os.path.exists(f"/proc/{client.process_id}")

    asyncio.run(body())


@pytest.mark.parametrize(
    ("command", "part"),
    [
        (["/nonexistent/engine"], "cannot be run"),
        ([sys.executable, "-c", "import os; os._exit(7)"], "exited with 7"),
        ([sys.executable, "-c", "import os, signal; os.kill(os.getpid(), 9)"], "killed by signal 9"),
        ([sys.executable, "-c", "import time; time.sleep(60)"], "not ready within"),
    ],
)
def test_an_engine_that_does_not_start_is_one_sentence(command, part):
    async def body():
        with pytest.raises(UserError, match=part) as caught:
            await EngineClient.start_process(
                EngineProcess(command), ServingArgs(), 0.5 if "sleep(60)" in command[-1] else 20
            )
        assert "\n" not in str(caught.value)

    asyncio.run(body())


@pytest.mark.parametrize("loop", [uvloop.new_event_loop, asyncio.new_event_loop])
def test_an_engine_that_ends_before_it_is_told_anything_is_one_sentence(loop, monkeypatch):
    start_too_late(monkeypatch)

    async def body():
        with pytest.raises(UserError, match="the engine process exited with 7"):
            await EngineClient.start_process(EngineProcess(["sh", "-c", "exit 7"]), EngineArgs(), 20)

    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(body())


def test_the_engines_own_reason_and_exit_code_come_through():
    async def body():
        def run(port):
            port.send(EngineFailed("--model x has no config.json; name a model folder", 2))

        with pytest.raises(UserError, match="no config") as caught:
            await EngineClient.start_thread(run, 10)
        assert caught.value.exit_code == 2

    asyncio.run(body())


def test_a_crash_of_the_engine_thread_fails_the_client():
    async def body():
        def run(port):
            port.send(fake_ready(FakeSettings()))
            port.receive(0.2)
            raise ValueError("broken step")

        client = await EngineClient.start_thread(run, 10)
        answer = await ask(client, [1], max_tokens=3)
        assert answer.deltas[-1].error == "engine_dead"
        assert "broken step" in client.failure
        await client.close(1)

    asyncio.run(body())


def test_starting_and_closing_leaves_nothing_behind():
    async def once():
        client = await started_process()
        await ask(client, [5, 6], max_tokens=3)
        await client.close(5)
        return client.process_id

    async def body():
        await once()
        descriptors, threads = len(os.listdir("/proc/self/fd")), threads_left()
        for _ in range(3):
            process_id = await once()
            assert not os.path.exists(f"/proc/{process_id}")
        assert len(os.listdir("/proc/self/fd")) <= descriptors
        assert threads_left() <= threads

    asyncio.run(body())


def threads_left() -> int:
    """Threads of this process, once those have ended that wait for engines: the loop hears of the end before."""
    for thread in threading.enumerate():
        if thread.name.startswith("engine-watch"):
            thread.join(5)
    return threading.active_count()


@pytest.mark.parametrize("loop", [uvloop.new_event_loop, asyncio.new_event_loop])
def test_an_engine_that_ended_unnoticed_is_stopped_without_ado(loop):
    async def scenario():
        host = ProcessHost(EngineProcess([sys.executable, "-c", "input()"]), "ipc://unused", EngineArgs())
        await host.start()
        time.sleep(0.5)  # not asyncio's: the loop must not hear of the end
        await host.stop(0.0)
        assert not host.alive

    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(scenario())
