"""What can go wrong with a step on a device, told apart by the errors of torch, Triton and the driver.

An allocation that fails harms nothing: the step can be done otherwise (`engine/memory_recovery.py`). Any other error of
a GPU is found some time after it happened and leaves a context that answers every call with the same error: only a new
process helps.
"""

import torch

from bladellm_runtime.errors import UserError
from bladellm_runtime.scheduler.plan import StepPlan

OUT_OF_MEMORY = (
    "CUDA error: out of memory", "Triton Error [CUDA]: out of memory", "CUBLAS_STATUS_ALLOC_FAILED",
    "DefaultCPUAllocator",
)  # fmt: skip
DEVICE_ERRORS = ("CUDA error", "Triton Error [CUDA]", "CUDA_ERROR_", "cuDNN error", "NCCL error")


class StepMemoryError(UserError):
    """Memory beside the KV cache ran out in a step, whose results there are none of. `plan`: the step."""

    def __init__(self, plan: StepPlan) -> None:
        tokens = plan.tokens
        advice = "lower --max_gpu_memory_utilization or --ragged_flash_max_batch_tokens"
        super().__init__(f"the engine stopped: a step of {tokens} tokens ran out of memory; {advice}")
        self.plan = plan
        self.tokens = tokens


class DeviceLostError(UserError):
    """The GPU reported an error after which nothing can be asked of it in this process."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(f"the engine stopped: the GPU failed ({first_line(error)}); start it again")


class GroupLostError(DeviceLostError):
    """A rank is lost, or a step has no result on one of them: nothing can be asked of the others any more."""

    def __init__(self, sentence: str) -> None:
        UserError.__init__(self, sentence)


def step_error(error: Exception, plan: StepPlan | None) -> Exception:
    """What an error in a step stands for; the error itself where it is none of a device.

    plan: the step, None where it cannot be given up: its KV memory is not there yet, or its results are being read.
    """
    text = str(error)
    short = isinstance(error, torch.OutOfMemoryError) or any(words in text for words in OUT_OF_MEMORY)
    if short and plan is not None and isinstance(error, RuntimeError):
        return StepMemoryError(plan)
    lost = isinstance(error, torch.AcceleratorError) or any(words in text for words in DEVICE_ERRORS)
    return DeviceLostError(error) if lost else error


def first_line(error: BaseException) -> str:
    """What an error says, without the advice that follows in further lines."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
