"""Split folders in, split folders out: the ranks are quantized as the one model they are, and the result is cut again.

Errors of a layer are what its whole inputs make them, so calibrating one rank alone would be another algorithm; and a
rank's codes would depend on how many there are.
"""

import json
import shutil
from pathlib import Path

from bladellm_runtime.distributed.manifest import is_split, read_manifest
from bladellm_runtime.errors import ConfigError
from bladellm_runtime.models.folder import read_json
from bladellm_tools.quantize.args import QuantizeArgs
from bladellm_tools.quantize.job import QuantizeJob
from bladellm_tools.quantize.pipeline.publish import REPORT
from bladellm_tools.split.splitting import Split, check_output, split_model

WHOLE = ".whole"
Degrees = tuple[int, int]
"""Tensor-parallel and pipeline-parallel size."""


def degrees_of(args: QuantizeArgs, model: Path) -> Degrees | None:
    """The degrees of a split model, None for a whole one. Raises `ConfigError` for flags that do not go with it."""
    if not is_split(model):
        return None
    manifest = read_manifest(model)
    if manifest.tensor_parallel_size != args.tensor_parallel_size:
        degree = manifest.tensor_parallel_size
        raise ConfigError(f"--model {model} is split for {degree} ranks; use --tensor_parallel_size {degree}")
    if args.report:
        raise ConfigError("--report needs a model that is not split; leave it out, or quantize the whole model")
    return manifest.tensor_parallel_size, manifest.pipeline_parallel_size


def whole_output(output: Path, model: Path, resume: bool) -> Path:
    """Where the quantized model lies until it is split. Raises `ConfigError` where the ranks have no place to go."""
    check_output(output, model)
    whole = output.with_name(output.name + WHOLE)
    if whole.exists() and not resume:
        raise ConfigError(f"{whole} is a quantized model that is not split yet; go on with --resume, or delete it")
    return whole


def is_finished(job: QuantizeJob) -> bool:
    """Whether an interrupted run of the same flags had only the split left. Raises `ConfigError` for other flags."""
    if not (job.resume and (job.output / REPORT).is_file()):
        return False
    done = read_json(job.output / REPORT).get("settings")
    asked = json.loads(
        json.dumps({name: value for name, value in job.settings.items() if name != "resume"}, default=str)
    )
    if not isinstance(done, dict) or {**done, "alpha": None} != {**asked, "alpha": None}:
        raise ConfigError(f"{job.output} was made with other flags; run --resume with the same ones, or delete it")
    return True


def split_whole(whole: Path, output: Path, degrees: Degrees) -> Split:
    """Split the quantized model and drop the whole one. Raises `UserError`."""
    split = split_model(whole, output, degrees)
    shutil.rmtree(whole)
    return split
