"""Servers that fail: the level ends, and its records say how every request did."""

import asyncio
import base64
import json
import time
from collections import Counter
from collections.abc import Callable
from itertools import pairwise

import pytest

from bladellm_runtime.errors import UserError
from bladellm_tools.bench import level as level_module
from bladellm_tools.bench.args import LevelArgs, MockArgs, TargetArgs, WorkloadArgs
from bladellm_tools.bench.client import LiveEvent
from bladellm_tools.bench.endpoints import free_port
from bladellm_tools.bench.eventloop import run_loop
from bladellm_tools.bench.level import run_level
from bladellm_tools.bench.mock_process import MockProcess
from bladellm_tools.bench.records import LevelRun, Load, Outcome
from bladellm_tools.bench.target import Target, resolve_target
from bladellm_tools.bench.workload import plan_requests
from tests.bench.driving import ask, closed, drive, open_loop

FAST = {"ttft": 0.005, "tbt": 0.002}
OK_ANSWER = b'data: {"choices": [{"index": 0, "text": "a", "finish_reason": "stop"}]}\n\ndata: [DONE]\n\n'


def outcomes(run: LevelRun) -> Counter[Outcome]:
    return Counter(record.outcome for record in run.requests)


@pytest.mark.parametrize(
    ("fault", "outcome"),
    [
        ("http_500", Outcome.HTTP_ERROR),
        pytest.param("error_event", Outcome.STREAM_ERROR, marks=pytest.mark.slow),
        ("cut", Outcome.CUT),
        pytest.param("garbage", Outcome.GARBAGE, marks=pytest.mark.slow),
        ("stall", Outcome.TIMEOUT),
    ],
)
def test_every_fault_has_its_outcome_and_harms_no_other_request(fault: str, outcome: Outcome) -> None:
    mock = MockArgs(**FAST, fault=fault, fault_share=0.25)
    run = drive(mock, *open_loop(100, arrival="constant", num_requests=40), tokens=5, timeout=0.5)
    assert outcomes(run) == {Outcome.OK: 30, outcome: 10}
    assert run.aborted is None
    failed = [record for record in run.requests if record.outcome is not Outcome.OK]
    assert all(record.error and record.ended is not None for record in failed)
    assert all(record.status == (500 if fault == "http_500" else 200) for record in failed)
    assert all(bool(record.times) == (fault != "http_500") for record in failed)
    assert [record.index for record in run.requests] == list(range(40))


@pytest.mark.parametrize("loop", ["open", pytest.param("closed", marks=pytest.mark.slow)])
def test_a_server_that_dies_ends_the_level_soon(loop: str) -> None:
    load, level = open_loop(50, num_requests=1000) if loop == "open" else closed(4, 1000)
    began = time.monotonic()
    run = drive(MockArgs(**FAST, die_after=30), load, level, tokens=5)
    assert time.monotonic() - began < 8
    assert run.aborted is not None
    assert "no connections" in run.aborted
    found = outcomes(run)
    assert 25 <= found[Outcome.OK] <= 30
    assert found[Outcome.CONNECT] >= 10
    assert set(found) <= {Outcome.OK, Outcome.CONNECT, Outcome.CUT}
    if loop == "open":
        assert len(run.requests) == 1000
        assert run.requests[-1].sent is None


def test_answers_that_do_not_end_are_cancelled_at_the_drain_limit() -> None:
    mock = MockArgs(ttft=0.005, tbt=0.1)
    run = drive(mock, *open_loop(50, num_requests=20, drain_limit=1), tokens=1000)
    assert outcomes(run) == {Outcome.CANCELLED: 20}
    assert run.aborted is not None
    assert "--drain_limit" in run.aborted
    assert all(5 < len(record.times) < 20 and len(record.tokens) == len(record.times) for record in run.requests)


def test_a_closed_loop_does_not_wait_for_ever_for_a_silent_server() -> None:
    load, level = Load(concurrency=2), LevelArgs(arrival="closed", num_requests=100, warmup=0, drain_limit=1)
    began = time.monotonic()
    run = drive(MockArgs(**FAST, fault="stall"), load, level, tokens=5)
    assert time.monotonic() - began < 6
    assert run.aborted is not None
    assert "sent nothing" in run.aborted
    assert outcomes(run) == {Outcome.CANCELLED: 2}


async def run_against(reply: Callable[[bytes], bytes | None], requests: int = 3, **fields: object) -> LevelRun:
    """A level against a server that reads a request and writes these bytes; it hangs up after each, or on None."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        request = await reader.readuntil(b"\r\n\r\n")
        data = reply(request)
        if data is not None:
            writer.write(data)
            await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    target = Target("odd", f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", model="m", **fields)
    load, level = closed(1, requests)
    plan = plan_requests(WorkloadArgs(input_len=4, output_len=4), level, load, 0)
    run = await run_level(target, plan, load, level, 0, 0)
    server.close()
    return run


def body(content: bytes, kind: str = "text/event-stream", status: str = "200 OK") -> bytes:
    return f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {len(content)}\r\n\r\n".encode() + content


UNDELIMITED = b"HTTP/1.0 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"
REPLIES = [
    (body(OK_ANSWER), Outcome.OK),
    (UNDELIMITED + OK_ANSWER, Outcome.OK),
    (b"HTTP/1.1 100 Continue\r\n\r\n" + body(OK_ANSWER), Outcome.OK),
    (body(OK_ANSWER) + body(OK_ANSWER), Outcome.OK),
    (None, Outcome.CONNECT),
    (b"SSH-2.0-OpenSSH_9.6\r\n", Outcome.GARBAGE),
    (b"\x16\x03\x01" * 50, Outcome.GARBAGE),
    (b"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: x\r\n\r\n", Outcome.GARBAGE),
    (b"HTTP/1.1 200 OK\r\nX: " + b"y" * 10**6, Outcome.GARBAGE),
    (body(b"<html><body>hello</body></html>", "text/html"), Outcome.GARBAGE),
    (body(json.dumps({"choices": [{"text": "a"}]}).encode(), "application/json"), Outcome.GARBAGE),
    (body(b""), Outcome.CUT),
    (body(OK_ANSWER)[:-30], Outcome.CUT),
    (UNDELIMITED + OK_ANSWER[:-60], Outcome.CUT),
    (body(b"<h1>busy</h1>", "text/html", "503 Busy"), Outcome.HTTP_ERROR),
    (body(b"", status="302 Found"), Outcome.HTTP_ERROR),
    (b"HTTP/1.1 204 No Content\r\n\r\n", Outcome.HTTP_ERROR),
]


@pytest.mark.turns
@pytest.mark.parametrize(("reply", "outcome"), REPLIES)
def test_whatever_a_server_answers_the_level_ends(reply: bytes | None, outcome: Outcome, monkeypatch) -> None:
    monkeypatch.setattr(level_module, "FAILURE_PAUSE_SECONDS", 0.01)
    run = run_loop(run_against(lambda _: reply))
    assert outcomes(run) == {outcome: 3}
    assert all((record.error is None) == (outcome is Outcome.OK) for record in run.requests)


def test_an_error_keeps_its_status_and_message(monkeypatch) -> None:
    monkeypatch.setattr(level_module, "FAILURE_PAUSE_SECONDS", 0.01)
    reply = body(b'{"error": {"message": "too many\\nrequests"}}', "application/json", "429 Too Many Requests")
    record = run_loop(run_against(lambda _: reply)).requests[0]
    assert (record.status, record.error) == (429, "status 429: too many requests")


def test_requests_carry_what_the_target_says() -> None:
    seen: list[bytes] = []

    def reply(request: bytes) -> bytes:
        seen.append(request)
        return body(OK_ANSWER)

    run_loop(run_against(reply, requests=1, headers={"X-Team": "a", "Authorization": "Bearer k"}))
    lines = seen[0].decode().split("\r\n")
    assert lines[0] == "POST /v1/completions HTTP/1.1"
    assert {"X-Team: a", "Authorization: Bearer k", "Content-Type: application/json"} <= set(lines)
    seen.clear()
    run_loop(run_against(reply, requests=1, headers={"host": "inner", "content-type": "text/json"}))
    fields = [line.partition(":")[0].lower() for line in seen[0].decode().split("\r\n")[1:] if line]
    assert sorted(fields) == ["content-length", "content-type", "host"]


def test_a_login_in_the_address_is_sent_with_every_request() -> None:
    with MockProcess(MockArgs()) as mock:
        url = mock.url.replace("http://", "http://me:pass%40word@")
        target = run_loop(resolve_target(TargetArgs(), "ours", url))
        assert target.url == mock.url + "/v1/completions"
        assert base64.b64decode(target.headers["Authorization"].removeprefix("Basic ")) == b"me:pass@word"
        with pytest.raises(UserError, match="--api_key"):
            run_loop(resolve_target(TargetArgs(api_key="k"), "ours", url))


def test_nobody_there() -> None:
    url = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(UserError, match="no server answers at") as caught:
        run_loop(resolve_target(TargetArgs(), "ours", url))
    assert "\n" not in str(caught.value)
    target = Target("ours", url, model="m")
    for load, level in (open_loop(200, num_requests=50), closed(2, 50)):
        plan = plan_requests(WorkloadArgs(input_len=4, output_len=4), level, load, 0)
        run = run_loop(run_level(target, plan, load, level, 0, 0))
        assert set(outcomes(run)) == {Outcome.CONNECT}
        assert run.aborted is not None


def test_the_model_is_asked_for_and_a_path_is_forgiven() -> None:
    with MockProcess(MockArgs()) as mock:
        target = run_loop(resolve_target(TargetArgs(api="chat"), "ours", mock.url + "/v1/"))
        assert (target.model, target.url) == ("mock", mock.url + "/v1/chat/completions")
        assert run_loop(resolve_target(TargetArgs(model="other"), "ours", mock.url)).model == "other"


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"header": ["novalue"]}, "--header"),
        ({"header": ["X: a\r\nY: b"]}, "--header"),
        ({"header": ["content-length: 3"]}, "--header content-length"),
        ({"header": ["Transfer-Encoding: chunked"]}, "--header Transfer-Encoding"),
        ({"header": ["X-A: 1", "x-a: 2"]}, "twice"),
        ({"header": ["authorization: x"], "api_key": "k"}, "--api_key"),
        ({"api_key": "a\nb"}, "--api_key"),
        ({"extra_body": "{"}, "--extra_body"),
        ({"extra_body": "[1]"}, "--extra_body"),
        ({"extra_body": f'{{"seed": {2**70}}}'}, "--extra_body"),
        ({"extra_body": '{"user": "\\ud800"}'}, "--extra_body"),
    ],
)
def test_flags_that_cannot_be_sent_are_refused(fields: dict[str, object], words: str) -> None:
    with pytest.raises(UserError, match=words):
        run_loop(resolve_target(TargetArgs(**fields), "ours", "http://127.0.0.1:1"))


def test_a_closed_loop_goes_round_a_short_plan_with_new_prompts() -> None:
    async def main(url: str) -> tuple[LevelRun, set[str]]:
        load, level = closed(2, 12)
        plan = plan_requests(WorkloadArgs(input_len=8, output_len=2), level, load, 0)[:5]
        target = await resolve_target(TargetArgs(), "mock", url)
        prompts: set[str] = set()

        class Watched(Target):
            def body(self, planned: object) -> bytes:
                prompts.add(planned.prompt)  # type: ignore[attr-defined]
                return super().body(planned)  # type: ignore[arg-type]

        return await run_level(Watched(**vars(target)), plan, load, level, 0, 0), prompts

    with MockProcess(MockArgs(**FAST)) as mock:
        run, prompts = run_loop(main(mock.url))
    assert outcomes(run) == {Outcome.OK: 12}
    assert len({" ".join(prompt.split()[:4]) for prompt in prompts}) == 12


def test_a_closed_loop_keeps_its_streams_busy_and_starts_them_apart() -> None:
    run = drive(MockArgs(ttft=0.05, tbt=0.01), *closed(4, 20), tokens=6)
    events = sorted([(record.sent, 1) for record in run.requests] + [(record.ended, -1) for record in run.requests])
    in_flight, peak = 0, 0
    for _, change in events:
        in_flight += change
        peak = max(peak, in_flight)
    assert peak == 4
    first = sorted(record.intended for record in run.requests)[:4]
    assert all(0.015 < later - sooner < 0.03 for sooner, later in pairwise(first))


def test_the_live_view_hears_of_every_request() -> None:
    heard: list[LiveEvent] = []

    async def main(url: str) -> LevelRun:
        load, level = open_loop(100, num_requests=10)
        target = await resolve_target(TargetArgs(), "mock", url)
        plan = plan_requests(WorkloadArgs(input_len=4, output_len=3), level, load, 0)
        return await run_level(target, plan, load, level, 0, 0, heard.append)

    with MockProcess(MockArgs(**FAST)) as mock:
        run_loop(main(mock.url))
    assert Counter(event.kind for event in heard) == {"sent": 10, "first_token": 10, "ended": 10}
    assert all(event.record.times for event in heard if event.kind == "first_token")
    assert [event.at for event in heard] == sorted(event.at for event in heard)


def test_the_warm_up_has_the_load_of_the_level() -> None:
    halves = {"duration": 0.5, "warmup": 0.5}
    run = drive(MockArgs(**FAST), *open_loop(100, **halves, min_requests=1, arrival="constant"), tokens=2)
    warm = [record for record in run.requests if record.intended < run.warmup]
    assert (len(warm), len(run.requests)) == (50, 100)
    assert run.duration == pytest.approx(0.99)
    assert all(abs((record.sent or 0) - record.intended) < 0.2 for record in run.requests)


def test_an_idle_connection_that_the_server_closed_is_no_failure() -> None:
    """A server that keeps connections open, says so, and closes them all the same."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(body(OK_ANSWER))
        await reader.readuntil(b"\r\n\r\n")
        writer.close()

    async def main() -> LevelRun:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        load, level = closed(1, 6)
        plan = plan_requests(WorkloadArgs(input_len=4, output_len=4), level, load, 0)
        return await run_level(Target("odd", url, model="m"), plan, load, level, 0, 0)

    assert outcomes(run_loop(main())) == {Outcome.OK: 6}


def test_usage_that_is_not_reported_is_counted_in_chunks() -> None:
    run = drive(MockArgs(**FAST, report_usage=False), *closed(1, 2), tokens=7)
    assert all((record.completion_tokens, record.counted_by) == (7, "chunks") for record in run.requests)


def test_two_levels_of_one_mock_do_not_share_a_clock() -> None:
    async def main(url: str) -> list[LevelRun]:
        return [await ask(url, *closed(1, 2), tokens=2) for _ in range(2)]

    with MockProcess(MockArgs(**FAST)) as mock:
        first, second = run_loop(main(mock.url))
    assert second.began > first.began
    assert second.requests[0].intended < 0.1
