"""From a model folder to a decoder: safetensors streamed into fused parameters, or random weights."""

from pathlib import Path
from typing import Literal

import psutil
import torch

from bladellm_runtime.errors import CheckpointError
from bladellm_runtime.models.checkpoint import Checkpoint, open_checkpoint
from bladellm_runtime.models.config import ModelSpec
from bladellm_runtime.models.decoder import Decoder, Weights
from bladellm_runtime.models.weights import WeightTable, parameter_shape, weight_table

GIB = 1024**3


def load_model(
    folder: Path,
    spec: ModelSpec,
    *,
    device: torch.device,
    dtype: torch.dtype,
    load_format: Literal["auto", "dummy"],
    seed: int,
) -> Decoder:
    """Load a model's weights to `device` as `dtype`; `seed` is that of dummy weights.

    Peak memory is the model and one tensor. Raises `CheckpointError`, naming file and key, before anything is
    allocated when the folder does not hold exactly the tensors of its config.
    """
    table = weight_table(spec)
    if load_format == "dummy":
        weights = _allocate(folder, table, device, dtype)
        fill_randomly(weights, seed)
    else:
        with open_checkpoint(folder) as checkpoint:
            checkpoint.check(table, spec)
            weights = _allocate(folder, table, device, dtype)
            _copy(checkpoint, table, weights)
    return Decoder(spec, weights)


def fill_randomly(weights: Weights, seed: int) -> None:
    """Dummy weights: norms 1, biases 0, matrices normal with a variance of 1 / inputs, so activations stay finite."""
    for index, (name, weight) in enumerate(weights.items()):
        if name.endswith("norm.weight"):
            weight.fill_(1.0)
        elif name.endswith(".bias"):
            weight.zero_()
        else:
            generator = torch.Generator(weight.device).manual_seed((seed + index) % 2**63)
            weight.normal_(0.0, weight.shape[1] ** -0.5, generator=generator)


def _allocate(folder: Path, table: WeightTable, device: torch.device, dtype: torch.dtype) -> Weights:
    """Unfilled parameters. Raises `CheckpointError` when they cannot fit in the memory that is free."""
    shapes = {name: torch.Size(parameter_shape(parts)) for name, parts in table.items()}
    needed = sum(shape.numel() for shape in shapes.values()) * dtype.itemsize
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else psutil.virtual_memory().available
    if needed > free:
        raise CheckpointError(
            f"{folder}: its weights take {needed / GIB:.1f} GiB as {str(dtype).removeprefix('torch.')}, but "
            f"{free / GIB:.1f} GiB are free on {device.type}; use a smaller model or a 16-bit --dtype"
        )
    return {name: torch.empty(shape, dtype=dtype, device=device) for name, shape in shapes.items()}


def _copy(checkpoint: Checkpoint, table: WeightTable, weights: Weights) -> None:
    """Copy each checkpoint tensor to its rows of a fused parameter, cast on the way."""
    for name, parts in table.items():
        first = 0
        for part in parts:
            weights[name][first : first + part.shape[0]].copy_(checkpoint.read(part.key))
            first += part.shape[0]
