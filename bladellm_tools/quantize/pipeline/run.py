"""Quantizing a model decoder layer by decoder layer, from disk to disk.

A layer is read, its inputs are watched over all windows, it is smoothed and rounded, its errors are measured, the
windows go through it as rounded, and it is written while the next one is worked on. Memory holds one layer and the
windows' states, whatever the model's size; without data nothing but weights is looked at.
"""

import time
from collections.abc import Generator
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import safetensors.torch
import torch

from bladellm_runtime.errors import ConfigError
from bladellm_runtime.models.weights import weight_table
from bladellm_runtime.quantization.format import CheckpointFormat
from bladellm_tools.quantize.algorithms.algorithm import Algorithm
from bladellm_tools.quantize.algorithms.grid import Grid
from bladellm_tools.quantize.algorithms.layer import LayerWeights
from bladellm_tools.quantize.job import ModuleReport, Progress, QuantizeJob, QuantizeResult
from bladellm_tools.quantize.pipeline.calibrate import advance, collect_inputs
from bladellm_tools.quantize.pipeline.estimate import disk_bytes, peak_bytes
from bladellm_tools.quantize.pipeline.fallback import (
    choose_fallback,
    error_table,
    fallen_modules,
    mark_fallback,
    restore,
)
from bladellm_tools.quantize.pipeline.fingerprint import fingerprint_of
from bladellm_tools.quantize.pipeline.output import Staging, check_output, check_space, open_staging
from bladellm_tools.quantize.pipeline.parts import pack_layer, unpack_layer
from bladellm_tools.quantize.pipeline.publish import publish, report_of, small_files
from bladellm_tools.quantize.pipeline.rounding import LayerInputs, RoundedLayer, heads_of, round_layer, smooth_layer
from bladellm_tools.quantize.pipeline.selection import Selection, select
from bladellm_tools.quantize.pipeline.source import FloatModel, layer_prefix, open_float_model
from bladellm_tools.quantize.pipeline.stages import Stages
from bladellm_tools.quantize.pipeline.streams import Streams
from bladellm_tools.quantize.pipeline.writer import HostCopy, Writer


@dataclass(slots=True)
class _Run:
    """A job with all that was found out before the first layer."""

    job: QuantizeJob
    model: FloatModel
    progress: Progress
    selection: Selection
    format: CheckpointFormat
    algorithm: Algorithm
    copies: list[Path]
    staging: Staging
    stages: Stages


def quantize_model(job: QuantizeJob, progress: Progress) -> QuantizeResult:
    """Quantize `job.model` into `job.output`, which appears at the end, whole.

    What is finished is kept in `<output>.partial` whenever this ends early, for `resume`. Raises `UserError`.
    """
    began = time.perf_counter()
    job = replace(job, output=job.output.expanduser().resolve())
    check_output(job.output, job.model, job.resume)
    pin = any(device.type == "cuda" for device in job.devices)
    with open_float_model(job.model, job.pad_multiple, pin) as model, torch.no_grad():
        run = _prepare(job, model, progress)
        _quantize_layers(run)
        modules, size = _finish(run)
    tokens = 0 if job.windows is None else job.windows.numel()
    seconds = time.perf_counter() - began
    return QuantizeResult(job.output, modules, tokens, seconds, model.bytes, size, run.stages.seconds)


def _prepare(job: QuantizeJob, model: FloatModel, progress: Progress) -> _Run:
    selection = select(model.spec, job.ignore)
    form = _plan_format(job, selection.ignored())
    algorithm = job.algorithm(Grid(job.scheme, form.scale_dtype(model.spec.dtype), form.lowest_zero))
    _check_data(job, algorithm)
    _check_shapes(model, selection, form, job)
    copies = small_files(model.folder)
    staging = open_staging(job.output, model.spec.layers, fingerprint_of(job, model, algorithm.name))
    written = sum(path.stat().st_size for path in staging.model.iterdir())
    progress.plan(model.spec.layers, peak_bytes(job, model.spec, selection))
    check_space(staging.root, disk_bytes(job, model.spec, selection) - written)
    return _Run(job, model, progress, selection, form, algorithm, copies, staging, Stages(job.devices))


def _plan_format(job: QuantizeJob, ignored: list[str]) -> CheckpointFormat:
    return job.format.plan(job.scheme, ignored, kv_scales=job.kv_scales, scrambled=job.scrambled)


def _check_data(job: QuantizeJob, algorithm: Algorithm) -> None:
    needed = {
        f"--quant_algo {algorithm.name}": algorithm.needs_statistics,
        "--fallback_ratio": job.fallback_ratio > 0,
        "--kv_scales": job.kv_scales,
        "a static scale of activations": job.scheme.activations == "static",
    }
    for what, needs in needed.items():
        if needs and (job.windows is None or not job.windows.numel()):
            raise ConfigError(f"{what} needs calibration data; give it by --calib_data_file")


def _check_shapes(model: FloatModel, selection: Selection, form: CheckpointFormat, job: QuantizeJob) -> None:
    """Raise `CheckpointError` where a layer to quantize cannot be stored; all decoder layers have the same shapes."""
    parts = {part.key: part for row in weight_table(model.spec).values() for part in row}
    members = {member for groups in selection.groups for group in groups for member in group.members}
    for member in sorted(members):
        rows, columns = parts[f"{layer_prefix(0)}{member}.weight"].shape
        form.tensors(job.scheme, rows, columns)


def _quantize_layers(run: _Run) -> None:
    """Finish the decoder layers and the tensors outside of them, those that an earlier run finished left out."""
    manifest, layers = run.staging.manifest, run.model.spec.layers
    finished = len(manifest.layers)
    with Writer() as writer:
        if manifest.outer is None:
            outer = run.model.outer()
            run.model.refuse_unusable("", outer)
            writer.put(partial(run.staging.save_outer, outer))
        if finished == layers:
            return
        streams = _open_streams(run)
        if streams is not None:
            for index in range(finished):
                _replay(run, streams, index)
        with closing(run.model.layers(finished)) as source:
            for index in range(finished, layers):
                _quantize_layer(run, streams, writer, source, index)


def _open_streams(run: _Run) -> Streams | None:
    job = run.job
    if job.windows is None:
        return None
    with run.stages.stage("calibrate"):
        return Streams(
            run.model.spec,
            job.windows,
            run.model.embedding(),
            job.devices,
            dtype=job.dtype,
            batch=job.batch,
            offload=job.cpu_offload,
        )


def _quantize_layer(
    run: _Run, streams: Streams | None, writer: Writer, source: Generator[tuple[int, LayerWeights]], index: int
) -> None:
    job, stages, spec = run.job, run.stages, run.model.spec
    groups = run.selection.groups[index]
    run.progress.layer(index, "read")
    with stages.stage("read"):
        weights = _to_device(next(source)[1], job.devices[0])
        run.model.refuse_unusable(layer_prefix(index), weights)
    inputs = LayerInputs({}, {})
    if streams is not None:
        run.progress.layer(index, "calibrate")
        with stages.stage("calibrate"):
            sampled = job.scheme.activations != "none"
            inputs = collect_inputs(spec, index, weights, streams, job.dtype, groups, sampled)
    run.progress.layer(index, "round")
    stored = {name: tensor.dtype for name, tensor in weights.items()}
    with stages.stage("smooth"):
        weights, folds = smooth_layer(weights, groups, run.algorithm, inputs, heads_of(spec))
    with stages.stage("round"):
        prefix = layer_prefix(index)
        rounded, reports = round_layer(weights, stored, groups, run.algorithm, job.scheme, inputs, prefix)
    del weights
    kept = folds if job.fallback_ratio > 0 else {}
    _pass_on(run, streams, writer, index, rounded, reports, kept)


def _pass_on(
    run: _Run,
    streams: Streams | None,
    writer: Writer,
    index: int,
    rounded: RoundedLayer,
    reports: list[ModuleReport],
    folds: dict[str, torch.Tensor],
) -> None:
    """Take the windows through the rounded layer, and have it written."""
    job, spec = run.job, run.model.spec
    scales: dict[str, torch.Tensor] = {}
    if streams is not None and (index + 1 < spec.layers or job.kv_scales):
        with run.stages.stage("calibrate"):
            scales = advance(spec, index, rounded.forward_weights(job.dtype), streams, job.dtype, job.kv_scales)
    run.progress.layer(index, "write")
    with run.stages.stage("write"):
        tensors = pack_layer(rounded, run.format, index)
        tensors |= {layer_prefix(index) + name: scale for name, scale in scales.items()}
        writer.put(partial(_save, run.staging, HostCopy(tensors), reports, HostCopy(folds)))
    run.progress.done(index)


def _save(staging: Staging, tensors: HostCopy, reports: list[ModuleReport], folds: HostCopy) -> None:
    staging.save_layer(tensors.finish(), reports, folds.finish())


def _replay(run: _Run, streams: Streams, index: int) -> None:
    """Take the windows through a layer that an earlier run finished."""
    job, spec = run.job, run.model.spec
    run.progress.layer(index, "replay")
    with run.stages.stage("replay"):
        tensors = _to_device(safetensors.torch.load_file(run.staging.part(index)), job.devices[0])
        rounded = unpack_layer(tensors, run.format, spec, index)
        advance(spec, index, rounded.forward_weights(job.dtype), streams, job.dtype, kv_scales=False)
    run.progress.done(index)


def _finish(run: _Run) -> tuple[list[ModuleReport], int]:
    """Let the worst groups fall back, then make the output; returns the reports and the bytes of the weights."""
    job, reports = run.job, run.staging.manifest.reports
    fallen: list[str] = []
    with run.stages.stage("write"):
        if job.fallback_ratio > 0:
            choice = choose_fallback(run.selection.groups, error_table(reports), job.fallback_ratio)
            for layer, groups in choice.items():
                restore(run.model, run.staging, layer, groups)
            fallen = fallen_modules(choice)
        mark_fallback(reports, fallen)
        form = _plan_format(job, run.selection.ignored(fallen))
        config = run.model.config | {"quantization_config": form.config()}
        report = report_of(job, run.algorithm.name, reports, run.selection.left)
        return reports, publish(run.staging, run.copies, report, config)


def _to_device(tensors: dict[str, torch.Tensor], device: torch.device) -> dict[str, torch.Tensor]:
    return {name: tensor.to(device, non_blocking=True) for name, tensor in tensors.items()}
