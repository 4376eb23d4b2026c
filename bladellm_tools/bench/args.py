"""The flags of `blade_llm_bench`; the command line and recipes are made from these fields."""

from dataclasses import dataclass
from typing import Literal

from bladellm_runtime.flags import check_fields, flag


@dataclass(frozen=True)
class TargetArgs:
    """Which servers, and how to ask them."""

    endpoint: list[str] = flag(
        [],
        "NAME=URL of a server, or NAME=cmd:COMMAND LINE to start and stop it here ({port} stands for a free port).",
        group="Target",
    )
    api: Literal["completions", "chat"] = flag("completions", "Which route to use.", group="Target")
    model: str | None = flag(
        None, "Model name in the requests; default: the first that /v1/models lists.", group="Target"
    )
    api_key: str | None = flag(None, "Bearer key.", group="Target")
    header: list[str] = flag([], "Extra headers, NAME:VALUE.", group="Target")
    extra_body: str | None = flag(None, "JSON object merged into every request body.", group="Target")
    tokenizer: str | None = flag(
        None, "Folder of the tokenizer that builds prompts of exact length; default: plain words.", group="Target"
    )
    timeout: float = flag(600.0, "Seconds a request may take.", group="Target", low=0.1, high=86400)
    start_timeout: float = flag(
        600.0, "Seconds the server of a cmd: endpoint may take to answer.", group="Target", low=0.1, high=86400
    )

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True)
class WorkloadArgs:
    """What to ask."""

    dataset: Literal["synthetic", "prefix", "jsonl", "trace"] = flag(
        "synthetic", "synthetic, shared prefixes, a jsonl file of prompts, or a trace.", group="Workload"
    )
    data: str | None = flag(None, "File of --dataset jsonl or trace.", group="Workload")
    input_len: int = flag(1024, "Prompt tokens (the mean, for a spread).", group="Workload", low=1, high=10**7)
    output_len: int = flag(256, "Tokens to generate (the mean, for a spread).", group="Workload", low=1, high=10**6)
    len_dist: Literal["fixed", "uniform", "lognormal"] = flag("fixed", "Spread of the lengths.", group="Workload")
    prefix_len: int = flag(512, "Tokens of a shared prefix (--dataset prefix).", group="Workload", low=1, high=10**7)
    prefix_groups: int = flag(8, "Different shared prefixes (--dataset prefix).", group="Workload", low=1, high=10**6)
    lora: list[str] = flag([], "Adapter names to ask for in turn instead of the model.", group="Workload")
    ignore_eos: bool = flag(True, "Generate to the asked length.", group="Workload")
    unique_prefix: bool = flag(
        True, "Begin every prompt differently, so that no prompt cache flatters.", group="Workload"
    )
    seed: int = flag(0, "Seed of prompts, lengths and arrival times.", group="Workload", low=0, high=2**63 - 1)

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True)
class LevelArgs:
    """How much load, for how long, how often."""

    arrival: Literal["poisson", "constant", "gamma", "burst", "closed", "trace"] = flag(
        "poisson", "When requests leave; closed: when an answer has come.", group="Load"
    )
    burstiness: float = flag(
        1.0, "Shape of gamma arrivals: 1 is Poisson, below is burstier.", group="Load", low=0.01, high=1000
    )
    qps: list[str] = flag(["1", "2", "4", "8"], "Requests a second of each level, or auto.", group="Load")
    concurrency: list[str] = flag(["1", "8", "32"], "Streams of each level of --arrival closed.", group="Load")
    max_inflight: int | None = flag(
        None, "Most requests in flight; waiting for it counts as lateness.", group="Load", low=1, high=10**6
    )
    duration: float = flag(60.0, "Seconds of arrivals of a level.", group="Load", low=0.1, high=86400)
    min_requests: int = flag(200, "Least requests of a level; extends the duration.", group="Load", low=1, high=10**7)
    num_requests: int | None = flag(None, "Exactly so many requests a level, instead.", group="Load", low=1, high=10**7)
    drain_limit: float = flag(
        120.0,
        "Seconds to wait for answers after the last request, and for any sign of the server, before giving up.",
        group="Load",
        low=0.1,
        high=86400,
    )
    warmup: float = flag(
        10.0, "Seconds of the same load before a level that do not count.", group="Load", low=0, high=3600
    )
    repeats: int = flag(3, "Runs of every level.", group="Load", low=1, high=100)

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True)
class RunLevelArgs(LevelArgs):
    """`LevelArgs` of the one level that `run` measures."""

    qps: list[str] = flag(["1"], "Requests a second.", group="Load")
    concurrency: list[str] = flag(["1"], "Streams of --arrival closed.", group="Load")


@dataclass(frozen=True)
class SweepArgs:
    """Which levels to measure, and when to stop."""

    preset: Literal["none", "pai"] = flag(
        "none", "pai: 2,000 in, 300 out, 300 requests at 2, 4, 6, 8 and 10 QPS.", group="Load"
    )
    stop_when: list[str] = flag(
        ["oversaturated", "error_rate=0.05"], "End a sweep at the first level that is so, or none.", group="Load"
    )
    find_capacity: bool = flag(
        False, "After the levels, search the highest QPS within the SLO by bisection, to 10 %.", group="SLO"
    )

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True)
class CompareArgs:
    """How a comparison takes turns."""

    order: Literal["abab", "random"] = flag("abab", "In which order the endpoints take turns.", group="Load")

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True)
class SloArgs:
    """What is good enough."""

    slo: list[str] = flag(
        ["ttft_p99=500ms", "tbt_p99=50ms"], "Limits METRIC_pNN=TIME of ttft, tbt, tpot or e2e.", group="SLO"
    )

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True)
class OutputArgs:
    """Where results go."""

    out: str | None = flag(None, "Folder of the results; default: bench-DATE-TIME.", group="Output")
    title: str | None = flag(None, "Title of the report; default: the endpoints.", group="Output")
    compat: Literal["none", "vllm"] = flag("none", "vllm: print vLLM's names of the metrics too.", group="Output")
    quiet: bool = flag(False, "Print the result only.", group="Output")

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True)
class PlotArgs:
    """Which results to show."""

    results: list[str] = flag([], "Folders of earlier runs; several are shown together.", group="Results")

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True)
class MockArgs:
    """A server without a model that answers at exact times. Times are seconds."""

    port: int = flag(0, "Port; 0: any free one.", group="Mock", low=0, high=65535)
    ttft: float = flag(0.15, "Seconds to the first token.", group="Mock", low=0, high=3600)
    tbt: float = flag(0.01, "Seconds a token after the first.", group="Mock", low=0.0001, high=3600)
    tokens_per_chunk: int = flag(1, "Tokens that leave together.", group="Mock", low=1, high=10**4)
    service_time: float = flag(
        0.0,
        "Seconds for which a request keeps others waiting before its own time starts.",
        group="Mock",
        low=0,
        high=3600,
    )
    freeze_every: float = flag(
        0.0, "The whole server freezes at the end of every so many seconds.", low=0, high=86400, group="Mock"
    )
    freeze_for: float = flag(0.0, "For so long, with --freeze_every.", group="Mock", low=0, high=86400)
    fault: Literal["none", "http_500", "error_event", "stall", "cut", "garbage"] = flag(
        "none", "What goes wrong with a share of the requests.", group="Mock"
    )
    fault_share: float = flag(1.0, "Share of the requests with the fault.", group="Mock", low=0, high=1)
    die_after: int = flag(0, "Exit at the request after so many; 0: never.", group="Mock", low=0, high=10**9)
    report_usage: bool = flag(True, "Report token counts as usage.", group="Mock")

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True)
class SelfCheckArgs:
    """How hard to test the client."""

    streams: int = flag(512, "Streams of 20 tokens a second to bear.", group="Check", low=1, high=10**5)

    def __post_init__(self) -> None:
        check_fields(self)


PRESETS: dict[str, dict[str, object]] = {
    "pai": {
        "input_len": 2000,
        "output_len": 300,
        "num_requests": 300,
        "qps": ["2", "4", "6", "8", "10"],
        "slo": ["ttft_p99=500ms", "tbt_p99=50ms"],
    }
}
"""Values of `--preset`; flags and recipes win over them."""
