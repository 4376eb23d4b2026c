"""A rounded layer as the tensors of its shard, and back."""

from collections.abc import Mapping

import torch

from bladellm_runtime.models.config import ModelSpec
from bladellm_runtime.models.weights import weight_table
from bladellm_runtime.quantization.format import CheckpointFormat
from bladellm_tools.quantize.algorithms.layer import LayerWeights
from bladellm_tools.quantize.pipeline.rounding import RoundedLayer
from bladellm_tools.quantize.pipeline.source import layer_prefix


def pack_layer(layer: RoundedLayer, form: CheckpointFormat, index: int) -> dict[str, torch.Tensor]:
    """The tensors to store of decoder layer `index`, by their keys in the checkpoint."""
    prefix = layer_prefix(index)
    tensors = {prefix + name: tensor for name, tensor in layer.plain.items()}
    for module, weight in layer.quantized.items():
        tensors |= {f"{prefix}{module}.{suffix}": tensor for suffix, tensor in form.pack(weight).items()}
    return tensors


def unpack_layer(
    tensors: Mapping[str, torch.Tensor], form: CheckpointFormat, spec: ModelSpec, index: int
) -> RoundedLayer:
    """What `pack_layer` packed, on the tensors' device."""
    prefix = layer_prefix(index)
    parts = [part for row in weight_table(spec).values() for part in row if part.key.startswith(prefix)]
    plain: LayerWeights = {}
    quantized = {}
    for part in parts:
        module, _, suffix = part.key.rpartition(".")
        name = part.key.removeprefix(prefix)
        scheme = form.scheme_of(module, tensors.keys()) if suffix == "weight" and len(part.shape) == 2 else None
        if scheme is None:
            plain[name] = tensors[part.key]
            continue
        stored = {
            key.removeprefix(f"{module}."): tensor for key, tensor in tensors.items() if key.startswith(f"{module}.")
        }
        quantized[name.removesuffix(".weight")] = form.unpack(scheme, part.shape[0], part.shape[1], stored)
    return RoundedLayer(plain, quantized)


def without_modules(tensors: Mapping[str, torch.Tensor], modules: set[str]) -> dict[str, torch.Tensor]:
    """The tensors less the stored weights of `modules` (full names); their biases stay."""
    return {
        key: tensor for key, tensor in tensors.items() if key.rpartition(".")[0] not in modules or key.endswith(".bias")
    }
