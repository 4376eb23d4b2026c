"""Search schedules of 4- or 8-bit linear layers whose norms are kernels of their own, in whole steps on a GPU.

    python kernels/benchmarks/apart_units.py [--tokens 1 8 128] [--candidates wide=ring:64,8,4,4,2,1,1,0,1 ...]
        [--bits 4] [--group 128] [--zeros] [--layers 32]

Llama-3.1-8B's shape, no attention; the head in bfloat16. Each figure is a whole step in one CUDA graph, milliseconds:
first with the table's schedules, then with one replaced by a candidate at a time, the best of which is kept for those
after it: what a layer fetches early delays the kernel in front, so each is timed among its neighbours. Kinds: middle
(q, k, v), small (o), wide (gate-up without its gate), gated (with it, "none" for apart) and long (down); schedules as
for `unit_linear.py`. Beside it the error of two layers to float64, and whether two runs differ.
"""

import argparse
import time
from collections.abc import Iterator
from functools import partial

import torch
from bladellm_kernels.unit_schedules import Schedule, gated_schedule, unit_schedule
from fused_chain import LLAMA_8B, Sizes
from fused_units import KINDS, Weights, apart, error, random_weights
from gpu_timing import GpuTimer, machine
from unit_linear import parse_schedule

Chosen = dict[str, Schedule | None]


def table_schedules(tokens: int, fine: bool) -> Chosen:
    """What the runtime takes."""
    chosen: Chosen = {}
    for name, kind in KINDS.items():
        outputs, inputs, gated = LLAMA_8B.shapes[name]
        rows = (1 + gated) * outputs
        chosen[kind] = unit_schedule(tokens, rows, inputs, fine)
        if gated:
            chosen["gated"] = gated_schedule(tokens, rows, fine)
    return chosen


def candidates(given: list[str]) -> Iterator[tuple[str, Schedule | None]]:
    """Of `kind=schedule schedule ...`, in the order they are given."""
    for each in given:
        kind, _, texts = each.partition("=")
        for text in texts.split():
            yield kind, None if text == "none" else parse_schedule(text)


def measure(weights: Weights, tokens: int, args: argparse.Namespace) -> Iterator[str]:
    """Rows of the table: what ran, milliseconds, error, whether it is kept."""
    timer = GpuTimer(args.repeats)
    x = torch.randn(tokens, LLAMA_8B.hidden, device="cuda", dtype=torch.bfloat16)
    kept = table_schedules(tokens, fine=weights.units["qkv"][0].group_steps < 0)

    def figures(chosen: Chosen) -> tuple[float, str]:
        ms = timer.replayed([partial(apart, weights, x, args.layers, chosen)]) * 1e3
        return ms, f"{ms:.3f} | {error(weights, partial(apart, chosen=chosen), x)}"

    best, shown = figures(kept)
    yield f"| {tokens} | the table's | {shown} | |"
    for kind, schedule in candidates(args.candidates):
        tried = {**kept, kind: schedule}
        try:
            ms, shown = figures(tried)
        except Exception as failure:  # a candidate that does not fit a multiprocessor
            yield f"| {tokens} | {kind} {schedule} | {str(failure).splitlines()[0]} | | |"
            continue
        better = ms < best and "DIFFERS" not in shown
        yield f"| {tokens} | {kind} {schedule} | {shown} | {'kept' if better else ''} |"
        if better:
            best, kept = ms, tried


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 8, 16, 32, 64, 128, 256])
    parser.add_argument("--candidates", nargs="+", default=[], help="'kind=schedule schedule ...' each")
    parser.add_argument("--bits", type=int, default=4, choices=(4, 8))
    parser.add_argument("--group", type=int, default=128, help="inputs that share a scale, 0 for a whole row")
    parser.add_argument("--zeros", action="store_true")
    parser.add_argument("--layers", type=int, default=LLAMA_8B.layers)
    parser.add_argument("--repeats", type=int, default=9)
    args = parser.parse_args()
    torch.manual_seed(0)
    print(", ".join(f"{name}: {value}" for name, value in machine().items()), flush=True)
    start = time.perf_counter()
    sizes = Sizes(args.layers, *(getattr(LLAMA_8B, name) for name in LLAMA_8B.__slots__[1:]))
    weights = random_weights(sizes, args.bits, args.group, args.zeros, torch.bfloat16, "cuda")
    print("| tokens | step | ms | error | |\n| ---: | --- | ---: | --- | --- |", flush=True)
    for tokens in args.tokens:
        for line in measure(weights, tokens, args):
            print(line, flush=True)
    print(f"\n{time.perf_counter() - start:.0f} s in all")


if __name__ == "__main__":
    main()
