"""`blade_llm_quantize`: check everything, show the plan, quantize, and say what came of it."""

import dataclasses
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from bladellm_runtime.errors import UserError
from bladellm_tools.console import YELLOW, fail, one_line, styled
from bladellm_tools.evaluate.evaluation import EvaluationJob
from bladellm_tools.output_folder import partial_folder
from bladellm_tools.quantize.args import QuantizeArgs
from bladellm_tools.quantize.evaluation import plan_evaluation, run_evaluation
from bladellm_tools.quantize.job import QuantizeJob
from bladellm_tools.quantize.pipeline.alpha_search import find_alpha
from bladellm_tools.quantize.pipeline.run import quantize_model
from bladellm_tools.quantize.preparation import Preparation, algorithm_of, prepare
from bladellm_tools.quantize.progress import watching
from bladellm_tools.quantize.split_output import WHOLE, is_finished, split_whole
from bladellm_tools.quantize.summary import plan_lines, result_lines
from bladellm_tools.split.command import result_lines as split_lines

INTERRUPTED = 130


def run(args: QuantizeArgs) -> int:
    """Quantize; returns 0, or 130 when interrupted. Raises `UserError`."""
    plan = prepare(args)
    evaluation = plan_evaluation(args, plan)
    print("\n".join(plan_lines(plan)), file=sys.stderr, flush=True)
    if plan.calibration is not None and plan.calibration.warning is not None:
        warn(plan.calibration.warning)
    try:
        if plan.degrees is None or not is_finished(plan.job):
            with explained(_out_of_memory(args)):
                job = with_alpha(args, plan)
                with watching() as progress:
                    result = quantize_model(job, progress)
            print("\n".join(result_lines(plan, result)), flush=True)
        if plan.degrees is not None:
            split = split_whole(plan.job.output, plan.output, plan.degrees)
            print("\n".join(split_lines(split)), flush=True)
    except KeyboardInterrupt:
        fail(interruption(plan.job.output))
        return INTERRUPTED
    if evaluation is None:
        return 0
    return measure(evaluation)


def measure(job: EvaluationJob) -> int:
    """Do what --report asks for; returns 0, or 130 when interrupted. The model is complete whatever happens here."""
    again = f"the model is complete; measure it with blade_llm eval --model {job.model} --baseline {job.baseline}"
    try:
        with explained(f"out of memory in --report; {again}"):
            run_evaluation(job)
    except KeyboardInterrupt:
        fail(f"interrupted in --report; {again}")
        return INTERRUPTED
    return 0


def with_alpha(args: QuantizeArgs, plan: Preparation) -> QuantizeJob:
    """The job, SmoothQuant+'s strength searched where --alpha does not say it."""
    job = plan.job
    if plan.combination.algorithm != "smoothquant+" or args.alpha is not None:
        return job
    print("searching the strength of the smoothing ...", file=sys.stderr, flush=True)
    alpha = find_alpha(job).best
    strength = "no smoothing is best" if alpha is None else f"alpha {alpha:g}"
    print(strength, file=sys.stderr, flush=True)
    settings = job.settings | {"alpha": alpha}
    return dataclasses.replace(job, algorithm=algorithm_of(args, plan.spec, alpha), settings=settings)


def warn(text: str) -> None:
    """A line that begins with `warning:`."""
    print(f"{styled('warning:', YELLOW, sys.stderr)} {one_line(text)}", file=sys.stderr, flush=True)


def interruption(output: Path) -> str:
    """What Ctrl-C leaves behind."""
    if not partial_folder(output).exists() and not output.name.endswith(WHOLE):
        return "interrupted"
    return "interrupted; the finished layers are kept, and the same command with --resume goes on from there"


@contextmanager
def explained(sentence: str) -> Iterator[None]:
    """Turn memory that ran out, a GPU's or the host's, into a `UserError`."""
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError) as error:
        raise UserError(sentence) from error
    except RuntimeError as error:
        if "DefaultCPUAllocator" not in str(error):
            raise
        raise UserError(sentence) from error


def _out_of_memory(args: QuantizeArgs) -> str:
    advice = [] if args.cpu_offload else ["--cpu_offload"]
    advice += [f"--batch_size {max(1, args.batch_size // 4)}"] if args.batch_size > 1 else []
    advice += [f"--max_length {max(8, args.max_length // 2)}", f"--max_samples {max(1, args.max_samples // 2)}"]
    return f"out of memory; use {', '.join(advice[:-1])} or {advice[-1]}"
