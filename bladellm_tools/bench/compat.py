"""`--compat vllm`: a level under the names of `vllm bench serve`, with the definitions that go with those names."""

from bladellm_tools.bench.figures import LevelFigures

METRICS = {"ttft": "ttft_service", "tpot": "tpot", "itl": "chunk_gap", "e2el": "e2e_service"}
"""vLLM's metric names and ours of the same definition: the clock starts at the actual send, gaps are between chunks."""
STATISTICS = {"mean": "mean", "median": "p50", "std": "std", "p90": "p90", "p95": "p95", "p99": "p99"}


def vllm_figures(level: LevelFigures) -> dict[str, float]:
    """vLLM's result fields of a level, over all its runs; those without a value are left out."""
    counts = {
        "completed": float(level.completed),
        "failed": float(level.failed),
        "total_input_tokens": float(sum(run.prompt_tokens for run in level.runs)),
        "total_output_tokens": float(sum(run.completion_tokens for run in level.runs)),
    }
    rates = {
        "request_rate": level.value("intended_qps"),
        "request_throughput": level.value("overall_requests_per_s"),
        "request_goodput": level.value("goodput"),
        "output_throughput": level.value("overall_output_tokens_per_s"),
        "total_token_throughput": level.value("overall_total_tokens_per_s"),
        "max_concurrent_requests": level.value("in_flight_peak"),
    }
    found = counts | {name: value for name, value in rates.items() if value is not None}
    for theirs, ours in METRICS.items():
        for statistic, name in STATISTICS.items():
            value = level.value(f"{ours}_{name}")
            if value is not None:
                found[f"{statistic}_{theirs}_ms"] = value * 1e3
    return found


def vllm_text(level: LevelFigures) -> str:
    """The same as lines of name and value."""
    figures = vllm_figures(level)
    width = max(len(name) for name in figures)
    lines = [f"{name:<{width}}  {value:>14,.2f}" for name, value in figures.items()]
    return "\n".join([f"{level.endpoint}, {level.load.label}, vLLM's names and definitions", *lines])
