"""Steps that run out of memory: what ran is recomputed in smaller steps with the same tokens, and nothing leaks."""

import itertools
import random
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from bladellm_runtime import LLM, SamplingParams
from bladellm_runtime.engine.core import EngineCore
from bladellm_runtime.engine.memory_recovery import LEAST_TOKENS
from bladellm_runtime.engine.runner import ModelRunner
from bladellm_runtime.engine.running_step import RunningStep
from bladellm_runtime.engine.step_adapters import Ints
from bladellm_runtime.engine.step_errors import DeviceLostError, StepMemoryError, step_error
from bladellm_runtime.engine.uploaded_masks import UploadedMasks
from bladellm_runtime.request import FinishReason
from bladellm_runtime.scheduler.plan import StepPlan, StepResult
from tests.engine.test_core import ArithmeticRunner, drain, expected, make_core, make_requests
from tests.support.cases import some_pairs
from tests.support.step_plans import step_plan

LOST = "CUDA error: an illegal memory access was encountered\nSearch for `cudaErrorIllegalAddress' in the manual."


class ShortRunner(ArithmeticRunner):
    """Steps for which `fails` have no result: found when launched, as on a GPU, or when collected, as on a CPU."""

    def __init__(self, at_launch: bool, fails: Callable[[StepPlan], bool]) -> None:
        super().__init__()
        self.at_launch, self.fails = at_launch, fails
        self.open: dict[int, bool] = {}
        self.failures: list[int] = []

    def launch(self, plan: StepPlan) -> tuple[StepPlan, dict[int, int]]:
        failed = self.fails(plan)
        if failed:
            self.failures.append(sum(plan.query_lens))
            if self.at_launch:
                raise StepMemoryError(plan)
        self.open[plan.step] = failed
        assert len(self.open) <= 2
        for load in plan.loads:
            self.sums[load.slot] = int(load.ids()[: load.prompt_len].sum())
        return plan, dict(self.sums)

    def collect(self, launched: tuple[StepPlan, dict[int, int]]) -> StepResult:
        plan = launched[0]
        if self.open[plan.step]:
            raise StepMemoryError(plan)
        del self.open[plan.step]
        self.outstanding += 1
        return super().collect(launched)

    def recover(self) -> None:
        assert not [step for step, failed in self.open.items() if not failed], "a step is still on the device"
        self.open.clear()


def recovering(runner: ShortRunner, overlap: bool, granules: int = 64) -> EngineCore:
    core = make_core(overlap, granules, runner)
    core.survive_full_memory()
    return core


def assert_empty(core: EngineCore) -> None:
    stats = core.stats(time.monotonic())
    assert (stats.running, stats.waiting, stats.kv_granules_used) == (0, 0, 0)
    core.check()


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("at_launch", [True, False])
@pytest.mark.parametrize("granules", [64, 18])
def test_row_40_steps_that_are_too_large_are_halved(overlap, at_launch, granules):
    """What fits takes no more than 16 tokens: after the first failure no larger step is tried."""
    requests = make_requests(40, seed=granules)
    runner = ShortRunner(at_launch, lambda plan: sum(plan.query_lens) > 16)
    core = recovering(runner, overlap, granules)
    found = drain(core, requests)
    assert {key: value[0] for key, value in found.items()} == {r.request_id: expected(r) for r in requests}
    assert 1 <= len(runner.failures) <= 2
    assert_empty(core)


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("at_launch", [True, False])
def test_row_40_failures_at_any_time_change_no_token(overlap, at_launch):
    rng = random.Random(overlap + 2 * at_launch)
    requests = make_requests(40, seed=8)
    failing = set(itertools.accumulate(rng.randrange(3, 20) for _ in range(400)))
    runner = ShortRunner(at_launch, lambda plan: sum(plan.query_lens) > 2 * LEAST_TOKENS - 1 or plan.step in failing)
    core = recovering(runner, overlap)
    found = drain(core, requests)
    ended = {key: error for key, (_, _, error) in found.items() if error}
    assert len(runner.failures) > 3
    assert set(ended.values()) <= {"out_of_memory"}
    assert {key: found[key][0] for key in found if key not in ended} == {
        request.request_id: expected(request) for request in requests if request.request_id not in ended
    }
    assert_empty(core)


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("at_launch", [True, False])
def test_row_40_a_request_that_fits_no_step_ends_alone(overlap, at_launch):
    requests = make_requests(6, seed=2)
    cursed = sum(requests[5].prompt)
    runner: ShortRunner

    def fails(plan: StepPlan) -> bool:
        sums = runner.sums | {load.slot: int(load.ids()[: load.prompt_len].sum()) for load in plan.loads}
        return any(sums[slot] == cursed for slot in plan.slots)

    runner = ShortRunner(at_launch, fails)
    core = recovering(runner, overlap)
    found = drain(core, requests)
    assert found[5] == ([], FinishReason.ERROR, "out_of_memory")
    for request in requests[:5]:
        assert found[request.request_id][0] == expected(request)
    assert_empty(core)


@pytest.mark.parametrize("at_launch", [True, False])
def test_row_40_the_engine_ends_when_no_step_fits(at_launch):
    requests = make_requests(6, seed=2)
    core = recovering(ShortRunner(at_launch, lambda plan: True), overlap=True)
    with pytest.raises(StepMemoryError, match="ran out of memory; lower --max_gpu_memory_utilization"):
        drain(core, requests)


def test_a_step_without_memory_ends_a_start(demo_model, monkeypatch):
    """Before the engine is ready nothing is recovered: the flags ask for too much."""
    monkeypatch.setattr(ModelRunner, "_run_flat", fail_with(torch.OutOfMemoryError("CUDA out of memory.")))
    with pytest.raises(StepMemoryError):
        LLM(str(demo_model), device="cpu", kv_cache_gib=0.05)


def fail_with(error: Exception) -> Callable[..., None]:
    def fail(*args: object) -> None:
        raise error

    return fail


PROMPTS = [[7 + index, *range(300, 330), *range(40, 40 + 9 * index)] for index in range(8)]
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True),
    SamplingParams(temperature=0.8, top_p=0.9, seed=3, max_tokens=12, ignore_eos=True),
    SamplingParams(temperature=0.6, repetition_penalty=1.3, presence_penalty=0.4, seed=5, max_tokens=12),
    SamplingParams(temperature=0.0, logprobs=2, prompt_logprobs=1, max_tokens=12, ignore_eos=True),
]


SWAPPING = {
    "prompt_cache_enable_swap": True, "prompt_cache_swap_gib": 0.002, "kv_cache_gib": 0.001, "max_model_len": 192,
}  # fmt: skip
"""Less KV memory than the prompts need, so that cached ones go to the host and come back."""


def answers(llm: LLM) -> list[tuple[list[int], str | None]]:
    params = [PARAMS[index % len(PARAMS)] for index in range(len(PROMPTS))]
    outputs = llm.generate(PROMPTS, params) + llm.generate(PROMPTS[3:7], params[3:7], guided_regex=r"[a-m ,]{1,40}")
    return [(out.outputs[0].token_ids, out.outputs[0].error) for out in outputs]


@pytest.fixture
def sabotage(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[StepPlan], bool]], list[int]]:
    """Makes the model's forward pass of chosen steps, or their sampling, run out of memory when half done."""
    run, sample = ModelRunner._run_flat, ModelRunner._sample
    failures: list[int] = []

    def arm(chosen: Callable[[StepPlan], bool]) -> list[int]:
        def fail_before(self: ModelRunner, plan: StepPlan, adapters: Ints | None) -> object:
            if chosen(plan) and len(failures) % 2 == 0:
                failures.append(sum(plan.query_lens))
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB.")
            return run(self, plan, adapters)

        def fail_after(self: ModelRunner, logits: torch.Tensor, step: RunningStep, masks: UploadedMasks | None) -> None:
            sample(self, logits, step, masks)
            if chosen(step.plan):
                failures.append(sum(step.plan.query_lens))
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB.")

        monkeypatch.setattr(ModelRunner, "_run_flat", fail_before)
        monkeypatch.setattr(ModelRunner, "_sample", fail_after)
        return failures

    return arm


OPTIONS: list[dict[str, Any]] = [{}, {"attn_cls": "paged"}, {"kv_arena": "relocating"}, SWAPPING]


@pytest.mark.parametrize(("options", "overlap"), some_pairs(OPTIONS, [True, False], 1), ids=str)
def test_row_40_the_model_gives_the_same_tokens(demo_model, sabotage, overlap, options):
    """Penalties, seeds, log-probabilities, constraints and cached prompts survive steps that were half done."""
    flags = {"device": "cpu", "kv_cache_gib": 0.02, "dtype": "float32", "disable_overlap": not overlap} | options
    with LLM(str(demo_model), **flags) as llm:
        wanted = answers(llm)
    with LLM(str(demo_model), **flags) as llm:
        assert answers(llm) == wanted
        start = llm.stats().steps
        failures = sabotage(lambda plan: sum(plan.query_lens) > 60)
        assert answers(llm) == wanted
        assert failures
        assert llm.stats().steps > start
        armed = len(failures)
        assert answers(llm) == wanted, "what is cached by now is right"
        assert len(failures) == armed, "no larger step is tried"
        assert llm.stats().kv_granules_used == 0
        llm._engine.core.check()


def test_row_41_a_lost_device_is_one_sentence(demo_model, monkeypatch):
    llm = LLM(str(demo_model), device="cpu", kv_cache_gib=0.02)
    monkeypatch.setattr(ModelRunner, "_run_flat", fail_with(torch.AcceleratorError(LOST)))
    with pytest.raises(DeviceLostError) as caught, llm:
        llm.generate(PROMPTS, PARAMS[0])
    reason = "the GPU failed (CUDA error: an illegal memory access was encountered)"
    assert str(caught.value) == f"the engine stopped: {reason}; start it again"


PLAN = step_plan(1, query_lens=[3, 4])


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."), StepMemoryError),
        (torch.AcceleratorError("CUDA error: out of memory\nmore"), StepMemoryError),
        (RuntimeError("Triton Error [CUDA]: out of memory"), StepMemoryError),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), StepMemoryError),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes."), StepMemoryError),
        (torch.AcceleratorError(LOST), DeviceLostError),
        (RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered"), DeviceLostError),
        (RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx`"), DeviceLostError),
        (MemoryError("KV memory of slot 3 cannot be mapped: cuMemMap: CUDA_ERROR_ILLEGAL_ADDRESS"), DeviceLostError),
        (MemoryError("KV memory of slot 3 cannot be mapped: cuMemMap: no more mappings"), MemoryError),
        (RuntimeError("The size of tensor a (3) must match the size of tensor b (4)"), RuntimeError),
    ],
)
def test_errors_are_told_apart(error, kind):
    assert type(step_error(error, PLAN)) is kind


def test_no_memory_for_reading_results_is_no_reason_to_repeat_a_step():
    """Its sampling has been done."""
    assert type(step_error(torch.AcceleratorError("CUDA error: out of memory"), None)) is DeviceLostError
