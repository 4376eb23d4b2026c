"""What tests marked `gpu` and `whole_gpu` need of the machine they run on."""

import pytest
import torch


def lacking(item: pytest.Item) -> str | None:
    """Why a test is skipped here, if it is."""
    gpu = item.get_closest_marker("gpu")
    if gpu is None:
        return None
    return lacking_gpu(**gpu.kwargs) or lacking_whole_gpu(item)


def lacking_gpu(count: int = 1, hopper: bool = False) -> str | None:
    """Arguments of the marker `gpu`: how many, and whether kernels for Hoppers alone are run."""
    if torch.cuda.device_count() < count:
        return f"needs {count} CUDA devices" if count > 1 else "needs a CUDA device"
    return "needs a Hopper" if hopper and torch.cuda.get_device_capability()[0] != 9 else None


def lacking_whole_gpu(item: pytest.Item) -> str | None:
    """Beside other processes of the tests, which use the GPU, too, one marked `whole_gpu` has no GPU to itself."""
    beside_others = hasattr(item.config, "workerinput")
    if beside_others and item.get_closest_marker("whole_gpu") is not None:
        return "needs the GPU to itself: run `-m whole_gpu` without -n"
    return None
