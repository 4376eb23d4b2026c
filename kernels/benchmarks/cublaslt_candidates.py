"""Algorithms that `cublaslt.py` tries: right ones among those that the library proposes, and those beside the best."""

import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.nn.functional as F
from bladellm_kernels.cublaslt_library import (
    CLUSTER_SHAPES,
    Algorithm,
    CapAttribute,
    ConfigAttribute,
    CublasLtError,
    Library,
    Reduction,
)
from bladellm_kernels.cublaslt_product import (
    WORKSPACE_BYTES,
    CublasLt,
    PreparedProduct,
    capabilities,
    capability,
    changed,
    config,
    product_of,
)
from bladellm_kernels.linear_schedules import CublasLtSchedule
from gpu_timing import capture
from linear_step import Shape
from torch import Tensor

QUICK_SECONDS, QUICK_REPEATS = 2e-4, 3
ERROR_SHARE = 1.02
"""Of torch's error, as a norm, that an algorithm may have."""
SPLITS = (1, 2, 3, 4, 5, 6, 8)
CUSTOM_OPTIONS = 16
POISON = 0x7F
"""Bytes of workspace before a run: as float32 about the largest number."""
SHOWN = {
    ConfigAttribute.ID: "id",
    ConfigAttribute.TILE_ID: "tile",
    ConfigAttribute.STAGES_ID: "stages",
    ConfigAttribute.SPLITK_NUM: "splits",
    ConfigAttribute.CLUSTER_SHAPE_ID: "cluster",
    ConfigAttribute.CTA_SWIZZLING: "swizzle",
    ConfigAttribute.CUSTOM_OPTION: "option",
}

Work = Callable[[Tensor], object]


@dataclass(frozen=True, slots=True)
class Problem:
    """x [M, K]; weights: copies [N, K]; bias [N] or None; out [M, N], which is added to where it is the residual."""

    shape: Shape
    x: Tensor
    weights: Sequence[Tensor]
    bias: Tensor | None
    out: Tensor
    adds: bool
    expected: Tensor = field(repr=False)

    @property
    def seconds(self) -> float:
        """What one call takes about."""
        flops = 2.0 * len(self.x) * self.shape.rows * self.shape.inputs
        return max(self.shape.bytes / 4e12, flops / 7e14) + 2e-6

    def prepared(self, lt: CublasLt, by_rows: bool) -> PreparedProduct:
        residual = self.out if self.adds else None
        return PreparedProduct(lt, product_of(self.x, self.weights[0], self.bias, residual, self.out, by_rows))

    def by_torch(self, weight: Tensor) -> Tensor:
        if self.adds:
            return torch.addmm(self.out, self.x, weight.t(), out=self.out)
        return F.linear(self.x, weight, self.bias)


@dataclass(frozen=True, slots=True)
class Candidate:
    """An algorithm of a product, and the seconds that a call took."""

    prepared: PreparedProduct
    algorithm: Algorithm
    seconds: float

    @property
    def schedule(self) -> CublasLtSchedule:
        product = self.prepared.product
        version, dtype = self.prepared.lt.api.version, str(product.dtype).removeprefix("torch.")
        return CublasLtSchedule(self.algorithm.text, version, dtype, product.by_rows)

    @property
    def name(self) -> str:
        return described(config(self.prepared.lt.api, self.algorithm), self.prepared.product.by_rows)

    def work(self, problem: Problem) -> Work:
        return partial(_run, self.prepared, self.algorithm, problem)


def _run(prepared: PreparedProduct, algorithm: Algorithm, problem: Problem, weight: Tensor) -> None:
    prepared.choose(algorithm)
    bias = 0 if problem.bias is None else problem.bias.data_ptr()
    residual = problem.out.data_ptr() if problem.adds else 0
    stream = torch.cuda.current_stream().cuda_stream
    status = prepared.run(problem.x.data_ptr(), weight.data_ptr(), bias, residual, problem.out.data_ptr(), stream)
    prepared.lt.api.check("cublasLtMatmul", status)


def described(values: dict[ConfigAttribute, int], by_rows: bool) -> str:
    """By the numbers of `cublasLt.h`."""
    words = [f"{word} {values[attribute]}" for attribute, word in SHOWN.items() if attribute in values]
    return ", ".join([*words, *(["by rows"] if by_rows else [])])


def variations(library: Library, algorithm: Algorithm) -> Iterator[dict[ConfigAttribute, int]]:
    """What to set otherwise, one thing at a time, after what the algorithm says that it can."""
    for shape in CLUSTER_SHAPES:
        yield {ConfigAttribute.CLUSTER_SHAPE_ID: shape}
    for stages in capabilities(library, algorithm, CapAttribute.STAGES_IDS):
        yield {ConfigAttribute.STAGES_ID: stages}
    for swizzle in range(1 + capability(library, algorithm, CapAttribute.CTA_SWIZZLING_SUPPORT)):
        yield {ConfigAttribute.CTA_SWIZZLING: swizzle}
    if capability(library, algorithm, CapAttribute.SPLITK_SUPPORT):
        for splits in SPLITS:
            scheme = Reduction.COMPUTE_TYPE if splits > 1 else Reduction.NONE
            yield {ConfigAttribute.SPLITK_NUM: splits, ConfigAttribute.REDUCTION_SCHEME: scheme}
    most = capability(library, algorithm, CapAttribute.CUSTOM_OPTION_MAX)
    for option in range(min(most, CUSTOM_OPTIONS) + 1):
        yield {ConfigAttribute.CUSTOM_OPTION: option}
    for tile in capabilities(library, algorithm, CapAttribute.TILE_IDS):
        yield {ConfigAttribute.TILE_ID: tile}


def neighbours(prepared: PreparedProduct, algorithm: Algorithm) -> list[Algorithm]:
    """Algorithms that run and differ in one thing."""
    library = prepared.lt.api
    others = [changed(library, algorithm, values) for values in variations(library, algorithm)]
    return [other for other in others if other is not None and prepared.runs(other)]


def graph_of(problem: Problem, work: Work, seconds: float) -> tuple[torch.cuda.CUDAGraph, int]:
    """A graph of about so many seconds, and how many calls it has: every copy of the weight as often."""
    rounds = max(1, round(seconds / problem.seconds / len(problem.weights)))
    works = [partial(work, weight) for weight in problem.weights] * rounds
    return capture(works), len(works)


def replayed(graphs: Sequence[torch.cuda.CUDAGraph], repeats: int) -> list[float]:
    """Median seconds of each graph; they take turns, and the first turn does not count."""
    spans: list[list[tuple[torch.cuda.Event, torch.cuda.Event]]] = [[] for _ in graphs]
    for _ in range(repeats + 1):
        for graph, found in zip(graphs, spans, strict=True):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            end.record()
            found.append((start, end))
    torch.cuda.synchronize()
    return [statistics.median(float(start.elapsed_time(end)) / 1e3 for start, end in found[1:]) for found in spans]


def sustained(graphs: Sequence[torch.cuda.CUDAGraph], seconds: float) -> list[float]:
    """Mean seconds of each graph in two of `sustained_turns`."""
    return [statistics.mean(found) for found in sustained_turns(graphs, seconds, 2)]


def sustained_turns(graphs: Sequence[torch.cuda.CUDAGraph], seconds: float, turns: int) -> list[list[float]]:
    """Seconds of each graph in every turn, while it alone is replayed for so long, every second turn in reverse order.

    Only what runs for a tenth of a second has the clock that the power limit leaves it: algorithms that take turns
    share one clock, and one that needs less power shows no gain. The first half of a time does not count.
    """
    spans: list[list[float]] = [[] for _ in graphs]
    for turn in range(turns):
        for place in range(len(graphs))[:: -1 if turn % 2 else 1]:
            times = max(1, round(seconds / 2 / replayed([graphs[place]], 1)[0]))
            _replay(graphs[place], times)
            spans[place].append(_replay(graphs[place], times))
    return spans


def after_pauses(graphs: Sequence[torch.cuda.CUDAGraph], repeats: int, pause: float) -> list[float]:
    """Median seconds of each graph, in turn, each time after so many seconds without work: for a few milliseconds the
    clock is not bound by power then, as that of a lone prompt is not."""
    spans: list[list[float]] = [[] for _ in graphs]
    for _ in range(repeats):
        for graph, found in zip(graphs, spans, strict=True):
            torch.cuda.synchronize()
            time.sleep(pause)
            found.append(_replay(graph, 1))
    return [statistics.median(found) for found in spans]


def _replay(graph: torch.cuda.CUDAGraph, times: int) -> float:
    """Mean seconds."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(times):
        graph.replay()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3 / times


def error_of(problem: Problem, work: Work) -> float | None:
    """The norm of the error of three runs, the output 0 before; None where their bits differ."""
    results = []
    for _ in range(3):
        problem.out.zero_()
        y = work(problem.weights[0])
        results.append((y if isinstance(y, Tensor) else problem.out).clone())
    if not all(torch.equal(results[0], other) for other in results[1:]):
        return None
    return float((results[0].float() - problem.expected).norm())


class Screening:
    """Tries algorithms of a problem, each once, until its seconds are over.

    tried: how many; refused: how many for what reason; first: the heuristic's own choice, if it is right.
    """

    def __init__(self, problem: Problem, lt: CublasLt, seconds: float) -> None:
        self.problem, self.lt = problem, lt
        self.refused: dict[str, int] = {}
        self.first: Candidate | None = None
        self._seen: set[str] = set()
        self._end = time.perf_counter() + seconds
        usual = error_of(problem, problem.by_torch)
        self._allowed = math.inf if usual is None else ERROR_SHARE * usual

    @property
    def tried(self) -> int:
        return len(self._seen)

    def run(self, heuristics_only: bool, seeds: Sequence[CublasLtSchedule] = ()) -> list[Candidate]:
        """The right ones, the fastest first. seeds: those of other numbers of rows, tried behind the heuristic's."""
        found: list[Candidate] = []
        # By rows the library has no bias along the outputs.
        for by_rows in (False, True) if self.problem.bias is None else (False,):
            try:
                prepared = self.problem.prepared(self.lt, by_rows)
            except CublasLtError:
                continue
            found += self._screened(prepared, prepared.candidates(workspaces=(WORKSPACE_BYTES, 0)))
            others = [Algorithm.of(seed.algorithm) for seed in seeds if seed.by_rows == by_rows]
            found += self._screened(prepared, [other for other in others if prepared.runs(other)])
        best = None
        found.sort(key=lambda candidate: candidate.seconds)
        while found and not heuristics_only and found[0] is not best:
            best = found[0]
            found += self._screened(best.prepared, neighbours(best.prepared, best.algorithm))
            found.sort(key=lambda candidate: candidate.seconds)
        return found

    def _screened(self, prepared: PreparedProduct, proposed: Sequence[Algorithm]) -> Iterator[Candidate]:
        for algorithm in proposed:
            if self._seen and time.perf_counter() > self._end:
                return
            if algorithm.text in self._seen:
                continue
            first = not self._seen
            self._seen.add(algorithm.text)
            candidate = self._timed(prepared, algorithm)
            if candidate is not None:
                self.first = candidate if first else self.first
                yield candidate

    def _timed(self, prepared: PreparedProduct, algorithm: Algorithm) -> Candidate | None:
        work = partial(_run, prepared, algorithm, self.problem)
        reason = self._wrong(work)
        if reason is not None:
            self.refused[reason] = self.refused.get(reason, 0) + 1
            return None
        graph, calls = graph_of(self.problem, work, QUICK_SECONDS)
        return Candidate(prepared, algorithm, replayed([graph], QUICK_REPEATS)[0] / calls)

    def _wrong(self, work: Work) -> str | None:
        """Why an algorithm is refused: what it computes, or that it reads what its workspace held."""

        def poisoned(weight: Tensor) -> None:
            self.lt.workspace.fill_(POISON)
            work(weight)

        try:
            error = error_of(self.problem, poisoned)
        except CublasLtError as raised:
            return str(raised)
        if error is None:
            return "other bits each time"
        return None if error <= self._allowed else "less close to float32 than torch"
