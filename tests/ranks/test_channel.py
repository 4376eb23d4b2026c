"""Step plans arrive as they were sent, all of them and in order, and only where they may."""

import dataclasses
import random
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq

from bladellm_runtime.kv.operations import Copy, Hide, MemoryPlan, Show, SwapIn, SwapOut
from bladellm_runtime.kv.prompt_tree import pack
from bladellm_runtime.kv.shared_reads import PrefixGroup
from bladellm_runtime.ranks import channel
from bladellm_runtime.ranks.channel import ChannelBroken, PlanReceiver, PlanSender, Secret
from bladellm_runtime.ranks.messages import (
    AdapterMoved,
    CloseRank,
    DropAdapter,
    Hello,
    LoadAdapter,
    Pulse,
    RankReport,
    RunStep,
    SampleStep,
    Serve,
    encode,
    read_masks,
    read_step,
    sample_message,
    step_message,
)
from bladellm_runtime.ranks.pulse import Pulses
from bladellm_runtime.request import SamplingParams
from bladellm_runtime.scheduler.plan import SlotLoad, StepPlan, TokenMasks
from bladellm_runtime.wire.contexts import end_context, open_context
from tests.support.live import until
from tests.support.step_plans import step_plan

ROUNDS = 200


def some_numbers(count: int) -> list[int]:
    return [random.randrange(2**31) for _ in range(count)]


def some_operations() -> MemoryPlan:
    views = [Show(3, 0, some_numbers(5), True), Hide(4, 2), Show(1, 7, [], False)]
    moves = [Copy(*some_numbers(3)), SwapOut(*some_numbers(2)), SwapIn(*some_numbers(2))]
    random.shuffle(views)
    random.shuffle(moves)
    return MemoryPlan(views[: random.randrange(4)], moves[: random.randrange(4)], [Show(9, 1, some_numbers(2), False)])


def some_plan(step: int) -> StepPlan:
    rows = random.randrange(1, 257)
    params = SamplingParams(temperature=0.7, seed=-5, stop=("a",), logit_bias={3: 0.5}, logprobs=2, stop_token_ids=(1,))
    load = SlotLoad(2, 1, pack(some_numbers(random.randrange(1, 50))), 1, params, 3)
    arrays = [np.array(some_numbers(rows)) for _ in range(4)]
    samples = np.array([random.random() < 0.5 for _ in range(rows)])
    prefixes = (PrefixGroup((0, 1, 5), 8), PrefixGroup((2, 3), 40))
    decodes, constrained = random.randrange(rows + 1), sorted(random.sample(range(rows), rows // 2))
    return StepPlan(step, [load], some_operations(), *arrays, samples, decodes, prefixes, constrained)


def a_place() -> str:
    return f"ipc://{Path(tempfile.mkdtemp()) / 'plans'}"


def free_port() -> str:
    context = open_context()
    socket = context.socket(zmq.ROUTER)
    port = socket.bind_to_random_port("tcp://127.0.0.1")
    end_context(context, linger_ms=0)
    return f"tcp://127.0.0.1:{port}"


def send_often(sender: PlanSender, plan: StepPlan, pause: float) -> None:
    for _ in range(100_000):
        sender.send(step_message(plan))
        time.sleep(pause)


def assert_same(found: StepPlan, plan: StepPlan) -> None:
    for field in dataclasses.fields(StepPlan):
        mine, own = getattr(found, field.name), getattr(plan, field.name)
        assert np.array_equal(mine, own) if isinstance(own, np.ndarray) else mine == own


def test_a_plan_arrives_as_it_was():
    for step in range(ROUNDS):
        plan = some_plan(step)
        message = channel.decode_order(encode(channel.Numbered(step, step_message(plan))))
        assert message.number == step
        assert isinstance(message.order, RunStep)
        found = read_step(message.order)
        assert_same(found, plan)
        for mine, own in zip(
            found.memory.views + found.memory.moves, plan.memory.views + plan.memory.moves, strict=True
        ):
            assert type(mine) is type(own)


def decodes(slots: list[int], generations: list[int], starts: list[int], **fields: Any) -> StepPlan:
    rows = len(slots)
    given = {"slots": slots, "generations": generations, "starts": starts, "num_decode": rows}
    return step_plan(random.randrange(99), **{"query_lens": [1] * rows, "samples": [True] * rows} | given | fields)


def test_plans_of_the_same_decode_rows_share_what_they_have_in_common():
    groups = (PrefixGroup((0, 1), 8),)
    plans = [
        decodes([4, 1, 3], [0, 7, 2], [10, 20, 5], prefixes=groups),
        decodes([4, 1, 3], [0, 7, 2], [11, 21, 6], prefixes=groups),
        decodes([4, 1, 3], [0, 7, 2], [13, 23, 8]),
    ]
    found: list[StepPlan] = []
    for plan in plans:
        found.append(read_step(step_message(plan), found[-1] if found else None))
        assert_same(found[-1], plan)
    assert found[0].slots is found[1].slots is found[2].slots
    assert found[0].prefixes is found[1].prefixes


@pytest.mark.parametrize(
    "other",
    [
        decodes([4, 3, 1], [0, 2, 7], [11, 6, 21]),
        decodes([4, 1, 3], [0, 8, 2], [11, 21, 6]),
        decodes([4, 1, 3], [0, 7, 2], [11, 21, 7]),
        decodes([4, 1, 3], [0, 7, 2], [11, 21, 6], num_decode=2),
        decodes([4, 1], [0, 7], [11, 21]),
        decodes([], [], []),
    ],
)
def test_plans_of_other_rows_share_nothing(other):
    """Other slots, sequences or ways to go on, a chunk among them, fewer or none."""
    plan = decodes([4, 1, 3], [0, 7, 2], [10, 20, 5])
    for one, next_one in ((plan, other), (other, plan)):
        last = read_step(step_message(one))
        found = read_step(step_message(next_one), last)
        assert_same(found, next_one)
        assert found.slots is not last.slots


@pytest.mark.parametrize("rows", [0, 1, 5])
def test_masks_arrive_as_they_were(rows):
    masks = np.frombuffer(random.randbytes(4 * rows * 37), np.int32).reshape(rows, 37)
    sent = TokenMasks(sorted(random.sample(range(99), rows)), masks)
    message = channel.decode_order(encode(channel.Numbered(3, sample_message(8, sent))))
    assert isinstance(message.order, SampleStep)
    assert message.order.step == 8
    found = read_masks(message.order)
    assert found.rows == sent.rows
    assert found.masks.dtype == np.int32
    assert np.array_equal(found.masks, masks if rows else np.empty((0, 0)))
    assert found.masks.flags.writeable


def test_what_ranks_say_of_adapters_arrives_as_it_was():
    orders = [LoadAdapter("/a/b", 3, True, None, "/c"), LoadAdapter("é", 0, False, "/d", None), DropAdapter("/a/b")]
    for number, order in enumerate(orders):
        assert channel.decode_order(encode(channel.Numbered(number, order))).order == order
    for report in (AdapterMoved(2, "/a/b", None), AdapterMoved(1, "", "it is broken")):
        assert channel.decode_report(encode(report)) == report


@pytest.mark.parametrize("secret", [None, Secret(b"sixteen bytes and more")])
def test_orders_reach_every_rank_in_order_and_reports_come_back(secret):
    address = a_place() if secret is None else free_port()
    ports = [PlanReceiver(address, rank, secret) for rank in (1, 2)]  # before there is anybody to connect to
    sender = PlanSender(address, (1, 2), secret)
    plans = [some_plan(step) for step in range(ROUNDS)]
    for port in ports:
        port.send(Hello(1, {"a": [1]}, "model"))
    reports: list[RankReport] = []
    until(lambda: len(reports.__iadd__(sender.reports())) == 2)
    for plan in plans:
        sender.send(step_message(plan))
    for port in ports:
        orders = [port.receive(5.0) for _ in plans]
        for order, plan in zip(orders, plans, strict=True):
            assert isinstance(order, RunStep)
            assert_same(read_step(order), plan)
        assert port.receive(0.0) is None
        port.close()
    sender.close()


def test_who_has_another_secret_is_not_heard_and_hears_nothing():
    address = free_port()
    sender = PlanSender(address, (1,), Secret(b"the secret of this group"))
    strangers = [PlanReceiver(address, 1, secret) for secret in (None, Secret(b"another secret, as long"))]
    for stranger in strangers:
        stranger.send(Pulse(1, 5, 5, False))
    time.sleep(0.3)
    assert sender.reports() == []
    port = PlanReceiver(address, 1, Secret(b"the secret of this group"))
    sender.send(Serve())
    assert port.receive(5.0) == Serve()
    assert [stranger.receive(0.1) for stranger in strangers] == [None, None]
    for end in (*strangers, port, sender):
        end.close()


def test_a_rank_that_takes_nothing_breaks_the_channel_and_not_the_memory(monkeypatch):
    monkeypatch.setattr(channel, "SEND_PATIENCE", 0.2)
    address = a_place()
    sender, port = PlanSender(address, (1,)), PlanReceiver(address, 1)
    with pytest.raises(ChannelBroken, match="rank 1 takes no orders"):
        send_often(sender, step_plan(0, slots=[0] * 2000), 0.0)
    assert sender.sent < 5000
    sender.end()
    port.close()
    sender.close()


def test_a_rank_that_is_gone_breaks_the_channel_at_once_when_the_group_has_ended():
    address = a_place()
    sender, port = PlanSender(address, (1,)), PlanReceiver(address, 1)
    sender.send(Serve())
    assert port.receive(5.0) == Serve()
    port.close()
    sender.end()
    started = time.monotonic()
    with pytest.raises(ChannelBroken):
        send_often(sender, step_plan(0), 0.001)
    assert time.monotonic() - started < 3.0
    sender.close()


def test_a_lost_order_is_noticed():
    address = a_place()
    sender, port = PlanSender(address, (1,)), PlanReceiver(address, 1)
    sender.send(Serve())
    assert port.receive(5.0) == Serve()
    sender.sent += 1
    sender.send(CloseRank())
    with pytest.raises(ChannelBroken, match="order 1 was lost: 2 came instead"):
        port.receive(5.0)
    port.close()
    sender.close()


def test_pulses_say_how_far_a_rank_is_and_are_answered(monkeypatch):
    ended = threading.Event()
    monkeypatch.setattr("bladellm_runtime.ranks.pulse.PULSE_SECONDS", 0.02)
    monkeypatch.setattr("bladellm_runtime.ranks.pulse.end_rank", lambda _: ended.set())
    address = a_place()
    sender, pulses = PlanSender(address, (1,)), Pulses(address, 1, None)
    pulses.begun, pulses.done = 7, 5
    pulses.start()
    heard: list[RankReport] = []
    until(lambda: heard.__iadd__(sender.reports()))
    assert heard[-1] == Pulse(1, 7, 5, False)
    assert not ended.is_set()
    sender.end()
    assert ended.wait(2.0)
    pulses.close()
    sender.close()
