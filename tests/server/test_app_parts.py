"""The server's small parts, each against something independent."""

import asyncio
import json
import os
import resource
import shutil
import socket
import sys
from functools import partial
from pathlib import Path

import pytest
import uvloop
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry
from prometheus_client import Histogram as ReferenceHistogram

from bladellm_runtime.config import ServingArgs
from bladellm_runtime.errors import CheckpointError, ConfigError, UserError
from bladellm_runtime.ranks.launch import meeting_of
from bladellm_runtime.server.acceptor import Acceptor
from bladellm_runtime.server.auth import Authenticator
from bladellm_runtime.server.errors import ApiError
from bladellm_runtime.server.exchange import ClientGone, Exchange
from bladellm_runtime.server.histogram import Histogram
from bladellm_runtime.server.lifecycle import serve
from bladellm_runtime.server.limits import UNAVAILABLE, Admission, Failure, error_of
from bladellm_runtime.server.listener import allow_descriptors, bind, url_of
from bladellm_runtime.server.shared_counts import SharedCounts
from bladellm_runtime.wire.engine_process import EngineProcess
from tests.conftest import DEMO

BOUNDS = (0.001, 0.5, 1.0, 2.0, 100.0)


@given(st.lists(st.floats(0, 1000) | st.sampled_from(BOUNDS), max_size=50))
def test_histogram_equals_the_prometheus_clients(values):
    ours = Histogram("x", "help", BOUNDS)
    reference = ReferenceHistogram("x", "help", buckets=BOUNDS, registry=CollectorRegistry())
    for value in values:
        ours.observe(value)
        reference.observe(value)
    [expected] = reference.collect()
    wanted = {(s.name, s.labels.get("le")): s.value for s in expected.samples if not s.name.endswith("_created")}
    found = {(s.name, s.labels.get("le")): s.value for s in ours.family({}).samples}
    assert found == pytest.approx(wanted)


def allowed(keys, path, authorization):
    try:
        Authenticator(keys).check(path, authorization)
    except ApiError as error:
        # Any other status is an error of the test.
        return {401: False}[error.status]
    return True


@given(st.binary(max_size=40), st.sampled_from(["/", "/v1/models", "/metrics", "//health", "/health/", "/Ready", ""]))
def test_no_other_header_opens_a_locked_server(authorization, path):
    assert not allowed(["correct horse", "battery"], path, authorization)
    assert not allowed(["correct horse"], path, None)


@pytest.mark.parametrize("path", ["/health", "/ready"])
def test_probes_are_open(path):
    assert allowed(["key"], path, None)


def test_without_keys_everyone_may_enter():
    assert allowed([], "/v1/models", None)


@given(st.integers(1, 20), st.lists(st.integers(1, 8), max_size=30))
def test_admission_never_exceeds_its_limit_and_gives_everything_back(limit, sizes):
    admission, entered = Admission(limit), []
    for size in sizes:
        if sum(entered) + size <= limit:
            admission.enter(size)
            entered.append(size)
        else:
            with pytest.raises(ApiError) as caught:
                admission.enter(size)
            assert caught.value.status == (400 if size > limit else 429)
            assert (caught.value.retry_after is not None) == (caught.value.status == 429)
            assert size > limit or f"has {sum(entered)} now" in caught.value.message
            if entered:
                admission.leave(entered.pop(0))
        assert admission.open == sum(entered) <= limit
    for size in entered:
        admission.leave(size)
    assert admission.open == 0


def test_every_code_of_the_server_has_a_status_clients_retry():
    for code in UNAVAILABLE:
        error = error_of(Failure(code))
        assert (error.status, error.code, error.type) == (503, code, "server_error")
        assert error.retry_after is not None


def test_a_failure_carries_the_sentence_of_the_engine():
    refused = error_of(Failure("constraint_refused", "guided_regex is too large", "guided_regex"))
    assert (refused.status, refused.param, refused.message) == (400, "guided_regex", "guided_regex is too large")
    assert (refused.code, refused.type) == ("constraint_refused", "invalid_request_error")
    failed = error_of(Failure("constraint_failed", "x" * 10_000))
    assert (failed.status, failed.param, failed.code, len(failed.message)) == (500, None, "constraint_failed", 500)
    assert error_of(Failure("never_heard_of")).status == 500


class FakeClient:
    """The far end of an exchange: gives out body parts, keeps what is sent."""

    def __init__(self, parts, headers=(), leaves=False):
        self.parts = list(parts)
        self.leaves = leaves
        self.sent = []
        self.exchange = Exchange({"type": "http", "headers": list(headers)}, self.receive, self.send)

    async def receive(self):
        if not self.parts:
            if self.leaves:
                return {"type": "http.disconnect"}
            await asyncio.sleep(60)
        part = self.parts.pop(0)
        return {"type": "http.request", "body": part, "more_body": bool(self.parts) or self.leaves}

    async def send(self, message):
        self.sent.append(message)


CHUNKED = [(b"transfer-encoding", b"chunked")]


@given(st.lists(st.binary(max_size=30), min_size=1, max_size=10), st.integers(0, 200))
def test_a_body_is_read_whole_or_refused_at_the_limit(parts, limit):
    client = FakeClient(parts, CHUNKED)
    whole = b"".join(parts)
    if len(whole) <= limit:
        assert asyncio.run(client.exchange.read_body(limit, 5)) == whole
        return
    with pytest.raises(ApiError) as caught:
        asyncio.run(client.exchange.read_body(limit, 5))
    assert caught.value.status == 413
    assert sum(map(len, client.parts)) >= len(whole) - limit - 30, "read on after the limit"


def test_a_declared_length_over_the_limit_is_refused_unread():
    client = FakeClient([b"x" * 10], [(b"content-length", b"1000000")])
    with pytest.raises(ApiError) as caught:
        asyncio.run(client.exchange.read_body(100, 5))
    assert caught.value.status == 413
    assert client.parts == [b"x" * 10]


def test_a_body_that_stalls_and_one_whose_client_leaves():
    stalled = FakeClient([b"x", b"y"], CHUNKED)
    stalled.parts = []
    with pytest.raises(ApiError) as caught:
        asyncio.run(stalled.exchange.read_body(100, 0.05))
    assert caught.value.status == 408
    with pytest.raises(ClientGone):
        asyncio.run(FakeClient([b"x"], CHUNKED, leaves=True).exchange.read_body(100, 1))


def test_an_error_to_an_unread_body_closes_the_connection():
    client = FakeClient([b"rest", b"of it"], CHUNKED)
    asyncio.run(client.exchange.fail(ApiError(429, "full", retry_after=1.5)))
    start, *body = client.sent
    headers = dict(start["headers"])
    assert (headers[b"connection"], headers[b"retry-after"]) == (b"close", b"2")
    assert b"".join(part["body"] for part in body) == ApiError(429, "full").body()
    assert body[-1].get("more_body", False) is False
    assert client.parts == [], "what was on its way is read, or the client may see a reset only"


@pytest.mark.parametrize("idle", [False, True])
def test_front_ends_with_fewer_connections_take_the_next_and_nobody_waits_for_an_idle_one(idle, tmp_path):
    """Two in one loop, so that neither is kept from its turn by the machine; the first has 20 connections before."""
    counts = [SharedCounts.create(tmp_path / "counts", 2), SharedCounts(tmp_path / "counts", 1, 2)]
    counts[0].connections.add(20)

    class Counted(asyncio.Protocol):
        def __init__(self, count):
            self.count = count

        def connection_made(self, transport):
            self.count.add(1)

    async def body(listener, others):
        made = [Acceptor(listener, counts[0].connections, partial(Counted, counts[0].connections))]
        if not idle:
            made.append(Acceptor(others, counts[1].connections, partial(Counted, counts[1].connections)))
        clients = [socket.create_connection(listener.getsockname()) for _ in range(61)]
        async with asyncio.timeout(60):
            while counts[0].connections.total < 81:
                await asyncio.sleep(0.001)
        for end in (*clients, *made):
            end.close()
        return [each.connections.own for each in counts]

    with bind("127.0.0.1", 0) as listener, listener.dup() as others:
        others.setblocking(False)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            found = runner.run(body(listener, others))
    assert found == [81, 0] if idle else abs(found[0] - found[1]) <= 3


def test_a_taken_port_and_a_strange_host_are_one_sentence():
    listener = bind("127.0.0.1", 0)
    port = listener.getsockname()[1]
    assert url_of(listener) == f"http://127.0.0.1:{port}"
    with pytest.raises(UserError, match=f"--port {port} .*choose another"):
        bind("127.0.0.1", port)
    listener.close()
    for host in ("no.such.host.invalid", "192.0.2.1"):
        with pytest.raises(UserError, match=f"--host {host} is not an address of this machine"):
            bind(host, 0)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"api_key_file": "missing"}, "--api_key_file missing cannot be read"),
        ({"admin_api_key_file": "missing"}, "--admin_api_key_file missing cannot be read"),
        ({"api_key_file": "{folder}/bytes"}, "--api_key_file .*bytes is not UTF-8 text"),
        ({"api_key": [""]}, "--api_key must not be empty"),
        ({"served_model_name": ["a", ""]}, "--served_model_name must not be empty"),
    ],
)
def test_flags_are_refused_before_the_model_is_loaded(tmp_path, flags, said):
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    given = {name: value.format(folder=tmp_path) if isinstance(value, str) else value for name, value in flags.items()}
    lora = {"enable_lora": True, "lora_dir": str(tmp_path)} if "admin_api_key_file" in flags else {}
    with pytest.raises(ConfigError, match=said):
        serve(ServingArgs(model="m", port=0, **lora, **given), tmp_path)


def test_a_tokenizer_that_does_not_fit_is_refused_while_the_engine_still_starts(tmp_path):
    """By an engine that is never ready."""
    shutil.copytree(DEMO, tmp_path, dirs_exist_ok=True)
    config = json.loads((DEMO / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"vocab_size": 8191}))
    never = [sys.executable, "-c", "import time; time.sleep(600)"]
    refused = pytest.raises(CheckpointError, match="has 8192 tokens, above the vocab_size 8191")
    with EngineProcess(never) as engine, refused:
        serve(ServingArgs(model="m", port=0), tmp_path, engine=engine)


@pytest.mark.parametrize(
    ("host", "said"),
    [
        ("", "--host is empty; leave it out"),
        ("a..b", r"--host a\.\.b is not an address of this machine: not a name that a host can have; leave it out"),
        ("a" * 70, "--host a+ is not an address of this machine: not a name that a host can have; leave it out"),
        ("[::1]", r"--host \[::1\] is not an address of this machine: .*; leave it out"),
    ],
)
def test_hosts_that_cannot_be_are_one_sentence(host, said):
    with pytest.raises(UserError, match=said):
        bind(host, 0)
    if host and ":" not in host:
        with pytest.raises(ConfigError, match=r"--dist_init_addr .* is not known here"):
            meeting_of(ServingArgs(nnodes=2, dist_init_addr=f"{host}:99"), Path("/"))


def test_a_name_is_bound_at_the_first_of_its_addresses_that_this_machine_has(monkeypatch):
    """As "localhost" is where IPv6 is off; a port that is taken at one of them is no reason to take the next."""
    kinds = (socket.SOCK_STREAM, 6, "")
    foreign = [(socket.AF_INET6, *kinds, ("2001:db8::1", 0, 0, 0)), (socket.AF_INET, *kinds, ("192.0.2.1", 0))]
    found = [*foreign, (socket.AF_INET, *kinds, ("127.0.0.1", 0)), (socket.AF_INET, *kinds, ("127.0.0.2", 0))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    with bind("name", 0) as listener:
        assert listener.getsockname()[0] == "127.0.0.1"
        found[2] = (socket.AF_INET, *kinds, listener.getsockname())
        with pytest.raises(UserError, match="--port 0 on name cannot be used: Address already in use"):
            bind("name", 0)
    del found[2:]
    with pytest.raises(UserError, match="--host name is not an address of this machine; leave it out"):
        bind("name", 0)


@pytest.mark.parametrize("name", ["model", "tokenizer_dir", "served_model_name", "api_key", "lora_dir"])
def test_flags_that_are_no_text_are_one_sentence_without_their_value(name):
    value = os.fsdecode(b"secret\xff")
    with pytest.raises(ConfigError, match=f"^--{name} is not UTF-8 text; rename what it names, in UTF-8$"):
        ServingArgs(**{name: [value] if name in ("served_model_name", "api_key") else value})


@pytest.mark.parametrize(
    ("hard", "set_to"), [(24, None), (63, None), (64, 64), (10**6, 228), (resource.RLIM_INFINITY, 228)]
)
def test_open_files_are_allowed_as_far_as_they_may_be_or_the_start_is_refused(hard, set_to, monkeypatch):
    found = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: (20, hard))
    monkeypatch.setattr(resource, "setrlimit", lambda _, limits: found.append(limits))
    if set_to is None:
        with pytest.raises(UserError, match=f"ulimit -n is {hard}, too few files to serve with; set it to 228 or more"):
            allow_descriptors(100)
        assert found == []
    else:
        allow_descriptors(100)
        assert found == [(set_to, hard)]
