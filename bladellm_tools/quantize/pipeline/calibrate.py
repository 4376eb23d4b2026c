"""One decoder layer over all windows: watched in floating point, then passed through as it was rounded."""

import torch

from bladellm_runtime.models.config import ModelSpec
from bladellm_tools.quantize.algorithms.layer import LayerWeights, LinearGroup
from bladellm_tools.quantize.pipeline.collect import Collector, samples_of, statistics_of
from bladellm_tools.quantize.pipeline.forward import Tables, forward_layer, observe_layer
from bladellm_tools.quantize.pipeline.kv_scales import KvRange, kv_scale_tensors
from bladellm_tools.quantize.pipeline.rounding import LayerInputs
from bladellm_tools.quantize.pipeline.streams import Streams


def collect_inputs(
    spec: ModelSpec,
    layer: int,
    weights: LayerWeights,
    streams: Streams,
    dtype: torch.dtype,
    groups: tuple[LinearGroup, ...],
    sampled: bool,
) -> LayerInputs:
    """What the float layer's `groups` read; the streams stay before the layer. sampled: keep some inputs too."""
    replicas = streams.replicas(weights, dtype)
    collectors = [Collector({group.name for group in groups}, sampled and share == 0) for share in range(len(replicas))]

    def step(share: int, x: torch.Tensor, tables: Tables) -> None:
        observe_layer(spec, layer, replicas[share], x, tables, collectors[share])

    streams.run(step)
    samples = samples_of(collectors)
    return LayerInputs(statistics_of(collectors), samples)


def advance(
    spec: ModelSpec, layer: int, weights: LayerWeights, streams: Streams, dtype: torch.dtype, kv_scales: bool
) -> dict[str, torch.Tensor]:
    """Take the streams through the layer; returns its KV scales where they are asked for."""
    replicas = streams.replicas(weights, dtype)
    ranges = [KvRange() for _ in replicas]

    def step(share: int, x: torch.Tensor, tables: Tables) -> torch.Tensor:
        return forward_layer(spec, layer, replicas[share], x, tables, ranges[share] if kv_scales else None)

    streams.run(step)
    return kv_scale_tensors(ranges) if kv_scales else {}
