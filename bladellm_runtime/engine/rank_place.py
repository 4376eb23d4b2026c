"""Which of the ranks an engine is, and what it does together with the others while it is built."""

from dataclasses import dataclass
from pathlib import Path

import torch

from bladellm_runtime.config import EngineArgs
from bladellm_runtime.distributed.communicator import GroupCommunicator, connect, disconnect, make_communicator
from bladellm_runtime.distributed.links import PipelineLinks, make_links
from bladellm_runtime.engine.memory import MemoryTable
from bladellm_runtime.engine.stage import PipelineStage, Stage
from bladellm_runtime.models.config import ModelSpec
from bladellm_runtime.models.decoder import Decoder, StageEnds
from bladellm_runtime.models.parallel import TensorParallel, make_plan


@dataclass(frozen=True, slots=True)
class Others:
    """The other ranks. every: all of them; layer: those that hold the same layers, None where there are none; links:
    to other stages, None where there are none."""

    every: GroupCommunicator
    layer: GroupCommunicator | None
    links: PipelineLinks | None


@dataclass(frozen=True, slots=True)
class RankPlace:
    """Rank `rank` of `args.world_size`; meeting: where they meet, None where there are no others.

    Ranks count through the tensor-parallel ranks of the first stage, then those of the next.
    """

    rank: int = 0
    meeting: str | None = None

    def local_index(self, args: EngineArgs) -> int:
        """Counts the ranks of this host, and its GPUs."""
        return self.rank - args.local_ranks.start

    def join(self, args: EngineArgs, device: torch.device) -> Others | None:
        """Meet the other ranks; returns when all are there. Raises `ConfigError`."""
        if self.meeting is None:
            return None
        connect(self.meeting, self.rank, args.world_size, device)
        every = make_communicator([range(args.world_size)])
        assert every is not None, "a meeting has two ranks or more"
        degree, stages = args.tensor_parallel_size, args.pipeline_parallel_size
        if stages == 1:
            return Others(every, every, None)
        layer = make_communicator([range(first, first + degree) for first in range(0, args.world_size, degree)])
        return Others(every, layer, make_links(degree, stages, device, args.steps_in_flight))

    def share(self, args: EngineArgs, folder: Path, spec: ModelSpec, others: Others | None) -> TensorParallel | None:
        """What this rank holds of a model and how it works with the others; None where it holds all."""
        if others is None:
            return None
        degree = args.tensor_parallel_size
        plan = make_plan(folder, degree, args.pipeline_parallel_size)
        return TensorParallel(plan, others.layer, self.rank // degree)

    def stage(self, args: EngineArgs, others: Others | None, ends: StageEnds, device: torch.device) -> Stage:
        """What the runner does together with other stages."""
        if others is None or others.links is None:
            return Stage()
        return PipelineStage(ends, args.steps_in_flight, others.links, args.slots, device)

    def write_to_ranks(
        self, args: EngineArgs, others: Others, parallel: TensorParallel, model: Decoder, table: MemoryTable
    ) -> None:
        """Let GPUs that hold the same layers write the rows of short steps, and their logits, to each other's memory,
        where they can; and take the sums of long ones as `--overlap_sums_tokens` says."""
        if others.layer is not None:
            others.layer.overlap_sums(args.overlap_sums_tokens)
        if others.layer is not None and model.device.type == "cuda":
            rows, logits = max(args.step_tokens, args.slots), args.slots
            columns, hidden = parallel.plan.vocab_rows, model.spec.hidden_size
            taken = others.layer.write_to_ranks(rows, hidden, logits, columns, model.dtype, model.device)
            table.add("sums over ranks", taken)

    def leave(self, ending: bool = False) -> None:
        """Leave the others, who are not to be asked for anything any more. ending: so does the process."""
        if self.meeting is not None:
            disconnect(ending)
