"""From flags to a `QuantizeJob`: everything that can be wrong is found before the work begins."""

import dataclasses
import os
from dataclasses import dataclass
from pathlib import Path

import torch

from bladellm_runtime.engine.device import pick_device, pick_dtype
from bladellm_runtime.errors import CheckpointError, ConfigError
from bladellm_runtime.models.config import ModelSpec
from bladellm_runtime.models.hub import resolve_model
from bladellm_runtime.text.tokenizer import Tokenizer
from bladellm_tools.quantize.algorithms.algorithm import Algorithm
from bladellm_tools.quantize.algorithms.fold import Heads
from bladellm_tools.quantize.algorithms.grid import Grid
from bladellm_tools.quantize.algorithms.registry import make_algorithm
from bladellm_tools.quantize.args import QuantizeArgs
from bladellm_tools.quantize.calibration.windows import Calibration, calibrate_with
from bladellm_tools.quantize.combinations import Combination, combine
from bladellm_tools.quantize.job import AlgorithmMaker, QuantizeJob
from bladellm_tools.quantize.pipeline.output import check_output
from bladellm_tools.quantize.pipeline.selection import select
from bladellm_tools.quantize.pipeline.source import open_float_model
from bladellm_tools.quantize.shapes import (
    Linear,
    check_degree,
    check_groups,
    check_storable,
    linears,
    pad_multiple,
    padded,
)
from bladellm_tools.quantize.split_output import Degrees, degrees_of, whole_output

NO_SETTINGS = frozenset(
    {"output_dir", "device", "num_gpus", "batch_size", "cpu_offload", "resume", "report", "report_data"}
)
"""Flags that say how to work, not what comes out."""


@dataclass(frozen=True, slots=True)
class Preparation:
    """A job, and what its plan says. `spec` counts the padding; bytes are those of the float model's safetensors.

    `output`: the folder for the result; that of the job is another one where the result is split by `degrees`.
    """

    job: QuantizeJob
    combination: Combination
    spec: ModelSpec
    layers: list[Linear]
    calibration: Calibration | None
    model_bytes: int
    output: Path
    degrees: Degrees | None


def prepare(args: QuantizeArgs) -> Preparation:
    """Check the flags, the model, the folder for the output and the texts. Raises `UserError`."""
    if not args.model:
        raise ConfigError("--model is missing; give a model folder or a hub id")
    if not args.output_dir:
        raise ConfigError("--output_dir is missing; give a folder for the result")
    combination = combine(args)
    folder = resolve_model(args.model)
    degrees = degrees_of(args, folder)
    output = find_output(args, folder)
    multiple = pad_multiple(combination.scheme, args.tensor_parallel_size) if args.experimental_pad else None
    with open_float_model(folder) as model:
        stored, model_bytes = model.spec, model.bytes
    spec = dataclasses.replace(stored, intermediate_size=padded(stored, multiple))
    layers = check_shapes(args, combination, spec, equal=degrees is None)
    devices = pick_devices(args)
    calibration = read_calibration(args, combination, folder, spec)
    job = QuantizeJob(
        model=folder,
        output=output if degrees is None else whole_output(output, folder, args.resume),
        scheme=combination.scheme,
        format=combination.format,
        algorithm=algorithm_of(args, spec, args.alpha),
        windows=None if calibration is None else calibration.windows,
        devices=devices,
        dtype=pick_dtype(args.dtype, spec.dtype, devices[0]),
        batch=args.batch_size,
        cpu_offload=args.cpu_offload,
        fallback_ratio=args.fallback_ratio,
        ignore=tuple(args.ignore),
        kv_scales=args.kv_scales,
        scrambled=combination.scrambled,
        pad_multiple=multiple,
        resume=args.resume,
        settings=settings_of(args),
    )
    return Preparation(job, combination, spec, layers, calibration, model_bytes, output, degrees)


def algorithm_of(args: QuantizeArgs, spec: ModelSpec, alpha: float | None) -> AlgorithmMaker:
    """What makes the algorithm once the grid is known."""

    def make(grid: Grid) -> Algorithm:
        return make_algorithm(
            args.quant_algo,
            grid,
            alpha=alpha,
            damp=args.damp,
            desc_act=args.desc_act,
            static_groups=args.static_groups,
            heads=Heads(spec.heads, spec.kv_heads, spec.head_dim),
        )

    return make


def settings_of(args: QuantizeArgs) -> dict[str, object]:
    """The flags that decide what comes out."""
    return {name: value for name, value in dataclasses.asdict(args).items() if name not in NO_SETTINGS}


def find_output(args: QuantizeArgs, model: Path) -> Path:
    """The folder for the result. Raises `ConfigError` where it holds files, is the model's, or cannot be made."""
    output = Path(args.output_dir).expanduser().absolute()
    check_output(output, model, args.resume)
    parent = next(folder for folder in output.parents if folder.exists())
    if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
        raise ConfigError(f"--output_dir {output} cannot be made: {parent} cannot be written to; give another folder")
    return output


def check_shapes(args: QuantizeArgs, combination: Combination, spec: ModelSpec, equal: bool) -> list[Linear]:
    """The layers to quantize. Raises `ConfigError` where the groups, the GPUs or the format do not fit them.

    equal: GPUs get equal parts, as engines want that do not know a plan.
    """
    degree = args.tensor_parallel_size if equal else 1
    if degree > 1:
        check_degree(spec, degree, args.experimental_pad)
    selection = select(spec, args.ignore)
    layers = linears(spec, selection, degree)
    check_groups(layers, combination.scheme, degree, can_pad=not args.experimental_pad)
    plan = combination.format.plan(
        combination.scheme, selection.ignored(), kv_scales=args.kv_scales, scrambled=combination.scrambled
    )
    check_storable(layers, combination.scheme, plan)
    return layers


def pick_devices(args: QuantizeArgs) -> tuple[torch.device, ...]:
    """The devices that share the windows. Raises `ConfigError` where there are fewer than asked for."""
    device = pick_device(args.device)
    if args.num_gpus == 1:
        return (device,)
    count = torch.cuda.device_count() if device.type == "cuda" else 0
    if args.num_gpus > count:
        raise ConfigError(f"--num_gpus {args.num_gpus} is more than the {count} this process sees; use fewer GPUs")
    return tuple(torch.device("cuda", index) for index in range(args.num_gpus))


def read_calibration(args: QuantizeArgs, combination: Combination, folder: Path, spec: ModelSpec) -> Calibration | None:
    """The windows; None where nothing is measured: minmax without --fallback_ratio, --kv_scales and texts."""
    asked = bool(args.calib_data) or args.calib_data_file is not None
    if not (asked or combination.needs_data or args.fallback_ratio > 0 or args.kv_scales):
        return None
    tokenizer = Tokenizer.load(folder)
    tokenizer.check_vocabulary(spec.vocab_size)
    calibration = calibrate_with(args, tokenizer, min(args.max_length, spec.max_position_embeddings))
    if int(calibration.windows.max()) >= spec.vocab_size:
        raise CheckpointError(
            f"{folder}: its tokenizer makes tokens that its embedding lacks; the two do not belong together"
        )
    return calibration
