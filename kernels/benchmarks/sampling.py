"""Time `sample_step`: microseconds a step by rows, vocabulary and parameters, beside PyTorch's operators and a sort.

python kernels/benchmarks/sampling.py [--rows 1 8 64 256] [--vocab 128256 151936] [--dtype float32] [--spread 3]
    [--case top-p ...] [--programs N] [--block N] [--warps N] [--repeats N] [--json FILE]

`of read`: a plain read of the logits once, at the 4.70 TB/s that a read kernel reaches here, as a share of the step's
time. `operators`: `sampling.sample_tokens` and `penalties`, the path without kernels. `sort`: a descending torch.sort,
softmax, cumulative sum, masks and a draw, as samplers without kernels do. Each figure is the median of replays of a
graph of steps over several logits, so that the cache does not hold them from step to step where they are many. First
the tokens are compared with the operators' on the same GPU, and the noise's logarithms with PyTorch's.
"""

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import torch
from bladellm_kernels.gumbel import gumbel_argmax, row_keys, stream_key
from bladellm_kernels.penalties import apply_penalties_
from bladellm_kernels.sample_step import SampleRows, SampleWorkspace, Stage, sample_step
from bladellm_kernels.sample_triton import SampleSchedule
from bladellm_kernels.sampling import Filters, sample_tokens
from bladellm_kernels.slot_parameters import PENALISED, RANDOM, TOP_K, TOP_P, SlotParameters
from gpu_timing import GpuTimer, clocks, machine

READ_SPEED = 4.70e12
SOME_BYTES = 256 << 20
"""Logits that steps go through before the first come again."""


@dataclass(frozen=True, slots=True)
class Case:
    """Parameters of all rows; temperature 0 is greedy, top_k 0 and top_p 1 are off."""

    name: str
    temperature: float = 0.8
    top_k: int = 0
    top_p: float = 1.0
    penalised: bool = False

    @property
    def flags(self) -> int:
        flags = PENALISED if self.penalised else 0
        flags |= RANDOM if self.temperature else 0
        return flags | (TOP_K if self.top_k else 0) | (TOP_P if self.top_p < 1 else 0)


CASES = (
    Case("greedy", 0.0),
    Case("temperature"),
    Case("top-k 50", top_k=50),
    Case("top-p 0.9", top_p=0.9),
    Case("top-k 50, top-p 0.9", top_k=50, top_p=0.9),
    Case("the same, penalties", top_k=50, top_p=0.9, penalised=True),
)


@dataclass(frozen=True, slots=True)
class Row:
    """Seconds of a step; None where not measured."""

    case: str
    rows: int
    vocab: int
    kernels: float
    full: float
    operators: float | None
    sort: float | None


class Bench:
    """Logits, slots and outputs of one number of rows and one vocabulary."""

    def __init__(self, rows: int, vocab: int, dtype: torch.dtype, spread: float, schedule: SampleSchedule) -> None:
        device = torch.device("cuda", torch.cuda.current_device())
        copies = max(1, min(8, SOME_BYTES // (rows * vocab * dtype.itemsize)))
        self.logits = [(torch.randn(rows, vocab, device=device) * spread).to(dtype) for _ in range(copies)]
        self.slots = SlotParameters.empty(rows, vocab, 8, device)
        streams = [stream_key(seed, 0) for seed in range(rows)]
        self.slots.streams.copy_(torch.tensor(streams, dtype=torch.int32))
        self.slots.seen.random_(2)
        self.rows = SampleRows(torch.randperm(rows, device=device), torch.full((rows,), 77, device=device))
        self.workspace = SampleWorkspace.empty(rows, vocab, device)
        self.tokens, self.feedback = (torch.empty(rows, dtype=torch.int64, device=device) for _ in range(2))
        self.schedule = schedule

    def use(self, case: Case) -> None:
        vocab = self.logits[0].shape[1]
        self.slots.flags.fill_(case.flags)
        columns = (case.temperature or 1.0, case.top_p, 0.0, 1.1, 0.2, 0.1)
        self.slots.floats.copy_(torch.tensor(columns).expand_as(self.slots.floats))
        self.slots.top_ks.fill_(case.top_k or vocab)

    def step(self, logits: torch.Tensor, stage: Stage) -> None:
        sample_step(
            logits, self.rows, self.slots, self.tokens, self.feedback,
            workspace=self.workspace, stage=stage, schedule=self.schedule,
        )  # fmt: skip

    def operators(self, logits: torch.Tensor, case: Case) -> torch.Tensor:
        """What the sampler does without kernels, its inputs already on the device."""
        slots, floats = self.rows.slots, self.slots.floats[self.rows.slots]
        logits = logits.float()
        if case.penalised:
            every = torch.arange(len(slots), device=logits.device)
            statistics = (self.slots.seen, self.slots.counts)
            logits = apply_penalties_(logits.clone(), every, slots, *statistics, *floats[:, 3:].unbind(1))
        peaks, tokens = logits.max(dim=-1)
        if not case.temperature:
            return tokens
        keys = row_keys(self.slots.streams[slots], self.rows.positions)
        width = case.top_k or (logits.shape[1] if case.top_p < 1 else 0)
        filters = Filters(
            width,
            floats[:, 0],
            self.slots.top_ks[slots] if case.top_k else None,
            floats[:, 1] if case.top_p < 1 else None,
        )
        return sample_tokens(logits, peaks, keys, filters)

    def check(self, case: Case) -> int:
        """Rows whose token differs from the operators'. Outputs are poisoned, statistics kept."""
        wrong = 0
        for logits in self.logits:
            kept = replace(self.slots, seen=self.slots.seen.clone(), counts=self.slots.counts.clone())
            expected = self.operators(logits, case)
            self.tokens.fill_(-7)
            self.step(logits, Stage.FILTERED)
            wrong += int((self.tokens != expected).sum())
            self.slots.seen.copy_(kept.seen)
            self.slots.counts.copy_(kept.counts)
        return wrong


def by_sort(logits: torch.Tensor, case: Case) -> torch.Tensor:
    """Temperature, top-k and top-p by sorting, and an exponential race."""
    values, ids = (logits.float() / case.temperature).sort(dim=-1, descending=True)
    if case.top_k:
        values[:, case.top_k :] = -torch.inf
    probabilities = values.softmax(dim=-1)
    probabilities = probabilities.masked_fill(probabilities.cumsum(dim=-1) - probabilities > case.top_p, 0)
    drawn = (probabilities / torch.empty_like(probabilities).exponential_()).argmax(dim=-1, keepdim=True)
    return ids.gather(1, drawn)


def check_noise() -> int:
    """Draws of one token among 2^20 rows of two, that differ from PyTorch's: its logarithms against the kernels'."""
    device, rows = torch.device("cuda"), 1 << 18
    slots = SlotParameters.empty(rows, 2, 1, device)
    slots.flags.fill_(RANDOM)
    slots.streams.random_(-(2**31), 2**31 - 1)
    ids = torch.arange(rows, device=device)
    tokens, feedback = torch.empty_like(ids), torch.empty_like(ids)
    wrong = 0
    # Rows are the grid's second axis, of at most 65,535.
    for part in ids.split(1 << 15):
        logits = torch.zeros(len(part), 2, device=device)
        workspace = SampleWorkspace.empty(len(part), 2, device)
        sample_step(
            logits, SampleRows(part, part), slots, tokens[: len(part)], feedback[: len(part)],
            workspace=workspace, stage=Stage.RANDOM,
        )  # fmt: skip
        wrong += int((tokens[: len(part)] != gumbel_argmax(logits, row_keys(slots.streams[part], part))).sum())
    return wrong


def measure(bench: Bench, case: Case, timer: GpuTimer, compare: bool) -> Row:
    def seconds(work: Callable[[torch.Tensor], object]) -> float:
        return timer.replayed([partial(work, logits) for logits in bench.logits]) / len(bench.logits)

    rows, vocab = bench.logits[0].shape
    kernels = seconds(lambda logits: bench.step(logits, Stage.of(case.flags)))
    full = seconds(lambda logits: bench.step(logits, Stage.FILTERED))
    operators = seconds(lambda logits: bench.operators(logits, case)) if compare else None
    ordered = bool(case.flags & (TOP_K | TOP_P)) and not case.penalised
    sort = seconds(lambda logits: by_sort(logits, case)) if compare and ordered else None
    return Row(case.name, rows, vocab, kernels, full, operators, sort)


def line(row: Row, itemsize: int, wrong: int) -> str:
    read = row.rows * row.vocab * itemsize / READ_SPEED
    others = ["" if each is None else f"{each * 1e6:,.0f}" for each in (row.operators, row.sort)]
    cells = [row.case, str(row.rows), str(row.vocab), f"{row.kernels * 1e6:,.1f}", f"{read / row.kernels:.0%}"]
    return "| " + " | ".join([*cells, f"{row.full * 1e6:,.1f}", *others, str(wrong)]) + " |"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 64, 256])
    parser.add_argument("--vocab", type=int, nargs="+", default=[128256, 151936])
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--spread", type=float, default=3.0, help="standard deviation of the logits")
    parser.add_argument("--case", nargs="+", default=[case.name for case in CASES])
    parser.add_argument("--programs", type=int, help="that share the rows of a step")
    parser.add_argument("--block", type=int, help="tokens a program holds")
    parser.add_argument("--warps", type=int, help="of a program")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--no-compare", action="store_true", help="without operators and sort")
    parser.add_argument("--json", type=Path, help="file for the figures")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    chosen = {name: value for name in ("programs", "block", "warps") if (value := getattr(args, name)) is not None}
    schedule, timer = SampleSchedule(**chosen), GpuTimer(args.repeats)
    print(f"{machine()}, clocks {clocks()}\n{schedule}, {args.dtype}, spread {args.spread}")
    print(f"draws of two tokens that differ from PyTorch's: {check_noise()} of {1 << 18}\n")
    print("| case | rows | vocab | µs | of read | all stages µs | operators µs | sort µs | tokens differ |")
    print("| --- |" + " ---: |" * 8)
    results: list[Row] = []
    for vocab in args.vocab:
        for rows in args.rows:
            bench = Bench(rows, vocab, getattr(torch, args.dtype), args.spread, schedule)
            for case in CASES:
                if case.name in args.case:
                    bench.use(case)
                    wrong = bench.check(case)
                    results.append(measure(bench, case, timer, not args.no_compare))
                    print(line(results[-1], bench.logits[0].element_size(), wrong), flush=True)
            del bench
            torch.cuda.empty_cache()
    if args.json is not None:
        figures = {"machine": machine(), "rows": [asdict(row) for row in results]}
        args.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
