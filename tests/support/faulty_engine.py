"""The runtime's own engine process with faults that requests set off: `python -m tests.support.faulty_engine FAULTS`.

A prompt that begins with `TRIGGER` sets the first one off, in the step in which its request gets a slot; one that
begins with `TRIGGER - 1` sets the second one off instead, and so on. The faults:

- `short`: from then on steps of more than `FITTING_TOKENS` tokens run out of memory
- `cursed`: every step with such a request in it runs out of memory
- `exhausted`: from then on every step runs out of memory
- `hog`: torch takes what is left of the GPU's memory, but for `LEFT_BYTES`
- `illegal`: from then on every step raises what torch raises after an illegal memory access
- `store`: a kernel stores to an address that is nobody's
"""

import sys
from typing import Any

import torch

from bladellm_runtime.engine import process
from bladellm_runtime.engine.runner import ModelRunner
from bladellm_runtime.scheduler.plan import StepPlan

TRIGGER = 4999
FITTING_TOKENS = 100
LEFT_BYTES = 4 << 20
ILLEGAL = "CUDA error: an illegal memory access was encountered\nCUDA kernel errors might be reported at another call."


class Fault:
    """Stands in front of `ModelRunner._run_plan`."""

    def __init__(self, kinds: list[str]) -> None:
        self._kinds = kinds
        self._kind = ""
        self._run = ModelRunner._run_plan
        self._cursed: set[int] = set()
        self._hog: list[torch.Tensor] = []
        self._faults = {
            "short": self._short, "cursed": self._cursed_steps, "exhausted": self._exhausted, "hog": self._take_memory,
            "illegal": self._illegal, "store": self._store,
        }  # fmt: skip

    def install(self) -> None:
        """Make every runner of this process run its steps through this."""
        fault = self

        def run(runner: ModelRunner, plan: StepPlan) -> Any:
            return fault.before(runner, plan)

        ModelRunner._run_plan = run

    def before(self, runner: ModelRunner, plan: StepPlan) -> Any:
        """Run the step, or what comes instead."""
        before = self._kind
        self._cursed -= {load.slot for load in plan.loads}
        for load in plan.loads:
            if 0 <= (number := TRIGGER - int(load.ids()[0])) < len(self._kinds):
                self._cursed.add(load.slot)
                self._kind = self._kinds[number]
        first = self._kind != before
        if self._kind:
            self._faults[self._kind](plan, first)
        return self._run(runner, plan)

    def _short(self, plan: StepPlan, first: bool) -> None:
        if sum(plan.query_lens) > FITTING_TOKENS:
            raise_short()

    def _cursed_steps(self, plan: StepPlan, first: bool) -> None:
        if self._cursed & set(plan.slots):
            raise_short()

    def _exhausted(self, plan: StepPlan, first: bool) -> None:
        raise_short()

    def _take_memory(self, plan: StepPlan, first: bool) -> None:
        if not first:
            return
        left = torch.empty(LEFT_BYTES, dtype=torch.uint8, device="cuda")
        size = 1 << 36
        while size >= 1 << 20:
            try:
                self._hog.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
            except torch.OutOfMemoryError:
                size //= 2
        del left

    def _illegal(self, plan: StepPlan, first: bool) -> None:
        raise torch.AcceleratorError(ILLEGAL)

    def _store(self, plan: StepPlan, first: bool) -> None:
        if first:
            from tests.support.store_nowhere import store_nowhere

            store_nowhere[(1,)](8)


def raise_short() -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB. GPU 0 has a total capacity of ...")


def main() -> None:
    Fault(sys.argv[1:]).install()
    process.end(process.main())


if __name__ == "__main__":
    main()
