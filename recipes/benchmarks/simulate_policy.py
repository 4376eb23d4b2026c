"""TTFT and TBT by load from a simulation of the scheduler: `simulate_policy.py [--target_tbt_ms 0 10 14 18]`, and with
`--streams 128 256` of closed loops.

Runs the scheduler itself, step by step, with an engine whose steps take the time that was measured for the
Llama-3.1-8B shape in bf16 on one H200, and requests that arrive at random (Poisson). Prints one table a bound on TBT,
beside what vLLM 0.26.0 was measured to do on that machine. Milliseconds.
"""

import argparse
import bisect
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from math import exp

import numpy as np

from bladellm_runtime.engine.mixed_graphs import DEFAULT_SIZES
from bladellm_runtime.kv.accounting import KvAccounting
from bladellm_runtime.kv.spec import KvGroup, KvSpec
from bladellm_runtime.request import SamplingParams
from bladellm_runtime.scheduler.late_prompts import FirstTokenTarget
from bladellm_runtime.scheduler.limits import SchedulerLimits
from bladellm_runtime.scheduler.plan import StepPlan, StepResult
from bladellm_runtime.scheduler.prefill_budget import StepBound
from bladellm_runtime.scheduler.scheduler import Scheduler
from bladellm_runtime.scheduler.step_cost import StepCost, StepLoad
from bladellm_runtime.wire.messages import AddRequest, one_by_one

COST = StepCost(step=2.0, token=0.0183, decode_row=0.0, decode_kv=3e-5, prefill_pair=0.7e-6, sizes=DEFAULT_SIZES)
DECODE_ROWS = (1, 8, 64, 256)
DECODE_MS = (4.2, 4.5, 5.6, 11.0)
DECODE_KV = 512
"""KV tokens a row that those times are for."""
HOST_MS, FRONT_MS, CLIENT_MS = 0.3, 1.5, 3.0
"""What planning and launching a step takes; the way of a request and of its tokens through the front end; and from the
end of an answer to the next request of its stream, that way with it."""
PEER = {8: ("39/62", "5.2/29"), 16: ("56/90", "6.0/37"), 24: ("96/145", "8.6/82")}
DEPTH = 2
WAVES = 10
"""Requests of a stream."""
EAGER_MS = 60.0
"""What launching a step of more tokens than the largest of `DEFAULT_SIZES`, operator by operator, takes the host."""


def step_ms(load: StepLoad, cost: StepCost) -> float:
    """How long the simulated device takes for a step: a mixed one no less than its decode rows alone, nor than the host
    takes to launch it."""
    rows = load.decode_rows
    decode = 0.0
    if rows:
        index = min(max(bisect.bisect_left(DECODE_ROWS, rows), 1), len(DECODE_ROWS) - 1)
        low, high = DECODE_ROWS[index - 1], DECODE_ROWS[index]
        share = (rows - low) / (high - low)
        decode = DECODE_MS[index - 1] * (1 - share) + DECODE_MS[index] * share
        decode += cost.decode_kv * (load.decode_kv - DECODE_KV * rows)
    if not load.prefill_tokens:
        return decode
    launch = EAGER_MS if rows + load.prefill_tokens > DEFAULT_SIZES[-1] else 0.0
    return max(decode, launch, cost.milliseconds(load))


@dataclass
class Latencies:
    """Milliseconds of every first token, and between a request's tokens; and when requests ended, in that order."""

    ttft: list[float] = field(default_factory=list)
    tbt: list[float] = field(default_factory=list)
    ended: list[float] = field(default_factory=list)

    def percentiles(self) -> tuple[float, float, float, float]:
        """TTFT p50 and p90, TBT p50 and p99."""
        return (
            percentile(self.ttft, 0.5), percentile(self.ttft, 0.9),
            percentile(self.tbt, 0.5), percentile(self.tbt, 0.99),
        )  # fmt: skip


def percentile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)]


class SimulatedEngine:
    """The engine's loop in simulated time, with up to `DEPTH` steps in flight.

    launch_ahead: how long before a step ends the next one is planned; None as soon as there is a place for it.
    piece_ms: what a step takes more in which a piece of a prompt comes behind another.
    """

    def __init__(
        self,
        bound: StepBound | None,
        launch_ahead: float | None,
        max_batch_tokens: int = 8192,
        cost: StepCost = COST,
        target_ttft_ms: float = 0.0,
        piece_ms: float = 0.0,
    ) -> None:
        self._cost = cost
        self._piece_ms = piece_ms
        self._more = 0
        """Requests still to come, each as another one ends."""
        self.now = 0.0
        self.found = Latencies()
        self._launch_ahead = launch_ahead
        spec = KvSpec((KvGroup((0,), 1),), 256, 8192, 256, 32768)
        limits = SchedulerLimits(max_batch_tokens, max_batch_tokens, 32768, frozenset(), 1 << 17)
        self._scheduler = Scheduler(limits, KvAccounting(spec, prompt_cache=False), clock=lambda: self.now / 1e3)
        target = FirstTokenTarget(target_ttft_ms / 1e3, cost) if target_ttft_ms else None
        self._scheduler.bound_steps(bound, target)
        self._in_flight: deque[tuple[StepPlan, float]] = deque()
        self._free = 0.0
        self._last: dict[int, float] = {}

    def run_streams(self, streams: int, prompt: int, output: int, requests: int) -> Latencies:
        """So many requests in all, of which `streams` come at once and the others as one of them ends."""
        self._more = requests - streams
        return self.run([(0.0, prompt)] * streams, output)

    def run(self, arrivals: list[tuple[float, int]], output: int) -> Latencies:
        """arrivals: time and prompt tokens of each request, in order."""
        params = SamplingParams(max_tokens=output, ignore_eos=True)
        sent = 0
        while sent < len(arrivals) or not self._scheduler.idle:
            self._wait_to_plan()
            while sent < len(arrivals) and arrivals[sent][0] + FRONT_MS / 2 <= self.now:
                self._scheduler.add(AddRequest(sent, [1] * arrivals[sent][1], params, sent, arrivals[sent][0] / 1e3))
                sent += 1
            if self._scheduler.idle:
                self.now = arrivals[sent][0] + FRONT_MS / 2
            else:
                self._step(arrivals)
        return self.found

    def _wait_to_plan(self) -> None:
        if self._launch_ahead is not None and len(self._in_flight) == DEPTH - 1:
            self.now = max(self.now, self._in_flight[-1][1] - self._launch_ahead)

    def _step(self, arrivals: list[tuple[float, int]]) -> None:
        plan = self._scheduler.plan()
        if plan is not None:
            self.now += HOST_MS
            pieces = bool(plan.starts[plan.num_decode :].any())
            self._free = max(self.now, self._free) + step_ms(plan.load, self._cost) + pieces * self._piece_ms
            self._in_flight.append((plan, self._free))
        if plan is None or len(self._in_flight) == DEPTH:
            self._complete(arrivals)

    def _complete(self, arrivals: list[tuple[float, int]]) -> None:
        plan, end = self._in_flight.popleft()
        self.now = max(self.now, end)
        result = StepResult(np.ones(len(plan.slots), dtype=np.int64))
        for delta in one_by_one(self._scheduler.complete(plan, result, self.now / 1e3)):
            before = self._last.get(delta.request_id)
            if before is None:
                self.found.ttft.append(self.now + FRONT_MS / 2 - arrivals[delta.request_id][0])
            else:
                self.found.tbt.append(self.now - before)
            self._last[delta.request_id] = self.now
            if delta.finish is not None:
                self.found.ended.append(self.now)
                if self._more:
                    self._more -= 1
                    arrivals.append((self.now + CLIENT_MS - FRONT_MS, arrivals[delta.request_id][1]))


def poisson(
    rate: float, count: int, seed: int, length: Callable[[random.Random], int] = lambda _: 1024
) -> list[tuple[float, int]]:
    """Arrival times in milliseconds, at `rate` requests a second, and prompt lengths."""
    rng, now, arrivals = random.Random(seed), 0.0, []
    for _ in range(count):
        now += 1e3 * rng.expovariate(rate)
        arrivals.append((now, length(rng)))
    return arrivals


def lengths(tokens: int, spread: float) -> Callable[[random.Random], int]:
    """Prompt lengths of a log-normal distribution with that median, from 16 to 8,000; spread: the standard deviation of
    their logarithm, 0 for all equal."""
    return lambda rng: tokens if spread == 0 else max(16, min(8000, round(tokens * exp(rng.gauss(0.0, spread)))))


def simulate(
    target_tbt_ms: float, rate: float, args: argparse.Namespace, launch_ahead: float | None
) -> tuple[float, float, float, float]:
    """The percentiles of `Latencies` at one load; a target of 0 is no bound."""
    arrivals = poisson(rate, args.requests, args.seed, lengths(args.input, args.spread))
    return _engine(target_tbt_ms, args, launch_ahead).run(arrivals, args.output).percentiles()


def simulate_streams(
    target_tbt_ms: float, streams: int, args: argparse.Namespace, launch_ahead: float | None
) -> tuple[float, tuple[float, float, float, float]]:
    """Requests a second of a closed loop, between the first two waves and the last one, and the percentiles."""
    found = _engine(target_tbt_ms, args, launch_ahead).run_streams(streams, args.input, args.output, WAVES * streams)
    first, last = 2 * streams, (WAVES - 1) * streams
    return 1e3 * (last - first) / (found.ended[last] - found.ended[first]), found.percentiles()


def _engine(target_tbt_ms: float, args: argparse.Namespace, launch_ahead: float | None) -> SimulatedEngine:
    cost = replace(COST, token=args.token_us / 1e3)
    bound = StepBound(target_tbt_ms, replace(cost, sizes=()) if args.sizes_unknown else cost) if target_tbt_ms else None
    return SimulatedEngine(bound, launch_ahead, cost=cost, target_ttft_ms=args.target_ttft_ms, piece_ms=args.piece_ms)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target_tbt_ms", nargs="+", type=float, default=[0, 10, 14, 18], help="0: no bound")
    parser.add_argument("--target_ttft_ms", type=float, default=0.0, help="0: first come, first served")
    parser.add_argument("--rates", nargs="+", type=float, default=[8, 16, 24, 28, 32], help="requests a second")
    parser.add_argument("--input", type=int, default=1024)
    parser.add_argument(
        "--spread", type=float, default=0.0, help="of the logarithm of input lengths; 1: very different"
    )
    parser.add_argument("--output", type=int, default=128)
    parser.add_argument(
        "--token_us", type=float, default=1e3 * COST.token, help="of a step with prompts, for each token"
    )
    parser.add_argument(
        "--piece_ms", type=float, default=0.0, help="of a step with a piece of a prompt behind another, besides"
    )
    parser.add_argument("--streams", nargs="*", type=int, default=[], help="closed loops instead of rates")
    parser.add_argument("--requests", type=int, default=1500)
    parser.add_argument("--launch_ahead", type=float, default=1.5, help="below 0: plan as soon as possible")
    parser.add_argument("--sizes_unknown", action="store_true", help="the policy knows of no padding")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    ahead = args.launch_ahead if args.launch_ahead >= 0 else None
    if args.streams:
        show_streams(args, ahead)
        return
    print("| target TBT | QPS | TTFT p50/p90 | TBT p50/p99 | vLLM TTFT | vLLM TBT |\n|" + " --- |" * 6)
    for target in args.target_tbt_ms:
        for rate in args.rates:
            p50, p90, t50, t99 = simulate(target, rate, args, ahead)
            peer = PEER.get(int(rate), ("", ""))
            print(f"| {target:g} | {rate:g} | {p50:.1f}/{p90:.1f} | {t50:.1f}/{t99:.1f} | {peer[0]} | {peer[1]} |")


def show_streams(args: argparse.Namespace, launch_ahead: float | None) -> None:
    """Print the table of closed loops."""
    print("| target TBT | streams | requests/s | TTFT p50/p90 | TBT p50/p99 |\n|" + " --- |" * 5)
    for target in args.target_tbt_ms:
        for streams in args.streams:
            rate, (p50, p90, t50, t99) = simulate_streams(target, streams, args, launch_ahead)
            print(f"| {target:g} | {streams} | {rate:.1f} | {p50:.1f}/{p90:.1f} | {t50:.1f}/{t99:.1f} |")


if __name__ == "__main__":
    main()
