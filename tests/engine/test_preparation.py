"""Requests that wait for something before they are scheduled, with preparers that take random times."""

import random

import pytest

from bladellm_runtime.engine.preparation import RefusedError, WaitingRoom
from bladellm_runtime.request import FinishReason
from bladellm_runtime.scheduler.prepared import Prepared
from bladellm_runtime.wire.messages import AddRequest
from tests.engine.test_core import drain, expected, make_core, make_requests


class SlowPreparer:
    """Has what a request needs a random number of polls after it was first asked; refuses ids in `refused`."""

    def __init__(self, seed: int, refused: frozenset[int] = frozenset()) -> None:
        self._random = random.Random(seed)
        self._left: dict[int, int] = {}
        self._refused = refused
        self.released: list[int] = []

    def is_needed(self, request: AddRequest) -> bool:
        return request.request_id % 3 != 0

    def prepare(self, request: AddRequest, prepared: Prepared) -> bool:
        left = self._left.setdefault(request.request_id, self._random.randrange(6))
        if left == 0 and request.request_id in self._refused:
            raise RefusedError("refused", f"request {request.request_id} cannot be prepared")
        prepared.adapter = request.request_id
        return left == 0

    def poll(self) -> list[int]:
        self._left = {request_id: max(0, left - 1) for request_id, left in self._left.items()}
        return [request_id for request_id, left in self._left.items() if left == 0]

    def release(self, request_id: int) -> None:
        self.released.append(request_id)


@pytest.mark.parametrize("overlap", [True, False])
def test_prepared_requests_run_and_refused_ones_do_not(overlap):
    requests = make_requests(40, seed=overlap)
    refused = frozenset({4, 7, 22})
    first, second = SlowPreparer(1), SlowPreparer(2, refused)
    core = make_core(overlap, 18, room=WaitingRoom([first, second]))
    found = drain(core, requests)
    for request in requests:
        tokens, finish, error = found[request.request_id]
        if request.request_id in refused:
            assert (tokens, finish, error) == ([], FinishReason.ERROR, "refused")
        else:
            assert tokens == expected(request)
            assert error is None
    needed = [request.request_id for request in requests if request.request_id % 3]
    assert sorted(first.released) == sorted(second.released) == needed
    core.check()


def test_waiting_requests_are_aborted_once_and_let_go_of_everything():
    preparer = SlowPreparer(3)
    room = WaitingRoom([preparer])
    core = make_core(True, room=room)
    requests = make_requests(9, seed=5)
    assert [delta for request in requests for delta in core.add(request)] == []
    assert core.add(requests[1])[0].error == "invalid_request"  # its id is taken
    deltas = core.abort([1, 2, 5, 5, 77])
    assert [(delta.request_id, delta.finish) for delta in deltas] == [(i, FinishReason.ABORT) for i in (1, 2, 5)]
    assert sorted(preparer.released) == [1, 2, 5]
    found = drain(core, [])
    assert sorted(found) == [0, 3, 4, 6, 7, 8]
    assert sorted(preparer.released) == [1, 2, 4, 5, 7, 8]
    assert core.idle
    assert not room


def test_what_can_never_run_is_refused_before_it_is_prepared():
    preparer = SlowPreparer(3)
    core = make_core(True, room=WaitingRoom([preparer]))
    request = make_requests(3, seed=6)[1]
    [delta] = core.add(AddRequest(1, [1] * 500, request.params, 0, 0.0))
    assert delta.error == "context_length_exceeded"
    assert core.idle
    assert preparer.released == []


def test_those_that_may_be_ready_alone_are_asked_again():
    class Turns(SlowPreparer):
        """Has what request `next` needs."""

        def __init__(self) -> None:
            super().__init__(0)
            self.next, self.asked = -1, []

        def prepare(self, request: AddRequest, prepared: Prepared) -> bool:
            self.asked.append(request.request_id)
            return request.request_id == self.next

        def poll(self) -> list[int]:
            return [] if self.next < 0 else [self.next, 10_000]

    turns = Turns()
    room = WaitingRoom([turns])
    requests = [request for request in make_requests(300, seed=9) if request.request_id % 3]
    assert all(room.enter(request) for request in requests)
    assert room.poll() == []
    assert turns.asked == [request.request_id for request in requests]
    for request in random.sample(requests, 20):
        turns.asked, turns.next = [], request.request_id
        assert room.poll() == []
        assert turns.asked == [request.request_id]
        assert room.ready.pop()[0] is request
    assert len(room) == len(requests) - 20
