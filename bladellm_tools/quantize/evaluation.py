"""`--report`: the result beside the float model, on text that calibration has not seen."""

from bladellm_runtime.errors import ConfigError, UserError
from bladellm_runtime.text.tokenizer import Tokenizer
from bladellm_tools.evaluate.command import progress
from bladellm_tools.evaluate.evaluation import Evaluation, EvaluationJob, evaluate
from bladellm_tools.evaluate.report import table, to_json, write_json
from bladellm_tools.evaluate.windows import EvaluationText, read_text, tokenize
from bladellm_tools.quantize.args import QuantizeArgs
from bladellm_tools.quantize.calibration.texts import PAGE, built_in
from bladellm_tools.quantize.preparation import Preparation

WINDOW = 2048
FILE = "evaluation.json"


def plan_evaluation(args: QuantizeArgs, plan: Preparation) -> EvaluationJob | None:
    """What --report will measure, its text read and found long enough; None without the flag."""
    if not args.report:
        if args.report_data is not None:
            raise ConfigError("--report_data is the text of --report; give --report too, or leave it out")
        return None
    window = min(WINDOW, plan.spec.max_position_embeddings)
    text = held_out() if args.report_data is None else _read(args.report_data)
    try:
        tokenize(text, Tokenizer.load(plan.job.model), window, 1)
    except UserError as error:
        raise UserError(f"--report_data: {error}".split("; give")[0] + "; give a longer text") from error
    return EvaluationJob(
        model=plan.job.output,
        texts=(text,),
        baseline=plan.job.model,
        window=window,
        device="cuda" if plan.job.devices[0].type == "cuda" else "cpu",
        dtype=args.dtype,
    )


def run_evaluation(job: EvaluationJob) -> Evaluation:
    """Measure, write evaluation.json into the model's folder, and print the table."""
    with progress() as watcher:
        evaluation = evaluate(job, watcher)
    write_json(job.model / FILE, to_json(evaluation))
    print(table(evaluation))
    return evaluation


def held_out() -> EvaluationText:
    """The chapter that is built in."""
    pages = [page for page in built_in("held_out") if isinstance(page, str)]
    return EvaluationText("built-in chapter", PAGE.join(pages))


def _read(path: str) -> EvaluationText:
    try:
        return read_text(path)
    except UserError as error:
        raise type(error)(str(error).replace("--data", "--report_data", 1)) from error
