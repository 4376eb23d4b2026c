"""`WaitingRoom`: requests that need something before they can be scheduled, such as a compiled constraint."""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from bladellm_runtime.request import FinishReason
from bladellm_runtime.scheduler.prepared import Prepared
from bladellm_runtime.wire.messages import AddRequest, RequestDelta


class RefusedError(Exception):
    """A request that cannot be prepared. code: its error. sentence: why, for the client."""

    def __init__(self, code: str, sentence: str) -> None:
        super().__init__(sentence)
        self.code = code
        self.sentence = sentence


class Preparer(Protocol):
    """Provides one thing that requests need. All calls come from the thread of the steps, and none waits."""

    def is_needed(self, request: AddRequest) -> bool:
        """Whether the request needs it at all; of the others nothing is heard again."""

    def prepare(self, request: AddRequest, prepared: Prepared) -> bool:
        """Begin, or look again: True once `prepared` has it. Raises `RefusedError`."""

    def poll(self) -> Collection[int]:
        """Go on with what runs in the background; the ids of requests that had to wait and may be ready now, or
        refused: `prepare` is called again for these alone."""

    def release(self, request_id: int) -> None:
        """A request ended that needed it, whether or not it was ever asked for or there."""


@dataclass(slots=True)
class _Guest:
    """A request in the room. left: what it still needs, the first of them under way. errand: nothing follows."""

    request: AddRequest
    left: list[Preparer]
    errand: bool
    prepared: Prepared = field(default_factory=Prepared)


class WaitingRoom:
    """Requests come in with `enter` and leave prepared, refused or aborted; what they were given is theirs until
    `release`. One after another they get what each preparer provides, in the order of these."""

    def __init__(self, preparers: Sequence[Preparer] = ()) -> None:
        self._preparers = preparers
        self._guests: dict[int, _Guest] = {}
        self._users: dict[int, list[Preparer]] = {}
        self._fresh: list[_Guest] = []
        self.ready: list[tuple[AddRequest, Prepared]] = []
        """Requests that can be scheduled, in the order in which they got ready; whoever does it clears the list."""

    def __len__(self) -> int:
        return len(self._guests)

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._guests

    @property
    def request_ids(self) -> list[int]:
        """Of those that wait."""
        return list(self._guests)

    def enter(self, request: AddRequest, errand: bool = False) -> bool:
        """Take a request in; False, with nothing done, where it needs nothing. Its id must not be here already.

        errand: it is done once it has what it needs, and gives that back.
        """
        needed = [preparer for preparer in self._preparers if preparer.is_needed(request)]
        if not needed:
            return False
        guest = _Guest(request, list(needed), errand)
        self._guests[request.request_id] = guest
        self._users[request.request_id] = needed
        self._fresh.append(guest)
        return True

    def poll(self) -> list[RequestDelta]:
        """Look whether guests are ready; returns the terminal deltas of those that were refused, and of errands."""
        # The others are not asked again: there may be thousands.
        changed = [request_id for preparer in self._preparers for request_id in preparer.poll()]
        guests = [self._guests[request_id] for request_id in changed if request_id in self._guests] + self._fresh
        self._fresh = []
        deltas: list[RequestDelta] = []
        for guest in guests:
            if self._guests.get(guest.request.request_id) is guest:
                try:
                    deltas += self._go_on(guest)
                except RefusedError as error:
                    deltas.append(self._refuse(guest.request.request_id, error))
        return deltas

    def abort(self, request_ids: Iterable[int]) -> list[RequestDelta]:
        """End those of the requests that wait here; returns their terminal deltas."""
        found = [request_id for request_id in request_ids if self._guests.pop(request_id, None) is not None]
        for request_id in found:
            self.release(request_id)
        return [RequestDelta(request_id, [], FinishReason.ABORT) for request_id in found]

    def release(self, request_id: int) -> None:
        """A request that left prepared has ended. Others are ignored."""
        for preparer in self._users.pop(request_id, ()):
            preparer.release(request_id)

    def _go_on(self, guest: _Guest) -> list[RequestDelta]:
        while guest.left and guest.left[0].prepare(guest.request, guest.prepared):
            del guest.left[0]
        if guest.left:
            return []
        request_id = guest.request.request_id
        del self._guests[request_id]
        if guest.errand:
            self.release(request_id)
            return [RequestDelta(request_id, [], FinishReason.STOP)]
        self.ready.append((guest.request, guest.prepared))
        return []

    def _refuse(self, request_id: int, error: RefusedError) -> RequestDelta:
        del self._guests[request_id]
        self.release(request_id)
        return RequestDelta(request_id, [], FinishReason.ERROR, error.code, message=error.sentence)
