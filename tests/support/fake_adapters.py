"""Adapters of the fake engine: the runtime's own slots, and in place of matrices a checksum of the adapter's config.

What is on the device stays as it was read, whatever becomes of the folder; so tests see when it is read anew.
"""

import time
import zlib
from pathlib import Path

from bladellm_runtime.lora.policy import AdapterPolicy, Move
from bladellm_runtime.request import FinishReason
from bladellm_runtime.wire.messages import AddRequest, EngineStats, MoveAdapter, RequestDelta

CONFIG = "adapter_config.json"


def save_fake_adapter(folder: Path, text: str = "") -> Path:
    """An adapter of the fake engine: a folder with a config that says anything."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CONFIG).write_text(text or folder.name)
    return folder


def checksum(folder: Path) -> int:
    """By what an adapter changes the key of answers."""
    return zlib.crc32((folder / CONFIG).read_bytes())


class FakeAdapters:
    """Whose adapters are where, and who waits for one. Loading takes `load_seconds`, beside the steps."""

    def __init__(self, max_loras: int, max_cpu_loras: int, load_seconds: float) -> None:
        self._policy = AdapterPolicy(max_loras, max_cpu_loras)
        self._slots = max_loras
        self._load_seconds = load_seconds
        self._loading: list[tuple[float, str]] = []
        self._copies: dict[str, int] = {}
        self._waiting: dict[int, AddRequest | MoveAdapter] = {}
        self._held: dict[int, str] = {}
        self._refused: dict[str, str] = {}
        self._loads = self._evictions = 0

    @property
    def request_ids(self) -> list[int]:
        """Of those that wait."""
        return list(self._waiting)

    def enter(self, message: AddRequest | MoveAdapter) -> list[RequestDelta]:
        """Have a request wait for its adapter, or carry a move out; returns the end of those that end at once."""
        if isinstance(message, MoveAdapter) and not message.load:
            if not self._policy.forget(message.adapter):
                return [_error(message.request_id, "adapter_in_use", "the adapter is in use; try again later")]
            self._copies.pop(message.adapter, None)
            return [RequestDelta(message.request_id, [], FinishReason.STOP)]
        self._waiting[message.request_id] = message
        return []

    def poll(self) -> tuple[list[AddRequest], list[RequestDelta]]:
        """Requests whose adapter is there, and the end of moves and of requests whose adapter is none."""
        self._finish_loads()
        ready, deltas = [], []
        for request_id, message in list(self._waiting.items()):
            if request_id not in self._held and not self._acquire(request_id, message.adapter):
                continue
            refusal = self._refused.get(message.adapter)
            if refusal is None and self._policy.ready_slot(message.adapter) is None:
                continue
            del self._waiting[request_id]
            if refusal is not None:
                deltas.append(_error(request_id, "adapter_refused", refusal))
            elif isinstance(message, AddRequest):
                ready.append(message)
                continue
            else:
                deltas.append(RequestDelta(request_id, [], FinishReason.STOP))
            self.release(request_id)
        self._refused.clear()
        return ready, deltas

    def content(self, adapter: str) -> int:
        """What the key of an answer changes by; 0 for the base model."""
        return self._copies[adapter] if adapter else 0

    def release(self, request_id: int) -> None:
        """A request ended; those without an adapter are ignored."""
        self._waiting.pop(request_id, None)
        adapter = self._held.pop(request_id, None)
        if adapter is not None:
            self._policy.release(adapter)

    def add_stats(self, stats: EngineStats) -> None:
        stats.lora_slots = self._slots
        stats.lora_used = len(self._policy.in_use)
        stats.lora_waiting = sum(isinstance(item, AddRequest) for item in self._waiting.values())
        stats.lora_loads, stats.lora_evictions = self._loads, self._evictions

    def _acquire(self, request_id: int, adapter: str) -> bool:
        acquired = self._policy.acquire(adapter)
        if acquired is None:
            return False
        self._held[request_id] = adapter
        if acquired.move is not None:
            self._begin(acquired.move)
        return True

    def _begin(self, move: Move) -> None:
        self._loads += 1
        self._evictions += move.evicted is not None
        if move.dropped is not None:
            del self._copies[move.dropped]
        self._loading.append((time.monotonic() + self._load_seconds, move.adapter))

    def _finish_loads(self) -> None:
        now = time.monotonic()
        for due, adapter in list(self._loading):
            if due > now:
                continue
            self._loading.remove((due, adapter))
            try:
                self._copies[adapter] = self._copies.get(adapter) or checksum(Path(adapter))
            except OSError:
                self._refused[adapter] = f"{CONFIG} is missing"
                self._policy.failed(adapter)
            else:
                self._policy.loaded(adapter)


def _error(request_id: int, code: str, sentence: str) -> RequestDelta:
    return RequestDelta(request_id, [], FinishReason.ERROR, code, message=sentence)
