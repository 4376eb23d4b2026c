"""SmoothQuant+'s search on a model folder: gives `search_alpha` layers from disk and windows to run through them."""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from bladellm_kernels.rms_norm import rms_norm

from bladellm_runtime.errors import ConfigError
from bladellm_runtime.models.config import ModelSpec
from bladellm_tools.quantize.algorithms.grid import Grid
from bladellm_tools.quantize.algorithms.layer import GROUPS, LayerWeights
from bladellm_tools.quantize.algorithms.smoothquant_plus import AlphaSearch, Collect, Forward, Head, search_alpha
from bladellm_tools.quantize.algorithms.statistics import InputStatistics
from bladellm_tools.quantize.job import QuantizeJob
from bladellm_tools.quantize.pipeline.collect import Collector, statistics_of
from bladellm_tools.quantize.pipeline.forward import forward_layer, observe_layer, rotary_tables_of
from bladellm_tools.quantize.pipeline.rounding import heads_of
from bladellm_tools.quantize.pipeline.selection import select
from bladellm_tools.quantize.pipeline.source import FloatModel, layer_prefix, open_float_model

SAMPLES, TOKENS = 16, 512
"""About as much text as the paper searches with; more windows would only cost memory, a stream for every candidate."""


def find_alpha(job: QuantizeJob, samples: int = SAMPLES, tokens: int = TOKENS) -> AlphaSearch:
    """Search α on the first `tokens` tokens of at most `samples` of the job's windows, on its first device.

    The loss is the KL divergence of the whole quantized model's logits from the float model's. Raises `ConfigError`
    without windows.
    """
    if job.windows is None:
        raise ConfigError("--quant_algo smoothquant+ needs calibration data; give it by --calib_data_file")
    device = job.devices[0]
    windows = job.windows[:samples, :tokens].to(device)
    with open_float_model(job.model, job.pad_multiple, pin=device.type == "cuda") as model, torch.no_grad():
        ignored = select(model.spec, job.ignore).ignored()
        form = job.format.plan(job.scheme, ignored, kv_scales=job.kv_scales, scrambled=job.scrambled)
        return search_alpha(
            _layers(model, job),
            F.embedding(windows, model.embedding().to(device, job.dtype)),
            _forward(model.spec, windows.shape[1], job),
            _collect(model.spec, windows.shape[1], job),
            Grid(job.scheme, form.scale_dtype(model.spec.dtype), form.lowest_zero),
            heads_of(model.spec),
            _head(model, job),
        )


def _layers(model: FloatModel, job: QuantizeJob) -> Iterator[tuple[int, LayerWeights]]:
    """(index, weights as stored, on the job's first device)."""
    for index, stored in model.layers():
        weights = {name: tensor.to(job.devices[0], non_blocking=True) for name, tensor in stored.items()}
        model.refuse_unusable(layer_prefix(index), weights)
        yield index, weights


def _forward(spec: ModelSpec, tokens: int, job: QuantizeJob) -> Forward:
    tables = rotary_tables_of(spec, tokens, job.devices[0])

    def forward(index: int, layer: LayerWeights, hidden: torch.Tensor) -> torch.Tensor:
        weights = {name: tensor.to(job.dtype) for name, tensor in layer.items()}
        return torch.cat([forward_layer(spec, index, weights, x, tables) for x in hidden.split(job.batch)])

    return forward


def _collect(spec: ModelSpec, tokens: int, job: QuantizeJob) -> Collect:
    tables = rotary_tables_of(spec, tokens, job.devices[0])

    def collect(index: int, layer: LayerWeights, hidden: torch.Tensor) -> dict[str, InputStatistics]:
        weights = {name: tensor.to(job.dtype) for name, tensor in layer.items()}
        collector = Collector({group.name for group in GROUPS})
        for x in hidden.split(job.batch):
            observe_layer(spec, index, weights, x, tables, collector)
        return statistics_of([collector])

    return collect


def _head(model: FloatModel, job: QuantizeJob) -> Head:
    outer = {key: tensor.to(job.devices[0], job.dtype) for key, tensor in model.outer().items()}
    norm, head = outer["model.norm.weight"], outer.get("lm_head.weight", outer["model.embed_tokens.weight"])

    def logits(hidden: torch.Tensor) -> torch.Tensor:
        return F.linear(rms_norm(hidden, norm, model.spec.rms_norm_eps), head)

    return logits
