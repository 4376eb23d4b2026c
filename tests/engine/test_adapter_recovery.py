"""Steps that run out of memory while their rows have adapters: what is recomputed keeps them, what is given up frees
them."""

from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch

from bladellm_runtime import LLM
from bladellm_runtime.engine.runner import ModelRunner
from bladellm_runtime.engine.running_step import RunningStep
from bladellm_runtime.engine.step_adapters import Ints
from bladellm_runtime.scheduler.plan import StepPlan
from tests.conftest import DEMO
from tests.engine import reference
from tests.engine.adapted import GREEDY, Family, ask, make_family
from tests.engine.captured import Again, captured_llm
from tests.engine.test_memory_recovery import SWAPPING, sabotage  # noqa: F401
from tests.support.cases import drawn_of

ADAPTERS = 4
MIX = [0, 1, -1, 2, 3, 1, 0, 3]
PROMPTS = [[7 + index, *range(300, 330), *range(40, 40 + 9 * index)] for index in range(len(MIX))]
OPTIONS: dict[str, Any] = {
    "dtype": "float32", "device": "cpu", "kv_cache_gib": 0.02, "enable_lora": True, "max_loras": ADAPTERS,
}  # fmt: skip
CAPTURED = {"cuda_graph_batch_sizes": [4, 12], "cuda_graph_prefill_tokens": [16, 64, 200]}
MODES: dict[str, dict[str, Any]] = {
    "overlap": {},
    "no overlap": {"disable_overlap": True},
    "slots for some": {"max_loras": 2, "max_cpu_loras": 3},
    "captured": CAPTURED,
    "swap": SWAPPING,
}


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Family:
    return make_family(reference.load(DEMO)[0], tmp_path_factory.mktemp("adapters"), ADAPTERS)


def engine(mode: str) -> AbstractContextManager[LLM]:
    options = OPTIONS | MODES[mode]
    return captured_llm(str(DEMO), Again(), **options) if mode == "captured" else LLM(str(DEMO), **options)


def assert_empty(llm: LLM) -> None:
    stats = llm.stats()
    assert (stats.running, stats.lora_used, stats.lora_waiting, stats.kv_granules_used) == (0, 0, 0, 0)
    llm._engine.core.check()


@pytest.mark.parametrize("mode", drawn_of(MODES, 1))
def test_recomputed_rows_keep_their_adapters(family, sabotage, mode):  # noqa: F811
    with engine(mode) as llm:
        ask(llm, family, PROMPTS, MIX)
        llm._engine.core.reset_prompt_cache()
        failures = sabotage(lambda plan: sum(plan.query_lens) > 60)
        ask(llm, family, PROMPTS, MIX)
        assert failures
        ask(llm, family, PROMPTS, MIX)  # from what is cached by now
        assert_empty(llm)


def test_one_that_fits_no_step_ends_alone_and_frees_its_adapter(family, monkeypatch):
    """Others wait for its slot."""
    run = ModelRunner._run_flat
    failed: list[int] = []

    def fail(self: ModelRunner, plan: StepPlan, adapters: Ints | None) -> RunningStep:
        if any(self._tokens[slot].prompt_len == 3 for slot in plan.slots):
            failed.append(sum(plan.query_lens))
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB.")
        return run(self, plan, adapters)

    with LLM(str(DEMO), **OPTIONS | {"max_loras": 1}) as llm:
        monkeypatch.setattr(ModelRunner, "_run_flat", fail)
        folders = [family.folder(adapter) for adapter in MIX]
        prompts = [*PROMPTS[:4], [5, 6, 7], *PROMPTS[5:]]
        outputs = llm.generate(prompts, GREEDY, lora=folders)
        assert outputs[4].outputs[0].error == "out_of_memory"
        assert failed
        for number in {*range(len(MIX))} - {4}:
            family.check(MIX[number], outputs[number])
        assert_empty(llm)


def test_replays_without_memory_leave_others_their_adapters(family):
    """Of decode steps, which are too small to be halved: each gives a request up, and what its step did is undone."""
    capture = Again()
    with captured_llm(str(DEMO), capture, **OPTIONS, **CAPTURED) as llm:
        begun = capture.replays

        def fail() -> None:
            if (capture.replays - begun) % 7 == 0:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB.")

        capture.before = fail
        outputs = llm.generate(PROMPTS, GREEDY, lora=[family.folder(adapter) for adapter in MIX])
        errors = [output.outputs[0].error for output in outputs]
        assert {*errors} == {None, "out_of_memory"}
        for adapter, output, error in zip(MIX, outputs, errors, strict=True):
            if error is None:
                family.check(adapter, output)
        capture.before = lambda: None
        ask(llm, family, PROMPTS, MIX)
        assert_empty(llm)
