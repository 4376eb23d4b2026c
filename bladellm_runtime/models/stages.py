"""What a pipeline stage holds of a model: its layers, and what comes before the first or behind the last of all."""

from dataclasses import dataclass, replace
from typing import Self

from bladellm_runtime.distributed.plan import ParallelPlan
from bladellm_runtime.models.config import ModelSpec
from bladellm_runtime.models.weights import WeightTable


@dataclass(frozen=True, slots=True)
class Stages:
    """spec: of one stage; layers: how those of the model are shared out; to one stage without a pipeline."""

    spec: ModelSpec
    layers: tuple[range, ...]

    @classmethod
    def of(cls, spec: ModelSpec, plan: ParallelPlan | None) -> Self:
        return cls(spec, (range(spec.layers),) if plan is None else plan.stages)

    @property
    def most_layers(self) -> int:
        """Of the largest stage."""
        return max(map(len, self.layers))

    def all_share(self, whole: ModelSpec) -> bool:
        """Whether every stage has a layer without a window, in which beginnings can be read once."""
        return all(None in whole.windows[layers.start : layers.stop] for layers in self.layers)


def stage_spec(spec: ModelSpec, plan: ParallelPlan, stage: int) -> ModelSpec:
    """A model of the stage's layers alone."""
    layers = plan.stages[stage]
    return replace(spec, layers=len(layers), windows=spec.windows[layers.start : layers.stop])


def stage_table(table: WeightTable, plan: ParallelPlan, stage: int) -> WeightTable:
    """What a stage holds of a table, its layers counted from 0.

    The first stage has the embedding, the last one the norm and the head, or the embedding where that is the head too.
    """
    layers, last = plan.stages[stage], stage == len(plan.stages) - 1
    own: WeightTable = {}
    for name, parts in table.items():
        kind, _, rest = name.partition(".")
        if kind == "layers":
            number, _, rest = rest.partition(".")
            if int(number) in layers:
                own[f"layers.{int(number) - layers.start}.{rest}"] = parts
        elif kind == "embedding":
            if stage == 0 or (last and "head.weight" not in table):
                own[name] = parts
        elif last:
            own[name] = parts
    return own
