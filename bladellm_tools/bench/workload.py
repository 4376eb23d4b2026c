"""What to ask, and when: the requests of a level, drawn once so that every endpoint gets the same.

Everything follows from (seed, level, repeat): a repeat differs from the one before it, an endpoint from none.
"""

import zlib
from dataclasses import dataclass

import numpy as np

from bladellm_runtime.errors import ConfigError
from bladellm_tools.bench.args import LevelArgs, WorkloadArgs
from bladellm_tools.bench.arrivals import expected_count, send_times, trace_qps
from bladellm_tools.bench.datafile import HASH_BLOCK_TOKENS, TraceItem, read_prompts, read_trace
from bladellm_tools.bench.prompts import WordText, salt, text_maker
from bladellm_tools.bench.records import Load, PlannedRequest

ARRIVALS, LENGTHS, PROMPTS, SHARED = range(4)
"""Independent streams of random numbers of one level."""
LOGNORMAL_SIGMA = 0.5
LONGEST_MULTIPLE = 8
FASTEST_TBT = 0.005
"""How fast a server a closed loop's plan is made for; a faster one goes round the plan again, with new beginnings."""
PLAN_CHARACTERS = 128 * 1024**2
CHARACTERS_PER_TOKEN = 6
REQUEST_BYTES = 512
"""Of a planned request, its prompt not counted."""
MAX_PLAN_BYTES = 4 * 1024**3


@dataclass(frozen=True)
class Ask:
    """A prompt and the lengths planned for it."""

    prompt: str
    input_len: int
    output_len: int


def plan_requests(
    workload: WorkloadArgs, level: LevelArgs, load: Load, repeat: int, tokenizer: str | None = None
) -> list[PlannedRequest]:
    """The requests of one repeat of one level, warm-up first; raises `ConfigError` for files and lengths amiss.

    In an open loop `send_at` rises from 0 and requests before `level.warmup` are the warm-up. In a closed loop it is
    None and the level takes as many as it needs. `tokenizer` is the folder of one that makes lengths exact.
    """
    seeds = Seeds(workload.seed, load, repeat)
    trace = read_trace(workload.data) if "trace" in (level.arrival, workload.dataset) else []
    times: list[float | None]
    if load.qps is not None:
        if level.arrival != "trace":
            check_size(workload, expected_count(level, load.qps))
        times = list(send_times(level, load.qps, seeds.stream(ARRIVALS), [item.t for item in trace]))
    else:
        times = [None] * closed_count(workload, level, load)
    check_size(workload, len(times))
    if not times or (times[-1] or level.warmup) < level.warmup:
        raise ConfigError(f"the trace of --data ends within the warm-up; shorten --warmup {level.warmup:g}")
    asks = make_asks(workload, len(times), seeds, text_maker(tokenizer), trace)
    adapters: list[str | None] = [*workload.lora] or [None]
    return [
        PlannedRequest(index, time, ask.prompt, ask.input_len, ask.output_len, adapters[index % len(adapters)])
        for index, (time, ask) in enumerate(zip(times, asks, strict=True))
    ]


def check_size(workload: WorkloadArgs, count: float) -> None:
    """Raise `ConfigError` where drawing the prompts of a level would take the machine's memory."""
    drawn = workload.input_len if workload.dataset in ("synthetic", "prefix") else 0
    shared = workload.prefix_groups * workload.prefix_len if workload.dataset == "prefix" else 0
    check_bytes(count, f"{drawn:,} tokens", CHARACTERS_PER_TOKEN * drawn, "--input_len, --num_requests")
    if CHARACTERS_PER_TOKEN * shared > MAX_PLAN_BYTES:
        raise ConfigError(
            f"{workload.prefix_groups:,} prefixes of {workload.prefix_len:,} tokens take "
            f"{CHARACTERS_PER_TOKEN * shared / 2**30:,.0f} GiB to plan; lower --prefix_groups or --prefix_len"
        )


def check_bytes(count: float, length: str, prompt_bytes: float, remedy: str) -> None:
    """Raise `ConfigError` where so many prompts of so many bytes would take the machine's memory."""
    size = count * (REQUEST_BYTES + prompt_bytes)
    if size > MAX_PLAN_BYTES:
        raise ConfigError(
            f"a level of {count:,.0f} requests with prompts of {length} takes {size / 2**30:,.0f} GiB to plan; "
            f"lower {remedy}, or --duration and --warmup"
        )


def own_qps(workload: WorkloadArgs) -> float:
    """The rate at which the trace of --data was recorded; `--qps` stretches it to another."""
    return trace_qps([item.t for item in read_trace(workload.data)])


class Seeds:
    """Random numbers of one repeat of one level, or of the benchmark as a whole where they must repeat."""

    def __init__(self, seed: int, load: Load, repeat: int) -> None:
        self._seed = seed
        self._level = (zlib.crc32(load.label.encode()), repeat + 1)

    def stream(self, purpose: int) -> np.random.Generator:
        """Numbers of this level and repeat."""
        return np.random.default_rng([self._seed, purpose, *self._level])

    def constant(self, purpose: int) -> np.random.Generator:
        """The same numbers at every level and repeat."""
        return np.random.default_rng([self._seed, purpose])

    def texts(self, purpose: int, unique: bool) -> np.random.Generator:
        """Numbers for prompts: new ones each time, unless prompts may repeat."""
        return self.stream(purpose) if unique else self.constant(purpose)


def closed_count(workload: WorkloadArgs, level: LevelArgs, load: Load) -> int:
    """How many requests to plan for a closed loop, which without a number asked for nobody knows before it has run."""
    streams = load.concurrency or 1
    shortest = workload.output_len * FASTEST_TBT
    most = max(PLAN_CHARACTERS // (CHARACTERS_PER_TOKEN * workload.input_len), 1)
    measured = level.num_requests or max(streams * level.duration / shortest, level.min_requests)
    return max(min(int(streams * level.warmup / shortest + measured) + streams, most), 1)


def make_asks(workload: WorkloadArgs, count: int, seeds: Seeds, text: WordText, trace: list[TraceItem]) -> list[Ask]:
    """`count` prompts with their lengths."""
    if workload.dataset == "jsonl":
        return jsonl_asks(workload, count, seeds)
    if workload.dataset == "trace":
        return trace_asks(workload, count, seeds, text, trace)
    inputs, outputs = lengths(workload, count, seeds.stream(LENGTHS))
    if workload.dataset == "prefix":
        prompts = prefixed(workload, inputs, seeds, text)
    else:
        rng = seeds.texts(PROMPTS, workload.unique_prefix)
        prompts = text.draw_all(inputs, rng)
    return [Ask(*row) for row in zip(prompts, inputs, outputs, strict=True)]


def lengths(workload: WorkloadArgs, count: int, rng: np.random.Generator) -> tuple[list[int], list[int]]:
    """Prompt and answer lengths with the means asked for."""
    inputs = draw_lengths(workload.len_dist, workload.input_len, count, rng)
    return inputs, draw_lengths(workload.len_dist, workload.output_len, count, rng)


def draw_lengths(distribution: str, mean: int, count: int, rng: np.random.Generator) -> list[int]:
    """Lengths of a mean: fixed, uniform between half and one and a half of it, or lognormal (sigma 0.5)."""
    if distribution == "fixed":
        return [mean] * count
    if distribution == "uniform":
        low = -(-mean // 2)
        return [int(length) for length in rng.integers(low, 2 * mean - low, size=count, endpoint=True)]
    drawn = rng.lognormal(np.log(mean) - LOGNORMAL_SIGMA**2 / 2, LOGNORMAL_SIGMA, size=count)
    return [int(length) for length in np.clip(np.rint(drawn), 1, LONGEST_MULTIPLE * mean)]


def prefixed(workload: WorkloadArgs, inputs: list[int], seeds: Seeds, text: WordText) -> list[str]:
    """Prompts that share their first `prefix_len` tokens with the others of their group."""
    if min(inputs) <= workload.prefix_len:
        raise ConfigError(
            f"--prefix_len {workload.prefix_len} leaves no room in prompts of {min(inputs)} tokens; lower it, or raise "
            f"--input_len {workload.input_len}"
        )
    rng = seeds.texts(SHARED, workload.unique_prefix)
    prefixes = text.draw_all([workload.prefix_len] * workload.prefix_groups, rng)
    rng = seeds.texts(PROMPTS, workload.unique_prefix)
    groups = rng.integers(len(prefixes), size=len(inputs))
    own = text.draw_all([length - workload.prefix_len for length in inputs], rng)
    prompts = [f"{prefixes[group]} {suffix}" for group, suffix in zip(groups, own, strict=True)]
    # A suffix has a token less behind a space than alone, or more.
    return text.fit(prompts, inputs, rng)


def jsonl_asks(workload: WorkloadArgs, count: int, seeds: Seeds) -> list[Ask]:
    """Prompts of a file in an order of this repeat's own, again from the start where they are too few."""
    items = read_prompts(workload.data)
    mean = sum(len(item.prompt) for item in items) / len(items)
    check_bytes(count, f"{mean:,.0f} characters", mean, "--num_requests")
    rng = seeds.stream(PROMPTS)
    order = rng.permutation(len(items))
    asks = []
    for number in range(count):
        item = items[order[number % len(items)]]
        prompt = f"{salt(rng)} {item.prompt}" if workload.unique_prefix else item.prompt
        asks.append(Ask(prompt, len(prompt.split()), item.output_len or workload.output_len))
    return asks


def trace_asks(workload: WorkloadArgs, count: int, seeds: Seeds, text: WordText, trace: list[TraceItem]) -> list[Ask]:
    """Prompts with a trace's lengths; equal hash ids give equal text, but for the last words of a prompt."""
    mean = sum(item.input_len for item in trace) / len(trace)
    check_bytes(count, f"{mean:,.0f} tokens", CHARACTERS_PER_TOKEN * mean, "--num_requests")
    rng = seeds.texts(PROMPTS, workload.unique_prefix)
    blocks = BlockTexts(text, seeds.texts(SHARED, workload.unique_prefix))
    items = [trace[number % len(trace)] for number in range(count)]
    prompts = []
    for item in items:
        shared = [blocks.text(block) for block in item.hash_ids[: item.input_len // HASH_BLOCK_TOKENS]]
        own = item.input_len - HASH_BLOCK_TOKENS * len(shared)
        prompts.append(" ".join([*shared, text.draw(own, rng)] if own else shared))
    # A block has a token less behind another than alone, or more.
    prompts = text.fit(prompts, [item.input_len for item in items], rng)
    return [Ask(prompt, item.input_len, item.output_len) for prompt, item in zip(prompts, items, strict=True)]


class BlockTexts:
    """The text of each hash id, made when it is first asked for."""

    def __init__(self, text: WordText, rng: np.random.Generator) -> None:
        self._text = text
        self._seed = int(rng.integers(2**63))
        self._known: dict[int, str] = {}

    def text(self, block: int) -> str:
        """The text of one id."""
        if block not in self._known:
            rng = np.random.default_rng([self._seed, block])
            self._known[block] = self._text.draw(HASH_BLOCK_TOKENS, rng)
        return self._known[block]
