"""`RankedLoader`: rank 0's loader of adapters, which has the other ranks load the same ones."""

from dataclasses import dataclass

from bladellm_runtime.engine.ranked_runner import RankedRunner
from bladellm_runtime.errors import CheckpointError, UserError
from bladellm_runtime.lora.loader import AdapterLoader, Outcome
from bladellm_runtime.lora.policy import Move
from bladellm_runtime.ranks.messages import DropAdapter, LoadAdapter


@dataclass(slots=True)
class _Moving:
    """An adapter on its way. left: ranks that have not answered; error: the first that one of them had."""

    left: int
    error: UserError | None = None


class RankedLoader:
    """As `AdapterLoader`: an adapter is there when all ranks have it, and given up by all where one of them has not.

    Moves go to the other ranks in order with the steps.
    """

    def __init__(self, loader: AdapterLoader, runner: RankedRunner, ranks: int) -> None:
        """loader: this rank's. ranks: how many there are in all."""
        self._loader = loader
        self._runner = runner
        self._ranks = ranks
        self._moving: dict[str, _Moving] = {}

    def begin(self, move: Move) -> None:
        """Queue a move on all ranks."""
        self._runner.send(LoadAdapter(move.adapter, move.slot, move.read, move.dropped))
        self._moving[move.adapter] = _Moving(self._ranks)
        self._loader.begin(move)

    def poll(self) -> list[Outcome]:
        """What has become of adapters on all ranks since the last call."""
        if not self._moving:
            return []
        found = []
        for outcome in self._loader.poll():
            found += self._answered(outcome.adapter, outcome.error)
        for report in self._runner.moved_adapters():
            error = None if report.error is None else CheckpointError(f"rank {report.rank}: {report.error}")
            found += self._answered(report.adapter, error)
        return found

    def drop(self, adapter: str) -> None:
        """Let go of the hosts' copies."""
        self._runner.send(DropAdapter(adapter))
        self._loader.drop(adapter)

    def close(self) -> None:
        """As the loader's; the other ranks end with their processes."""
        self._loader.close()

    def _answered(self, adapter: str, error: UserError | None) -> list[Outcome]:
        moving = self._moving[adapter]
        moving.left -= 1
        moving.error = moving.error or error
        if moving.left:
            return []
        del self._moving[adapter]
        if moving.error is not None:
            # The ranks that have it need not keep a copy of what the policy takes to be gone.
            self.drop(adapter)
        return [Outcome(adapter, moving.error)]
