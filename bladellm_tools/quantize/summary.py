"""What `blade_llm_quantize` prints: the plan before the work, the result after it."""

from bladellm_runtime.quantization.scheme import Scheme
from bladellm_tools.console import gib, one_line
from bladellm_tools.quantize.engines import engines
from bladellm_tools.quantize.job import ModuleReport, QuantizeResult
from bladellm_tools.quantize.preparation import Preparation
from bladellm_tools.quantize.progress import duration

WORST = 5
"""Layers with the largest errors that are listed."""


def plan_lines(plan: Preparation) -> list[str]:
    """What is going to be done, and who can load it."""
    job, scheme = plan.job, plan.combination.scheme
    rows = [
        ("model", f"{job.model.name}: {plan.spec.layers} layers, {gib(plan.model_bytes)}"),
        ("scheme", scheme_words(scheme)),
        ("algorithm", plan.combination.algorithm),
        ("format", plan.combination.format_name),
        ("linear layers", f"{len(plan.layers):,}"),
        ("calibration", _calibration(plan)),
        ("devices", f"{', '.join(map(str, job.devices))}, {str(job.dtype).removeprefix('torch.')}"),
    ]
    if job.pad_multiple is not None:
        rows.append(("MLP's inner size", f"{plan.spec.intermediate_size:,} with the padding"))
    loads = engines(plan.combination.format_name, scheme, plan.combination.scrambled)
    return ["Plan", *_left(rows), "Loads in", *_left(loads)]


def scheme_words(scheme: Scheme) -> str:
    """`w4a16, groups of 64, symmetric`."""
    groups = "one scale a channel" if scheme.group_size is None else f"groups of {scheme.group_size}"
    words = [scheme.name, groups]
    if scheme.kind == "int":
        words.append("symmetric" if scheme.symmetric else "asymmetric")
    if scheme.activations != "none":
        words.append(f"{scheme.activations} scales of the input")
    return ", ".join(words)


def result_lines(plan: Preparation, result: QuantizeResult) -> list[str]:
    """What came of it: sizes, errors, what fell back, and the next command."""
    quantized = [module for module in result.modules if not module.fallback]
    fallen = [module for module in result.modules if module.fallback]
    share = result.bytes_after / max(result.bytes_before, 1)
    rows = [
        ("output", str(plan.output)),
        ("size", f"{gib(result.bytes_before)} before, {gib(result.bytes_after)} after ({share:.0%})"),
        ("bits per weight", f"{bits_per_weight(plan, result):.2f} over the whole model"),
        ("quantized", f"{len(quantized):,} of {len(result.modules):,} linear layers"),
        ("time", _time(result)),
    ]
    lines = ["Done", *_left(rows)]
    lines += _errors(quantized)
    lines += _listed("Left in floating point", [(module.module, _error(module)) for module in fallen])
    lines += _listed("Notes", [(module.module, one_line(module.note or "")) for module in quantized if module.note])
    return [*lines, f"Serve it with: blade_llm_server --model {plan.output}"]


def bits_per_weight(plan: Preparation, result: QuantizeResult) -> float:
    """Of the whole file, the embedding and the scales included, over the float model's number of values."""
    return 8 * result.bytes_after / max(plan.model_bytes / plan.spec.dtype.itemsize, 1)


def _calibration(plan: Preparation) -> str:
    if plan.calibration is None:
        return "none, the weights alone decide"
    samples, tokens = plan.calibration.windows.shape
    return f"{samples:,} × {tokens:,} tokens of {plan.calibration.source}"


def _time(result: QuantizeResult) -> str:
    stages = ", ".join(f"{name} {duration(seconds)}" for name, seconds in result.stages.items())
    return duration(result.seconds) + (f" ({stages})" if stages else "")


def _errors(modules: list[ModuleReport]) -> list[str]:
    measured = sorted((module for module in modules if module.error is not None), key=_rank, reverse=True)
    if not measured:
        return []
    return _listed(
        "Largest errors of the output (share of its power)", [(m.module, _error(m)) for m in measured], WORST
    )


def _rank(module: ModuleReport) -> float:
    """Errors in order; one that is not a number is the largest of all."""
    error = module.error or 0.0
    return error if error == error else float("inf")


def _error(module: ModuleReport) -> str:
    return "not measured" if module.error is None else f"{module.error:.2e}"


def _listed(title: str, rows: list[tuple[str, str]], most: int = 10) -> list[str]:
    if not rows:
        return []
    more = [f"  and {len(rows) - most} more in quantize_report.json"] if len(rows) > most and most != WORST else []
    return [title, *_left(rows[:most]), *more]


def _left(rows: list[tuple[str, str]]) -> list[str]:
    """Two columns, both to the left."""
    width = max(len(name) for name, _ in rows)
    return [f"  {name:<{width}}  {value}".rstrip() for name, value in rows]
