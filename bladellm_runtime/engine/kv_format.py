"""How this engine stores keys and values: what was asked for, or what the device and the model can have instead."""

import logging

import torch
from bladellm_kernels.hadamard import hadamard_matrix
from bladellm_kernels.kv_format import KV_FORMATS, NO_QUANT, KvFormat

from bladellm_runtime.config import EngineArgs
from bladellm_runtime.errors import ConfigError
from bladellm_runtime.models.config import ModelSpec

FP8_CAPABILITY = (8, 9)
logger = logging.getLogger(__name__)


def pick_kv_format(args: EngineArgs, spec: ModelSpec, device: torch.device) -> KvFormat:
    """The format of `--kv_cache_quant`; `no_quant`, with a warning, where the device cannot have it."""
    format = KV_FORMATS[args.kv_cache_quant]
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    problem = format_problem(format, spec.head_dim, capability)
    if problem is None:
        return format
    logger.warning("--kv_cache_quant %s %s; keys and values are not quantized", format.name, problem)
    return NO_QUANT


def format_problem(format: KvFormat, head_dim: int, capability: tuple[int, int] | None) -> str | None:
    """Why a format cannot be had; capability: of the CUDA device, None for a CPU, which can have all of them."""
    if head_dim % format.multiple:
        return f"needs heads of even size, not {head_dim}"
    if capability is not None and format.name.startswith("fp8") and capability < FP8_CAPABILITY:
        return "needs a GPU of compute capability {}.{} or more, not {}.{}".format(*FP8_CAPABILITY, *capability)
    return None


def key_rotation(
    args: EngineArgs, format: KvFormat, head_dim: int, dtype: torch.dtype, device: torch.device
) -> torch.Tensor | None:
    """The matrix of `--kv_cache_hadamard`: by default for 4-bit formats whose head size has one.

    Raises `ConfigError` where it is asked for but makes no sense or does not exist.
    """
    asked = args.kv_cache_hadamard == "on"
    if asked and args.kv_cache_quant == NO_QUANT.name:
        raise ConfigError("--kv_cache_hadamard on does nothing for an unquantized KV cache; set --kv_cache_quant too")
    if not format.quantized or not (asked or (args.kv_cache_hadamard == "auto" and format.nibbles)):
        return None
    try:
        return hadamard_matrix(head_dim, dtype, device)
    except ValueError as error:
        if asked:
            raise ConfigError(f"--kv_cache_hadamard on: {error}; use auto or off") from error
        return None
