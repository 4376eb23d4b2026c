"""The wire: what goes in comes out, what is not a message is dropped, and neither side can hang the other."""

import dataclasses
import itertools
import os
import stat
import tempfile
import time
from collections.abc import Callable

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bladellm_runtime.errors import UserError
from bladellm_runtime.request import FinishReason, SamplingParams
from bladellm_runtime.wire import transport
from bladellm_runtime.wire.contexts import end_context, open_context
from bladellm_runtime.wire.messages import (
    AbortRequests,
    AddRequest,
    AttachFrontEnd,
    EngineFailed,
    EngineMessage,
    EngineReady,
    EngineStats,
    FrontEndStuck,
    FrontMessage,
    RequestComing,
    RequestDelta,
    Shutdown,
    StepOutput,
    TokenLogprobs,
    front_end_of,
    request_ids,
)
from bladellm_runtime.wire.transport import EnginePort, FrontEndGone, open_socket, private_address, private_folder
from tests.support.packed_prompts import unpacked

ids = st.integers(0, 2**63 - 1)
tokens = st.lists(st.integers(0, 2**31), max_size=20)
logprobs = st.lists(
    st.builds(TokenLogprobs, tokens, st.lists(st.floats(allow_nan=False, allow_infinity=False), max_size=5)), max_size=3
)
params = st.builds(
    SamplingParams,
    n=st.integers(1, 128),
    max_tokens=st.none() | st.integers(1, 10**6),
    temperature=st.floats(0, 2),
    top_p=st.floats(0.01, 1),
    logit_bias=st.dictionaries(st.integers(0, 10**5), st.floats(-100, 100), max_size=5),
    seed=st.none() | st.integers(-(2**63), 2**63 - 1),
    stop=st.lists(st.text(min_size=1, max_size=20), max_size=4).map(tuple),
    stop_token_ids=st.lists(st.integers(0, 10**5), max_size=5).map(tuple),
    ignore_eos=st.booleans(),
)
requests = st.builds(AddRequest, ids, tokens, params, st.integers(0, 127), st.floats(0, 1e9))
front_messages = (
    requests
    | st.builds(AbortRequests, st.lists(ids, max_size=9))
    | st.builds(AttachFrontEnd, st.integers(1, 64), st.text(max_size=100))
    | st.builds(RequestComing)
    | st.builds(Shutdown)
)
deltas = st.builds(
    RequestDelta,
    ids,
    tokens,
    st.none() | st.sampled_from(FinishReason),
    st.none() | st.text(max_size=20),
    st.none() | logprobs,
    st.none() | logprobs,
    st.none() | st.floats(0, 1e9),
)
engine_messages = (
    st.builds(StepOutput, st.lists(deltas, max_size=5), st.builds(EngineStats))
    | st.builds(EngineFailed, st.text(max_size=50), st.integers(1, 255))
    | st.builds(FrontEndStuck, st.integers(1, 64))
)


@given(front_messages)
def test_front_messages_survive_the_wire(message):
    assert transport.decode_front_message(transport.encode(message)) == message


@given(requests)
def test_packed_prompts_survive_the_wire(request):
    arrived = transport.decode_front_message(transport.encode(request.packed()))
    assert unpacked(arrived) == request
    assert isinstance(arrived.prompt, bytes) == all(token < 2**31 for token in request.prompt), "as int32"
    assert arrived.packed() == arrived


@given(engine_messages)
def test_engine_messages_survive_the_wire(message):
    assert transport.decode_engine_message(transport.encode(message)) == message


@given(st.binary(max_size=200))
@settings(max_examples=300)
def test_what_does_not_decode_is_dropped(frame):
    for decode, union in (
        (transport.decode_front_message, FrontMessage),
        (transport.decode_engine_message, EngineMessage),
    ):
        try:
            expected = msgspec.msgpack.decode(frame, type=union)
        except (msgspec.DecodeError, ValueError):
            expected = None
        assert decode(frame) == expected


def test_parameters_are_checked_again_on_arrival():
    request = AddRequest(1, [1], SamplingParams(), 0, 0.0)
    fields = dataclasses.asdict(request.params) | {"top_p": float("nan")}
    frame = msgspec.msgpack.encode(["add", 1, [1], fields, 0, 0.0])
    assert transport.decode_front_message(frame) is None


def test_a_temporary_folder_that_cannot_hold_sockets_is_one_sentence(tmp_path, monkeypatch):
    deep = tmp_path / ("x" * 100)
    deep.mkdir()
    for parent, said in ((deep, "too long for sockets.*TMPDIR"), (tmp_path / "missing", "No such file.*TMPDIR")):
        monkeypatch.setattr(tempfile, "tempdir", str(parent))
        with pytest.raises(UserError, match=said):
            private_folder()
    assert not list(deep.iterdir())


@pytest.fixture
def pair():
    address, folder = private_address()
    context = open_context()
    front = open_socket(context)
    front.bind(address)
    port = EnginePort(address)
    yield front, port
    front.close(linger=0)
    port.close()
    end_context(context)
    folder.cleanup()


def test_receive_takes_all_waiting_messages_in_order(pair):
    front, port = pair
    sent = [AbortRequests([number]) for number in range(50)]
    for message in sent[:20]:
        front.send(transport.encode(message))
    front.send(b"\xc1 garbage")
    for message in sent[20:]:
        front.send(transport.encode(message))
    received = []
    while len(received) < len(sent):
        batch = port.receive(2.0)
        assert batch, "the rest never came"
        received += batch
    assert received == sent


def test_receive_waits_no_longer_than_asked(pair):
    _, port = pair
    assert min(seconds_of(lambda: port.receive(0.0)) for _ in range(10)) < 0.02
    assert 0.19 < min(seconds_of(lambda: port.receive(0.2)) for _ in range(2)) < 10.0


def seconds_of(receive: Callable[[], list[object]]) -> float:
    """How long it takes to receive nothing."""
    started = time.monotonic()
    assert receive() == []
    return time.monotonic() - started


def send_many(port, message, count):
    for _ in range(count):
        port.send(message)


def test_a_front_end_that_stops_reading_cannot_hang_the_engine(pair, monkeypatch):
    front, port = pair
    front.send(transport.encode(Shutdown()))
    assert port.receive(2.0) == [Shutdown()]
    monkeypatch.setattr(transport, "SEND_PATIENCE", 0.3)
    started = time.monotonic()
    filler = StepOutput([RequestDelta(1, list(range(500)))], EngineStats())
    with pytest.raises(FrontEndGone):
        send_many(port, filler, 20 * transport.HIGH_WATER_MARK)
    assert time.monotonic() - started < 60


def test_sending_to_nobody_ends_too(monkeypatch):
    address, folder = private_address()
    port = EnginePort(address)
    monkeypatch.setattr(transport, "SEND_PATIENCE", 0.2)
    with pytest.raises(FrontEndGone):
        send_many(port, StepOutput([], EngineStats()), 2 * transport.HIGH_WATER_MARK)
    port.close()
    folder.cleanup()


READY = EngineReady(100, 64, 1000, [1], "cpu", "float32", [], [])


class FrontEnd:
    """A front end's end of the wire."""

    def __init__(self, context, address):
        self.socket = open_socket(context)
        self.socket.bind(address)

    def receive(self, seconds=2.0):
        assert self.socket.poll(int(1000 * seconds)), "no message came"
        return transport.decode_engine_message(self.socket.recv())

    @property
    def silent(self):
        return not self.socket.poll(100)


@pytest.fixture
def several():
    """Three front ends and their engine's port, which is ready."""
    address, folder = private_address()
    context = open_context()
    fronts = [FrontEnd(context, f"{address}{number}") for number in range(3)]
    port = EnginePort(f"{address}0")
    port.send(READY)
    for number in (1, 2):
        port.attach(AttachFrontEnd(number, f"{address}{number}"))
    yield fronts, port, f"{address}-again", context
    for front in fronts:
        front.socket.close(linger=0)
    port.close()
    end_context(context)
    folder.cleanup()


def one_id(front_end, start=0):
    return next(request_ids(front_end, start))


def test_ids_differ_by_front_end_and_start_and_name_the_front_end():
    found = [
        number for front in range(5) for start in range(5) for number in itertools.islice(request_ids(front, start), 99)
    ]
    assert len(set(found)) == len(found)
    assert [front_end_of(number) for number in found] == [front for front in range(5) for _ in range(5 * 99)]
    assert one_id(64, 4000) < 2**63, "an integer of msgpack"


def test_each_front_end_gets_its_part_of_a_step_in_one_message(several):
    fronts, port, _, _ = several
    assert [front.receive() for front in fronts] == [READY] * 3
    deltas = [RequestDelta(one_id(number, start), [number, start]) for start in range(3) for number in (0, 2)]
    single = RequestDelta(one_id(1), [1])
    stats = EngineStats(time=1e9, steps=7)
    port.send(StepOutput([*deltas, single], stats))
    shares = [deltas[::2], [single], deltas[1::2]]
    assert [front.receive() for front in fronts] == [StepOutput(share, stats) for share in shares]
    stats.time += 0.9 * transport.HEARTBEAT_SECONDS
    port.send(StepOutput(deltas, stats))
    assert [fronts[number].receive() for number in (0, 2)] == [StepOutput(shares[number], stats) for number in (0, 2)]
    assert fronts[1].silent
    stats.time += 0.2 * transport.HEARTBEAT_SECONDS
    port.send(StepOutput([deltas[0]], stats))
    assert fronts[0].receive() == StepOutput([deltas[0]], stats)
    assert fronts[1].receive() == StepOutput([], stats), "the heartbeat of a front end without requests"
    assert fronts[2].silent


@pytest.mark.parametrize("message", [StepOutput([], EngineStats()), EngineFailed("broken", 3)])
def test_what_is_no_ones_own_goes_to_all(several, message):
    fronts, port, _, _ = several
    port.send(message)
    assert [[front.receive(), front.receive()] for front in fronts] == [[READY, message]] * 3


def test_messages_of_all_front_ends_arrive(several):
    fronts, port, _, _ = several
    for number, front in enumerate(fronts):
        front.socket.send(transport.encode(AbortRequests([number])))
    received = []
    while len(received) < 3:
        batch = port.receive(2.0)
        assert batch, "the rest never came"
        received += batch
    assert sorted(message.request_ids for message in received) == [[0], [1], [2]]


def test_a_replaced_front_end_gets_nothing_that_was_meant_for_the_one_before(several):
    fronts, port, address, context = several
    fronts[1].socket.close(linger=0)
    port.send(StepOutput([RequestDelta(one_id(1), [1])], EngineStats()))
    port.attach(AttachFrontEnd(1, address))
    fronts[1] = FrontEnd(context, address)
    assert fronts[1].receive() == READY
    assert fronts[1].silent
    mine = StepOutput([RequestDelta(one_id(1, 1), [2])], EngineStats(steps=1))
    port.send(mine)
    assert fronts[1].receive() == mine


def test_another_front_end_that_stops_reading_holds_nobody_up_and_is_reported_once(several):
    fronts, port, _, _ = several
    filler = StepOutput([RequestDelta(one_id(2), list(range(500)))], EngineStats())
    started = time.monotonic()
    send_many(port, filler, 3 * transport.HIGH_WATER_MARK)
    assert time.monotonic() - started < transport.SEND_PATIENCE
    assert [fronts[0].receive(), fronts[0].receive()] == [READY, FrontEndStuck(2)]
    assert fronts[0].silent
    port.send(StepOutput([RequestDelta(one_id(0), [1])], EngineStats()))
    assert isinstance(fronts[0].receive(), StepOutput)


def test_the_address_lies_where_only_this_user_can_go():
    address, folder = private_address()
    path = address.removeprefix("ipc://")
    assert stat.S_IMODE(os.stat(os.path.dirname(path)).st_mode) == 0o700
    assert len(path) < 108, "the kernel's limit of a socket path"
    folder.cleanup()
