"""Results of a pipeline arrive as they were sent, each in its turn, and only from who may send them."""

import random
import tempfile
from contextlib import ExitStack, closing, suppress
from pathlib import Path

import pytest
import zmq

from bladellm_runtime.ranks.channel import ChannelBroken, Secret
from bladellm_runtime.ranks.results import ResultReceiver, ResultSender
from bladellm_runtime.scheduler.plan import StepResult
from bladellm_runtime.wire.messages import TokenLogprobs
from tests.support.step_results import step_result

WAIT_S = 10.0


def a_place() -> str:
    return f"ipc://{Path(tempfile.mkdtemp()) / 'results'}"


def some_result() -> StepResult:
    rows = random.randrange(1, 257)
    scores = [TokenLogprobs([random.randrange(2**17)], [random.gauss(0, 9)]) for _ in range(rows)]
    tokens = [random.choice([None, -1, random.randrange(2**17)]) for _ in range(rows)]
    return step_result(tokens, [random.choice([None, score]) for score in scores], [None] * (rows - 1) + [scores])


def assert_same(found: StepResult, wanted: StepResult) -> None:
    assert found.tokens.tolist() == wanted.tokens.tolist()
    assert (found.logprobs, found.prompt_logprobs) == (wanted.logprobs, wanted.prompt_logprobs)


def test_results_come_as_they_were_sent():
    place = a_place()
    sender = ResultSender(place)  # may be there first
    receiver = ResultReceiver(place)
    results = [some_result() for _ in range(50)]
    for step, result in enumerate(results, 1):
        sender.send(step, result)
    for step, result in enumerate(results, 1):
        assert receiver.wait(WAIT_S)
        assert_same(receiver.take(step), result)
    assert not receiver.wait(0.0)
    sender.close()
    receiver.close()


def test_a_lost_or_broken_result_is_noticed():
    place = a_place()
    receiver, sender = ResultReceiver(place), ResultSender(place)
    sender.send(7, some_result())
    assert receiver.wait(WAIT_S)
    with pytest.raises(ChannelBroken, match="the result of step 6 was lost: that of 7 came instead"):
        receiver.take(6)
    sender._socket.send(b"\x92\x01nonsense")
    assert receiver.wait(WAIT_S)
    with pytest.raises(ChannelBroken, match="the result of step 8 cannot be read"):
        receiver.take(8)
    sender.close()
    receiver.close()


def test_only_who_knows_the_secret_is_heard():
    with zmq.Context() as context, context.socket(zmq.PULL) as probe:
        port = probe.bind_to_random_port("tcp://127.0.0.1")
    place = f"tcp://127.0.0.1:{port}"
    # Closed whatever happens: a context left to the garbage collector may wait for its sockets for ever.
    with closing(ResultReceiver(place, Secret(b"a" * 16))) as receiver, ExitStack() as opened:
        for secret in (None, Secret(b"b" * 16)):
            stranger = opened.enter_context(closing(ResultSender(place, secret)))
            stranger._socket.set(zmq.LINGER, 0)
            with suppress(ChannelBroken):  # where it is sent away before it has said anything
                stranger.send(1, some_result())
        assert not receiver.wait(0.3)
        friend, result = opened.enter_context(closing(ResultSender(place, Secret(b"a" * 16)))), some_result()
        friend.send(1, result)
        assert receiver.wait(WAIT_S)
        assert_same(receiver.take(1), result)
