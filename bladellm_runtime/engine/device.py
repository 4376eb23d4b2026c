"""Which device and which type to compute in."""

import os

import torch
from bladellm_kernels.has_triton import use_own_backends

from bladellm_runtime.config import Device, Dtype
from bladellm_runtime.errors import ConfigError

DTYPES = {
    "half": torch.float16,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float": torch.float32,
    "float32": torch.float32,
}


def on_gpu(name: Device) -> bool:
    """Whether a name of a device stands for a GPU here; cuda does, also where there is none."""
    return name == "cuda" or (name == "auto" and torch.cuda.is_available())


def pick_device(name: Device, index: int | None = None, ranks: int = 1) -> torch.device:
    """`auto` is cuda where a GPU can be used; index: which of them, the current one by default, of as many as this host
    has ranks. Raises `ConfigError` when cuda is asked for and there is none, or when there are fewer than ranks."""
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda needs a CUDA device and a CUDA build of torch; use --device cpu")
    if on_gpu(name):
        use_own_backends()  # torch imports Triton when it comes to the device first
        # cuDNN's attention plans anew for every length: on an H200 each decode step of a new length took 45 ms, not 4.
        torch.backends.cuda.enable_cudnn_sdp(False)
        # cuBLAS may add up parts of K rounded to 16 bits: with 64 parts errors are 5 times those of rounding weights.
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
        torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
        if torch.cuda.device_count() < ranks:
            raise ConfigError(
                f"{ranks} ranks on this host need as many GPUs, and it has {torch.cuda.device_count()}; lower "
                "--tensor_parallel_size or use --device cpu"
            )
        if index is not None:
            torch.cuda.set_device(index)
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def use_threads(count: int | None, ranks: int = 1) -> None:
    """Set torch's threads. By default one core is left to the front end: threads of torch that wait for a core they
    share with it spin, and a step that needs 20 ms was seen to take 200. The ranks of a host share the others."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    torch.set_num_threads(count or max(1, (cores - 1) // ranks))


def pick_dtype(name: Dtype, checkpoint: torch.dtype, device: torch.device) -> torch.dtype:
    """`auto` is the checkpoint's type on a GPU. On a CPU it is float32: faster there for small models, and exact."""
    if name != "auto":
        return DTYPES[name]
    return checkpoint if device.type == "cuda" else torch.float32
