"""`RankedLoader`: rank 0's loader of adapters, which has the other ranks do the same."""

from dataclasses import dataclass
from typing import Protocol

from bladellm_runtime.errors import CheckpointError, UserError
from bladellm_runtime.lora.broken_folders import FolderState
from bladellm_runtime.lora.loader import Outcome
from bladellm_runtime.lora.policy import Move
from bladellm_runtime.lora.store import Loader
from bladellm_runtime.ranks.messages import AdapterMoved, DropAdapter, LoadAdapter, RankOrder


class OtherRanks(Protocol):
    """The way to the other ranks, in order with the steps; as `RankedRunner`."""

    def send(self, order: RankOrder) -> None: ...

    def adapters_moved(self) -> list[AdapterMoved]: ...


@dataclass(slots=True)
class _Moving:
    """An adapter on its way. left: ranks that have not reported; error: the first that one of them has reported.
    broken: as this rank's outcome says; what others find may lie in files of another host."""

    left: int
    error: UserError | None = None
    broken: FolderState | None = None


class RankedLoader:
    """An adapter is there when all ranks have it, and given up when one cannot have it: the others then drop it."""

    def __init__(self, own: Loader, others: OtherRanks, ranks: int) -> None:
        """own: of this rank; ranks: how many there are with it."""
        self._own = own
        self._others = others
        self._ranks = ranks
        self._moving: dict[str, _Moving] = {}

    def begin(self, move: Move) -> None:
        """Queue a move on all ranks, behind the steps that were launched. Raises `GroupLostError`."""
        self._others.send(LoadAdapter(move.adapter, move.slot, move.read, move.dropped, move.evicted))
        self._own.begin(move)
        self._moving[move.adapter] = _Moving(self._ranks)

    def poll(self) -> list[Outcome]:
        """The outcomes since the last call, of all ranks together. Raises `GroupLostError`."""
        done: list[Outcome] = []
        for outcome in self._own.poll():
            self._moving[outcome.adapter].broken = outcome.broken
            self._hear(outcome.adapter, outcome.error, done)
        for report in self._others.adapters_moved() if self._moving else ():
            self._hear(report.adapter, None if report.error is None else CheckpointError(report.error), done)
        return done

    def drop(self, adapter: str) -> None:
        """Let go of the hosts' copies. Raises `GroupLostError`."""
        self._others.send(DropAdapter(adapter))
        self._own.drop(adapter)

    def close(self) -> None:
        """As the loader's of this rank; the others are closed with their ranks."""
        self._own.close()

    def _hear(self, adapter: str, error: UserError | None, done: list[Outcome]) -> None:
        moving = self._moving[adapter]
        moving.left -= 1
        moving.error = moving.error or error
        if moving.left == 0:
            del self._moving[adapter]
            if moving.error is not None:
                self.drop(adapter)
            done.append(Outcome(adapter, moving.error, moving.broken))
