"""Preparers of LoRA adapters: bring them to slots for the requests that name them, first come, first served."""

from collections import OrderedDict
from collections.abc import Collection
from concurrent.futures import Future
from pathlib import Path
from typing import Protocol

from bladellm_runtime.engine.preparation import Preparer, RefusedError
from bladellm_runtime.lora.broken_folders import BrokenFolders, FolderState
from bladellm_runtime.lora.store import AdapterStore
from bladellm_runtime.scheduler.prepared import Prepared
from bladellm_runtime.wire.messages import AddRequest, EngineStats

ADAPTER_REFUSED = "adapter_refused"
ADAPTER_IN_USE = "adapter_in_use"


class Adapters(Preparer, Protocol):
    """What an engine does about adapters."""

    def unload(self, adapter: str) -> None:
        """Let go of an adapter, so that its folder is read anew. Raises `RefusedError` while that cannot be."""

    def add_stats(self, stats: EngineStats) -> None:
        """Fill in what is known of them."""

    def close(self) -> None:
        """End the background work."""


class NoAdapters:
    """Refuses requests that name an adapter, where there are no slots for any."""

    def is_needed(self, request: AddRequest) -> bool:
        return bool(request.adapter)

    def prepare(self, request: AddRequest, prepared: Prepared) -> bool:
        raise _not_enabled()

    def poll(self) -> Collection[int]:
        return ()

    def release(self, request_id: int) -> None:
        pass

    def unload(self, adapter: str) -> None:
        raise _not_enabled()

    def add_stats(self, stats: EngineStats) -> None:
        pass

    def close(self) -> None:
        pass


class AdapterPreparer:
    """Has an adapter of `store` in a slot for as long as a live request needs it.

    Once a request has found all slots in use, later ones wait behind it, also those whose adapter is there: requests
    for some adapters must not keep others away for ever.

    A slot may go to another adapter as soon as no live request uses it, although steps in flight may have rows of
    requests that ended. What these rows sample is dropped, but the KV that they write may be remembered: the loader
    lets such steps end before it writes to the slot.

    A folder that is no adapter refuses its requests without being read, or another adapter's losing its slot to it,
    until its files change.
    """

    def __init__(self, store: AdapterStore, slots: int) -> None:
        """slots: how many the store has."""
        self._store = store
        self._slots = slots
        self._line: OrderedDict[int, str] = OrderedDict()
        self._uses: dict[int, str] = {}
        self._loading: set[int] = set()
        self._refused: dict[int, str] = {}
        self._broken = BrokenFolders()
        self._looks: dict[int, Future[FolderState]] = {}
        self._freed = False
        self._news: list[int] = []

    def is_needed(self, request: AddRequest) -> bool:
        return bool(request.adapter)

    def prepare(self, request: AddRequest, prepared: Prepared) -> bool:
        request_id, adapter = request.request_id, request.adapter
        if request_id in self._refused:
            raise RefusedError(ADAPTER_REFUSED, self._refused[request_id])
        if request_id in self._line:
            return False
        if request_id not in self._uses and self._looks_for_change(request_id, adapter):
            return False
        if request_id not in self._uses and (self._line or not self._use(request_id, adapter)):
            self._line[request_id] = adapter
            return False
        slot = self._store.ready_slot(adapter)
        if slot is None:
            return False
        self._loading.discard(request_id)
        prepared.adapter = slot
        prepared.weights = f"{adapter}\0{self._store.version(adapter)}"
        return True

    def poll(self) -> list[int]:
        self._take_outcomes()
        if self._freed:
            self._serve_line()
        found, self._freed, self._news = self._news, False, []
        return found + [request_id for request_id, look in self._looks.items() if look.done()]

    def release(self, request_id: int) -> None:
        self._refused.pop(request_id, None)
        self._looks.pop(request_id, None)
        self._loading.discard(request_id)
        self._freed |= self._line.pop(request_id, None) is not None
        adapter = self._uses.pop(request_id, None)
        if adapter is not None:
            self._store.release(adapter)
            self._freed = True

    def unload(self, adapter: str) -> None:
        # One that was loaded for requests that have ended since may still seem to be on its way.
        self._take_outcomes()
        if not self._store.unload(adapter):
            name = Path(adapter).name
            raise RefusedError(ADAPTER_IN_USE, f"adapter {name!r} is in use; unload it when its requests have ended")
        self._broken.forget(adapter)

    def add_stats(self, stats: EngineStats) -> None:
        stats.lora_slots = self._slots
        stats.lora_used = len(self._store.policy.in_use)
        stats.lora_waiting = len(self._line) + len(self._loading) + len(self._looks)
        stats.lora_loads = self._store.loads
        stats.lora_evictions = self._store.evictions
        stats.lora_load_seconds = self._store.load_seconds

    def close(self) -> None:
        self._broken.close()
        self._store.close()

    def _looks_for_change(self, request_id: int, adapter: str) -> bool:
        """Whether the files of an adapter that was broken are still being looked at. Raises `RefusedError` where they
        are the same."""
        if adapter in self._broken and request_id not in self._looks:
            self._looks[request_id] = self._broken.look(adapter)
        look = self._looks.get(request_id)
        if look is None:
            return False
        if not look.done():
            return True
        del self._looks[request_id]
        reason = self._broken.reason(adapter, look.result())
        if reason is not None:
            raise RefusedError(ADAPTER_REFUSED, reason)
        return False

    def _serve_line(self) -> None:
        while self._line:
            request_id, adapter = next(iter(self._line.items()))
            if not self._use(request_id, adapter):
                return
            del self._line[request_id]
            self._news.append(request_id)

    def _use(self, request_id: int, adapter: str) -> bool:
        """Count a use by a request; False where there is no slot for its adapter."""
        if not self._store.acquire(adapter):
            return False
        self._uses[request_id] = adapter
        self._loading.add(request_id)
        return True

    def _take_outcomes(self) -> None:
        """Hear what the store has done; refuses the requests whose adapter could not be loaded."""
        outcomes = self._store.poll()
        for outcome in outcomes:
            users = [user for user, used in self._uses.items() if used == outcome.adapter]
            if outcome.error is not None:
                reason = _for_clients(str(outcome.error), outcome.adapter)
                users = self._give_up(outcome.adapter, users, reason, outcome.broken)
            self._news += users
        self._freed |= bool(outcomes)

    def _give_up(self, adapter: str, users: list[int], reason: str, broken: FolderState | None) -> list[int]:
        """Refuse the users of an adapter, and where its files are broken all that wait for it; returns them."""
        if broken is not None:
            self._broken.add(adapter, broken, reason)
            waiting = [user for user, wanted in self._line.items() if wanted == adapter]
            for user in waiting:
                del self._line[user]
            users += waiting
        self._refused |= dict.fromkeys(users, reason)
        return users


def _for_clients(sentence: str, adapter: str) -> str:
    """A sentence without the place of an adapter on this host."""
    return sentence.replace(f"{adapter}/", "").replace(adapter, Path(adapter).name)


def _not_enabled() -> RefusedError:
    return RefusedError(ADAPTER_REFUSED, "this engine has no slots for LoRA adapters; start it with --enable_lora")
