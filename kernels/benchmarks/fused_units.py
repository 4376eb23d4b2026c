"""Time a decode step's linear layers of 4- or 8-bit weights, and all between them, on a Hopper: apart and fused.

    python kernels/benchmarks/fused_units.py [--tokens 1 8 16] [--bits 4] [--group 128] [--zeros] [--layers 32]
        [--candidates wide=ring:64,16,2,4,2,1,1 small=stream:16,16,2,1,16 ...] [--no-search] [--not-early]

Llama-3.1-8B's shape, no attention; the head in bfloat16. Each figure is a whole step in one CUDA graph: with norms,
gates and the residual as kernels apart, fused by the default schedules, and, unless given --no-search, fused with one
schedule at a time replaced by candidates, the best of which is kept for those after it: so each is timed beside its
neighbours. Schedules are written as for `unit_linear.py`. The first two layers are checked against float64 first.
"""

import argparse
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import torch
from bladellm_kernels import early_launch
from bladellm_kernels.delayed_norm import delayed_norm
from bladellm_kernels.linear import linear
from bladellm_kernels.normed_linear import normed_linear
from bladellm_kernels.normed_unit_linear import normed_unit_linear, unit_linear_add
from bladellm_kernels.rms_norm import add_rms_norm, rms_norm
from bladellm_kernels.silu_mul import silu_mul
from bladellm_kernels.unit_linear import unit_linear, unit_linear_silu_mul
from bladellm_kernels.unit_schedules import Kind, NormSchedule, Schedule, Streamed, norm_schedule
from bladellm_kernels.warp_units import takes
from bladellm_kernels.weight_units import UnitWeight, pack_units
from fused_chain import EPS, LLAMA_8B, Sizes, queries_only, reference
from fused_chain import Weights as DenseWeights
from gpu_timing import GpuTimer, machine
from torch import Tensor
from unit_linear import parse_schedule

CHECKED_LAYERS = 2
KINDS: dict[str, Kind] = {"qkv": "middle", "o": "small", "gate_up": "wide", "down": "long"}
CANDIDATES: dict[int, dict[Kind, str]] = {
    8: {
        "middle": "stream:16,16,2,1 stream:16,8,2,1,8,2 gemv:16,4,4,8,1,0,120",
        "small": "gemv:16,4,4 gemv:16,8,4,8,1,0,80 stream:16,8,2,1,8,2",
        "wide": "stream:16,16,2,2 stream:16,8,2,1,8,2 ring:64,8,2,4,2,1,1",
        "long": "stream:16,16,2,1 gemv:32,8,1,8,1,2 stream:16,8,2,1,8,2",
    },
    16: {
        "middle": "ring:64,16,1,9,1,3,1 ring:64,16,1,8,1,4,1 gemv:64,4,1,16,2,2",
        "small": "ring:64,16,1,9,1,3,1 ring:64,16,1,8,1,4,2 gemv:64,4,1,16,2,2",
        "wide": "ring:64,16,2,8,1,1,1 ring:64,16,1,9,1,3,1 stream:16,16,2,1,16",
        "long": "ring:64,16,1,8,1,4,2 stream:16,16,2,1,16",
    },
}
"""By the largest number of tokens."""

Schedules = dict[Kind, NormSchedule]


@dataclass(frozen=True, slots=True)
class Weights:
    """units: by the kind of layer a list; dense: the first layers of the same in float32."""

    units: dict[str, list[UnitWeight]]
    norms: list[Tensor]
    head: Tensor
    dense: DenseWeights


def random_layer(
    outputs: int, inputs: int, bits: int, groups: int, zeros: bool, dtype: torch.dtype, device: str
) -> tuple[UnitWeight, Tensor]:
    """In units, and in float32."""
    # Around the middle: outputs would have a part in common otherwise, which errors of a step grow with.
    codes = torch.randint(1, 2**bits, (outputs, inputs), dtype=torch.uint8, device=device)
    spread = 2**bits / 12**0.5 * inputs**0.5
    scales = ((torch.rand(outputs, groups, device=device) + 0.5) / spread).to(dtype)
    points = torch.randint(0, 2**bits, scales.shape, dtype=torch.uint8, device=device) if zeros else None
    middle = float(2 ** (bits - 1)) if points is None else points.float().unsqueeze(2)
    values = (codes.float().view(outputs, groups, -1) - middle) * scales.float().unsqueeze(2)
    return pack_units(codes, scales, points, bits), values.view(outputs, inputs)


def random_weights(sizes: Sizes, bits: int, group: int, zeros: bool, dtype: torch.dtype, device: str) -> Weights:
    units: dict[str, list[UnitWeight]] = {}
    dense: dict[str, list[Tensor]] = {}
    for name in KINDS:
        outputs, inputs, gated = sizes.shapes[name]
        groups = inputs // group if group else 1
        for layer in range(sizes.layers):
            weight, values = random_layer((1 + gated) * outputs, inputs, bits, groups, zeros, dtype, device)
            units.setdefault(name, []).append(weight)
            if layer < CHECKED_LAYERS:
                dense.setdefault(name, []).append(values)
    norms = [1 + torch.randn(sizes.hidden, dtype=dtype, device=device) / 8 for _ in range(2 * sizes.layers + 1)]
    head = torch.randn(sizes.head_rows, sizes.hidden, dtype=dtype, device=device) * sizes.hidden**-0.5
    checked = min(sizes.layers, CHECKED_LAYERS)
    norms_checked = [*norms[: 2 * checked], norms[2 * checked]]
    return Weights(units, norms, head, DenseWeights({**dense, "head": [head]}, norms_checked))


def apart(weights: Weights, x: Tensor, layers: int, chosen: Mapping[str, Schedule | None] = {}) -> Tensor:
    """Norms with the residual addition, and gates that no kernel of a layer applies, between the linear layers. Returns
    the logits. chosen: schedules in place of the table's by the kind of layer, and of "gated" layers or None for
    none."""
    stream, normed = x, rms_norm(x, weights.norms[0], EPS)
    for layer in range(layers):
        qkv, o, gate_up, down = (weights.units[name][layer] for name in KINDS)
        mixed = queries_only(unit_linear(normed, qkv, schedule=chosen.get("middle")), layer, x.shape[1])
        attended = unit_linear(mixed, o, schedule=chosen.get("small"))
        normed, stream = add_rms_norm(attended, stream, weights.norms[2 * layer + 1], EPS)
        if "gated" in chosen and chosen["gated"] is None:
            inner = silu_mul(unit_linear(normed, gate_up, schedule=chosen.get("wide")))
        else:
            inner = unit_linear_silu_mul(normed, gate_up, schedule=chosen.get("gated"))
        added = unit_linear(inner, down, schedule=chosen.get("long"))
        normed, stream = add_rms_norm(added, stream, weights.norms[2 * layer + 2], EPS)
    return linear(normed, weights.head)


def fused(weights: Weights, x: Tensor, layers: int, schedules: Schedules) -> Tensor:
    """The same in the kernels of the linear layers."""
    stream, norm = x.clone(), delayed_norm(x, weights.norms[0], EPS)
    for layer in range(layers):
        qkv, o, gate_up, down = (weights.units[name][layer] for name in KINDS)
        mixed = queries_only(normed_unit_linear(norm, qkv, schedule=schedules["middle"]), layer, x.shape[1])
        norm = unit_linear_add(mixed, o, stream, weights.norms[2 * layer + 1], EPS, schedule=schedules["small"])
        inner = normed_unit_linear(norm, gate_up, gated=True, schedule=schedules["wide"])
        norm = unit_linear_add(inner, down, stream, weights.norms[2 * layer + 2], EPS, schedule=schedules["long"])
    return normed_linear(norm, weights.head)


WITHOUT_WARPS: Schedules = {
    "small": Streamed(16, 16, 2, 1),
    "wide": Streamed(16, 16, 2, 1),
    "long": Streamed(16, 8, 2, 2, programs_per_sm=2),
}
"""Up to 8 tokens, where there is no kernel for `WarpRings`."""


def default_schedules(tokens: int, units: Mapping[str, list[UnitWeight]]) -> Schedules:
    """Of the table, or what comes next to that."""
    found: Schedules = {}
    for name, kind in KINDS.items():
        outputs, inputs, gated = LLAMA_8B.shapes[name]
        schedule = norm_schedule(tokens, (1 + gated) * outputs, inputs, gated, warps=takes(units[name][0]))
        schedule = schedule or (WITHOUT_WARPS[kind] if tokens <= WITHOUT_WARPS[kind].tokens else None)
        if schedule is None:
            raise SystemExit(f"layers with norms take fewer than {tokens} tokens")
        found[kind] = schedule
    return found


def candidates(tokens: int, given: list[str]) -> Iterator[tuple[Kind, NormSchedule]]:
    """Kind by kind."""
    named = [each.partition("=") for each in given]
    for kind in KINDS.values():
        texts = [text for name, _, text in named if name == kind]
        if not given:
            texts = CANDIDATES[next(most for most in CANDIDATES if tokens <= most)][kind].split()
        for text in texts:
            schedule = parse_schedule(text)
            assert isinstance(schedule, NormSchedule)
            yield kind, schedule


def error(weights: Weights, chain: Callable[[Weights, Tensor, int], Tensor], x: Tensor) -> str:
    """Of two layers beside float64; with a mark where two runs differ."""
    layers = len(weights.dense.linears["qkv"])
    expected = reference(weights.dense, x, partial(queries_only, hidden=x.shape[1]))
    first, second = chain(weights, x, layers), chain(weights, x, layers)
    same = "" if torch.equal(first, second) else " DIFFERS"
    return f"{float((first.double() - expected).norm() / expected.norm()):.4f}{same}"


def measure(weights: Weights, tokens: int, layers: int, args: argparse.Namespace) -> Iterator[str]:
    """Rows of the table: what ran, milliseconds, error."""
    timer = GpuTimer(args.repeats)
    x = torch.randn(tokens, LLAMA_8B.hidden, device="cuda", dtype=torch.bfloat16)

    def figures(name: str, chain: Callable[[Weights, Tensor, int], Tensor]) -> tuple[float, str]:
        try:
            ms = timer.replayed([partial(chain, weights, x, layers)]) * 1e3
        except Exception as failure:  # a candidate that does not fit a multiprocessor
            return float("inf"), f"| {tokens} | {name} | {str(failure).splitlines()[0]} | |"
        return ms, f"| {tokens} | {name} | {ms:.3f} | {error(weights, chain, x)} |"

    yield figures("apart", apart)[1]
    kept = default_schedules(tokens, weights.units)
    best, line = figures("fused", partial(fused, schedules=kept))
    yield line
    for kind, schedule in [] if args.no_search else candidates(tokens, args.candidates):
        tried = {**kept, kind: schedule}
        ms, line = figures(f"{kind} {schedule}", partial(fused, schedules=tried))
        yield line
        if ms < best:
            best, kept = ms, tried
    yield f"| {tokens} | best: {kept} | {best:.3f} | |"


def compile_all(weights: Weights, args: argparse.Namespace) -> None:
    """Run a layer with every schedule once, many at a time; what fails is reported where it is timed."""

    def run(chain: Callable[[Weights, Tensor, int], Tensor], tokens: int) -> None:
        try:
            chain(weights, torch.randn(tokens, LLAMA_8B.hidden, device="cuda", dtype=torch.bfloat16), 1)
        except Exception as failure:
            print(f"{tokens}: {str(failure).splitlines()[0]}", flush=True)

    jobs: list[tuple[Callable[[Weights, Tensor, int], Tensor], int]] = []
    for tokens in args.tokens:
        default = default_schedules(tokens, weights.units)
        jobs += [(apart, tokens), (partial(fused, schedules=default), tokens)]
        if not args.no_search:
            tried = candidates(tokens, args.candidates)
            jobs += [(partial(fused, schedules={**default, kind: each}), tokens) for kind, each in tried]
    with ThreadPoolExecutor(args.threads) as pool:
        list(pool.map(run, *zip(*jobs, strict=True)))
    torch.cuda.synchronize()


def main() -> None:
    args = _arguments().parse_args()
    torch.manual_seed(0)
    print(", ".join(f"{name}: {value}" for name, value in machine().items()), flush=True)
    if args.not_early:
        early_launch.can_launch_early = lambda device: False
    start = time.perf_counter()
    sizes = Sizes(args.layers, *(getattr(LLAMA_8B, name) for name in LLAMA_8B.__slots__[1:]))
    weights = random_weights(sizes, args.bits, args.group, args.zeros, torch.bfloat16, "cuda")
    compile_all(weights, args)
    print(f"ready after {time.perf_counter() - start:.0f} s\n")
    print("| tokens | step | ms | error |\n| ---: | --- | ---: | --- |", flush=True)
    for tokens in args.tokens:
        for line in measure(weights, tokens, args.layers, args):
            print(line, flush=True)
    print(f"\n{time.perf_counter() - start:.0f} s in all")


def _arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 8, 16])
    parser.add_argument("--bits", type=int, default=4, choices=(4, 8))
    parser.add_argument("--group", type=int, default=128, help="inputs that share a scale, 0 for a whole row")
    parser.add_argument("--zeros", action="store_true")
    parser.add_argument("--layers", type=int, default=LLAMA_8B.layers)
    parser.add_argument("--candidates", nargs="+", default=[], help="kind=schedule, instead of those of each number")
    parser.add_argument("--no-search", action="store_true", help="the default schedules alone")
    parser.add_argument("--not-early", action="store_true", help="no kernel starts before the one in front has ended")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--threads", type=int, default=12, help="kernels compiled at a time")
    return parser


if __name__ == "__main__":
    main()
