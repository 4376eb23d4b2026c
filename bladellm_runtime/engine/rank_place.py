"""Which of the ranks an engine is, and what it does together with the others while it is built."""

from dataclasses import dataclass
from pathlib import Path

import torch

from bladellm_runtime.config import EngineArgs
from bladellm_runtime.distributed.communicator import GroupCommunicator, connect, disconnect, make_communicator
from bladellm_runtime.engine.memory import MemoryTable
from bladellm_runtime.models.config import ModelSpec
from bladellm_runtime.models.decoder import Decoder
from bladellm_runtime.models.parallel import TensorParallel, make_plan, rank_spec


@dataclass(frozen=True, slots=True)
class RankPlace:
    """Rank `rank` of `args.world_size`; meeting: where they meet, None where there are no others."""

    rank: int = 0
    meeting: str | None = None

    def local_index(self, args: EngineArgs) -> int:
        """Counts the ranks of this host, and its GPUs."""
        return self.rank - args.local_ranks.start

    def join(self, args: EngineArgs, device: torch.device) -> GroupCommunicator | None:
        """Meet the other ranks; returns when all are there. Raises `ConfigError`."""
        if self.meeting is None:
            return None
        connect(self.meeting, self.rank, args.world_size, device)
        return make_communicator([range(args.world_size)])

    def share(
        self, args: EngineArgs, folder: Path, spec: ModelSpec, ranks: GroupCommunicator | None
    ) -> tuple[TensorParallel | None, ModelSpec]:
        """What this rank holds of a model and how it works with the others, and the spec of its part."""
        if ranks is None:
            return None, spec
        plan = make_plan(folder, args.tensor_parallel_size, args.pipeline_parallel_size)
        return TensorParallel(plan, ranks), rank_spec(spec, plan, ranks.rank)

    def write_to_ranks(
        self, args: EngineArgs, ranks: GroupCommunicator, parallel: TensorParallel, model: Decoder, table: MemoryTable
    ) -> None:
        """Let GPUs write the rows of decode steps to each other's memory, where they can."""
        if model.device.type == "cuda":
            rows, columns = args.max_running_requests, parallel.plan.vocab_rows
            taken = ranks.write_to_ranks(rows, model.spec.hidden_size, columns, model.dtype, model.device)
            table.add("sums over ranks", taken)

    def leave(self) -> None:
        """Leave the others, who are not to be asked for anything any more."""
        if self.meeting is not None:
            disconnect()
