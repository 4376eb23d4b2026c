"""Both forward passes of captured decode steps whose rows share beginnings: reading these once, and for each row."""

from dataclasses import dataclass, field

import torch

from bladellm_runtime.engine.build import Engine
from bladellm_runtime.engine.step_graphs import StepGraphs
from bladellm_runtime.scheduler.plan import StepPlan


@dataclass
class BothReads:
    """Has an engine run both for every step with groups; keeps the logits, (each row's own reads, shared ones)."""

    graphs: StepGraphs
    logits: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)

    @classmethod
    def watch(cls, engine: Engine) -> "BothReads":
        graphs = engine.core._runner._graphs
        assert graphs is not None
        both = cls(graphs)
        both.inner, graphs.forward = graphs.forward, both.forward
        return both

    def forward(self, plan: StepPlan, size: int) -> torch.Tensor:
        if not plan.prefixes:
            return self.inner(plan, size)
        self.graphs._graphs[size].forward()
        alone = self.graphs.sampling.logits[: len(plan.slots)].clone()
        found = self.inner(plan, size)
        self.logits.append((alone, found.clone()))
        return found

    def differences(self) -> torch.Tensor:
        """Of all logits, beside the largest one."""
        alone, shared = (torch.cat([pair[index].float().flatten() for pair in self.logits]) for index in range(2))
        assert torch.isfinite(shared).all()
        return (alone - shared).abs() / alone.abs().max()
