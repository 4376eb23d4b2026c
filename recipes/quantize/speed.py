"""How long quantization takes on a model of a real shape with random weights, layer by layer from disk.

    python recipes/quantize/speed.py --shape llama31-8b --work FOLDER [--layers N] [--extrapolate 80]

Writes a folder of random bf16 weights (kept, and used again), quantizes it to 4 bits with random calibration tokens,
and prints the time, its stages and the peak memory. With --extrapolate L the time for L layers is estimated: what was
measured, and for each layer more the mean of the measured layers but the first.
"""

import argparse
import dataclasses
import json
import resource
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import torch
from dummy_model import SHAPES, drop_from_page_cache, write_dummy_model
from script import exit_code

from bladellm_runtime.engine.device import pick_dtype
from bladellm_runtime.errors import ConfigError
from bladellm_runtime.models.config import read_model_spec
from bladellm_tools.console import gib, table
from bladellm_tools.quantize.args import QuantizeArgs
from bladellm_tools.quantize.combinations import combine
from bladellm_tools.quantize.job import Progress, QuantizeJob, QuantizeResult
from bladellm_tools.quantize.pipeline.run import quantize_model
from bladellm_tools.quantize.preparation import algorithm_of, pick_devices

KIB = 1024


class Clock(Progress):
    """The moments at which layers were done."""

    def __init__(self) -> None:
        self.moments: list[float] = []

    def done(self, index: int) -> None:
        self.moments.append(time.monotonic())

    def layer_seconds(self) -> float:
        """Mean time of a layer; the first has its predecessors' costs in it, and is left out where there are more."""
        gaps = len(self.moments) - 1
        return (self.moments[-1] - self.moments[0]) / gaps if gaps > 0 else 0.0


@dataclasses.dataclass(frozen=True)
class Measurement:
    """Seconds and bytes of one run. `extrapolated` is the estimate for `extrapolated_layers`, None without."""

    model: str
    quant_algo: str
    group_size: int
    samples: int
    length: int
    devices: list[str]
    layers: int
    seconds: float
    layer_seconds: float
    extrapolated_layers: int | None
    extrapolated: float | None
    stages: dict[str, float]
    peak_device_bytes: list[int]
    peak_host_bytes: int
    bytes_before: int
    bytes_after: int


def arguments(given: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=list(SHAPES), default="llama31-8b", help="whose shape")
    parser.add_argument("--layers", type=int, help="decoder layers; default: the shape's")
    parser.add_argument("--work", type=Path, required=True, help="folder for the model and the result")
    parser.add_argument("--quant_algo", choices=["gptq", "awq", "minmax"], default="gptq", help="algorithm")
    parser.add_argument("--group_size", type=int, default=128, help="inputs that share a scale")
    parser.add_argument("--samples", type=int, default=128, help="calibration windows")
    parser.add_argument("--length", type=int, default=2048, help="tokens of a window")
    parser.add_argument("--batch_size", type=int, default=8, help="windows in one forward pass")
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto", help="where to work")
    parser.add_argument("--num_gpus", type=int, default=1, help="GPUs that share the windows")
    parser.add_argument("--cpu_offload", action="store_true", help="keep activations in host memory")
    parser.add_argument("--extrapolate", type=int, help="estimate the time for this many layers")
    parser.add_argument("--json", type=Path, help="file for the measurement")
    return parser.parse_args(given)


def make_job(args: argparse.Namespace) -> QuantizeJob:
    """The job of `blade_llm quantize --bit 4`, with random tokens instead of text."""
    flags = QuantizeArgs(
        bit="4",
        group_size=args.group_size,
        quant_algo=args.quant_algo,
        batch_size=args.batch_size,
        device=args.device,
        num_gpus=args.num_gpus,
        cpu_offload=args.cpu_offload,
    )
    if args.extrapolate is not None and args.layers == 1:
        raise ConfigError("--extrapolate needs the time of a layer after the first; give --layers 2 or more")
    combination, devices = combine(flags), pick_devices(flags)
    model = write_dummy_model(args.work, args.shape, args.layers, devices[0])
    output = args.work / "quantized"
    shutil.rmtree(output, ignore_errors=True)
    spec = read_model_spec(model)
    tokens = torch.randint(spec.vocab_size, (args.samples, args.length), generator=torch.Generator().manual_seed(0))
    return QuantizeJob(
        model=model,
        output=output,
        scheme=combination.scheme,
        format=combination.format,
        algorithm=algorithm_of(flags, spec, None),
        windows=tokens if combination.needs_data else None,
        devices=devices,
        dtype=pick_dtype(flags.dtype, spec.dtype, devices[0]),
        batch=args.batch_size,
        cpu_offload=args.cpu_offload,
    )


def measure(args: argparse.Namespace, job: QuantizeJob) -> Measurement:
    """Run the job, its model read from the disk."""
    drop_from_page_cache(job.model)
    cuda = [device for device in job.devices if device.type == "cuda"]
    for device in cuda:
        torch.cuda.reset_peak_memory_stats(device)
    clock = Clock()
    started = time.monotonic()
    result = quantize_model(job, clock)
    seconds = time.monotonic() - started
    more = None if args.extrapolate is None else args.extrapolate - len(clock.moments)
    return Measurement(
        model=job.model.name,
        quant_algo=args.quant_algo,
        group_size=args.group_size,
        samples=args.samples,
        length=args.length,
        devices=[torch.cuda.get_device_name(device) for device in cuda] or ["cpu"],
        layers=len(clock.moments),
        seconds=seconds,
        layer_seconds=clock.layer_seconds(),
        extrapolated_layers=args.extrapolate,
        extrapolated=None if more is None else seconds + more * clock.layer_seconds(),
        stages=result.stages,
        peak_device_bytes=[torch.cuda.max_memory_allocated(device) for device in cuda],
        peak_host_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * KIB,
        **sizes(result),
    )


def sizes(result: QuantizeResult) -> dict[str, int]:
    """Bytes of the safetensors before and after."""
    return {"bytes_before": result.bytes_before, "bytes_after": result.bytes_after}


def lines(found: Measurement) -> list[str]:
    """The measurement for people."""
    tokens = f"{found.samples} × {found.length:,} tokens"
    about = f"{found.quant_algo} W4 g{found.group_size} of {found.model}, {tokens}, {', '.join(found.devices)}"
    rows = [("all", f"{found.seconds:.2f} s"), ("a layer after the first", f"{found.layer_seconds:.3f} s")]
    if found.extrapolated is not None:
        rows.append((f"extrapolated to {found.extrapolated_layers} layers", f"{found.extrapolated:.1f} s"))
    rows += [(f"stage {name}", f"{seconds:.2f} s") for name, seconds in found.stages.items()]
    rows += [(f"peak of GPU {index}", gib(size)) for index, size in enumerate(found.peak_device_bytes)]
    rows += [("peak of the process, mapped files included", gib(found.peak_host_bytes))]
    rows += [("weights before", gib(found.bytes_before)), ("weights after", gib(found.bytes_after))]
    return [about, *table(rows)]


def run(given: list[str]) -> dict[str, Any]:
    """Measure and print. Returns the measurement's fields."""
    args = arguments(given)
    found = measure(args, make_job(args))
    print("\n".join(lines(found)))
    fields = dataclasses.asdict(found)
    if args.json is not None:
        args.json.write_text(json.dumps(fields, indent=2) + "\n")
    return fields


def main() -> int:
    return exit_code(lambda: run(sys.argv[1:]))


if __name__ == "__main__":
    sys.exit(main())
