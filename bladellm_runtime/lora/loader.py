"""Carries moves of adapters out in a thread of its own: from folder to host, from host to slot, beside the steps."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue

import torch

from bladellm_runtime.errors import CheckpointError, UserError
from bladellm_runtime.lora.broken_folders import FolderState, state_of
from bladellm_runtime.lora.peft_folder import AdapterReader, HostAdapter, empty_adapter
from bladellm_runtime.lora.policy import Move
from bladellm_runtime.models.lora import LoraMemory


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of an adapter's move; error: why it was given up, None where it is in its slot. broken: how the files
    were, where the error lies in them and will come again while they are the same."""

    adapter: str
    error: UserError | None
    broken: FolderState | None = None


class AdapterLoader:
    """Of one rank. Moves are carried out in order; adapters are the paths of their folders.

    Memory of copies that were dropped serves the next ones, so there is never more of it than the policy has copies.
    """

    def __init__(
        self, memory: LoraMemory, reader: AdapterReader, steps: Callable[[], Future[None]] | None = None
    ) -> None:
        """steps: where another thread runs them, when those are done that it has been given so far; None where they are
        queued on a device, or run by who calls `begin`."""
        self._memory = memory
        self._reader = reader
        self._steps = steps
        self._device = memory.numbers.device
        self._stream = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None
        self._copies: dict[str, HostAdapter] = {}
        self._spare: list[HostAdapter] = []
        self._outcomes: SimpleQueue[Outcome] = SimpleQueue()
        # Of several devices a new thread has the first, where pinned memory would make it a context.
        on_device = (torch.cuda.set_device, (self._device,)) if self._stream is not None else (None, ())
        self._worker = ThreadPoolExecutor(1, "lora", *on_device)

    def begin(self, move: Move) -> None:
        """Queue a move; its outcome comes from `poll`. Steps that were queued on the current stream before may still
        read the slot, later ones must not."""
        queued: torch.cuda.Event | Future[None] | None = None
        if self._stream is not None:
            queued = torch.cuda.Event()
            queued.record(torch.cuda.current_stream(self._device))
        elif self._steps is not None:
            queued = self._steps()
        self._worker.submit(self._carry_out, move, queued)

    def poll(self) -> list[Outcome]:
        """The outcomes since the last call. Steps that are queued from now on may read the slots of those loaded."""
        found: list[Outcome] = []
        while True:
            try:
                found.append(self._outcomes.get_nowait())
            except Empty:
                return found

    def drop(self, adapter: str) -> None:
        """Let go of the host's copy, if there is one, behind the moves that are queued."""
        self._worker.submit(self._drop, adapter)

    def close(self) -> None:
        """Wait for the move that runs, give the others up."""
        self._worker.shutdown(wait=True, cancel_futures=True)

    def _carry_out(self, move: Move, queued: torch.cuda.Event | Future[None] | None) -> None:
        error: UserError | None = None
        state: FolderState | None = None
        try:
            if move.dropped is not None:
                self._drop(move.dropped)
            state = state_of(Path(move.adapter)) if move.read else None
            self._copy(self._read(move.adapter) if move.read else self._copies[move.adapter], move.slot, queued)
        except UserError as problem:
            error = problem
            if isinstance(problem.__cause__, OSError):
                state = None  # the next attempt may find the file system in a better mood
        except Exception as problem:  # whatever it is, requests that wait for it must hear
            error, state = CheckpointError(f"{move.adapter} cannot be loaded: {problem}"), None
        if error is not None:
            self._drop(move.adapter)
        self._outcomes.put(Outcome(move.adapter, error, None if error is None else state))

    def _read(self, adapter: str) -> HostAdapter:
        pinned = self._stream is not None
        held = self._spare.pop() if self._spare else None
        held = held or empty_adapter(self._memory.layout, self._memory.numbers.dtype, pinned)
        self._copies[adapter] = held
        self._reader.read(Path(adapter), held)
        return held

    def _copy(self, held: HostAdapter, slot: int, queued: torch.cuda.Event | Future[None] | None) -> None:
        if isinstance(queued, Future):
            queued.result()
        if self._stream is None or not isinstance(queued, torch.cuda.Event):
            self._memory.write(slot, held.numbers, held.scales)
            return
        with torch.cuda.stream(self._stream):
            queued.wait(self._stream)
            self._memory.write(slot, held.numbers, held.scales, non_blocking=True)
        self._stream.synchronize()

    def _drop(self, adapter: str) -> None:
        held = self._copies.pop(adapter, None)
        if held is not None:
            self._spare.append(held)
