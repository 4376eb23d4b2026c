"""Time chains of a model's layers with one linear layer by other schedules, at the clock that the power limit leaves.

    python kernels/benchmarks/layer_chain.py --rows 1280 2048 [--model llama-8b] [--layers "gate-up, silu · mul" down]
                                             [--tokens 192 256] [--groups 2] [--clusters 2] [--bands 8] [--stream_k 0 1]
                                             [--chain 8] [--turns 3] [--seconds 0.9] [--least_gain 0.5] [--out TABLE]

A chain is norms and linear layers as a decoder has them, without attention, captured as a CUDA graph. What a layer
takes there is not what it takes alone: its x was just written, the kernel in front of it still ends, and its clock is
what the energy of all layers leaves. Of each layer: what the table says, what `linear` takes without a schedule, and
`wide_linear` with all combinations of the choices. Chains take turns of so many seconds, whose first half does not
count, and every second round is in reverse order; the table's has two places. `--out`: the shipped table, with
schedules that save so many percent of the chain.
"""

import argparse
import time
from dataclasses import replace
from itertools import product
from pathlib import Path
from statistics import mean

import torch
from bladellm_kernels.hopper_parts import has_registers
from bladellm_kernels.linear import linear, linear_silu_mul, measured_table, use_table
from bladellm_kernels.linear_schedules import Entry, ScheduleTable, WideSchedule, save_table
from bladellm_kernels.rms_norm import rms_norm
from bladellm_kernels.wide_linear import source
from cluster_linear import ADDING
from cluster_table import with_clusters
from compile_ahead import compile_ahead
from cublaslt_candidates import sustained, sustained_turns
from gpu_timing import machine
from linear_step import Layer, Shape, Step, models
from wide_linear import described

EPS = 1e-5

Choice = WideSchedule | None
"""None for what `linear` takes without a schedule: cuBLAS, or for a gate of many rows a kernel in Triton."""


class Chain:
    """Layers of a model behind each other, and what flows between them, of so many rows."""

    def __init__(self, model: Step, layers: list[Layer], rows: int) -> None:
        self.layers = layers
        self.norm = torch.ones(model.hidden, device="cuda", dtype=torch.bfloat16)
        sizes = (model.hidden, model.hidden, model.queries, model.qkv, model.inner)
        flowing = [torch.randn(rows, size, device="cuda", dtype=torch.bfloat16) for size in sizes]
        self.stream, self.normed, self.attended, self.qkv, self.inner = flowing

    def run(self) -> None:
        """As a decoder does but for attention, whose output stays the same."""
        for layer in self.layers:
            rms_norm(self.stream, self.norm, EPS, out=self.normed)
            linear(self.normed, layer["qkv"], out=self.qkv)
            linear(self.attended, layer["o"], out=self.stream, residual=self.stream)
            rms_norm(self.stream, self.norm, EPS, out=self.normed)
            linear_silu_mul(self.normed, layer["gate_up"], out=self.inner)
            linear(self.inner, layer["down"], out=self.stream, residual=self.stream)

    def captured(self, table: ScheduleTable) -> torch.cuda.CUDAGraph:
        """By this table; run once before, so that all kernels are loaded."""
        use_table(table)
        self.run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.run()
        use_table(None)
        return graph


def choices(shape: Shape, rows: int, args: argparse.Namespace) -> list[Choice]:
    """No schedule, and all whose sums fit registers; a single tile of rows has no band."""
    combined = product(args.tokens, args.groups, args.clusters, args.bands, args.stream_k)
    found = {
        WideSchedule(tokens, groups, cluster, 1 if rows <= tokens else band, None, shape.gated, bool(divided))
        for tokens, groups, cluster, band, divided in combined
        if has_registers(tokens, groups)
    }
    return [None, *sorted(found, key=described)]


def key_of(shape: Shape) -> tuple[int, int, bool]:
    """Of a table."""
    return shape.outputs, shape.inputs, shape.gated


def table_with(base: ScheduleTable, shape: Shape, rows: int, choice: Choice) -> ScheduleTable:
    """The base, but for this layer of exactly so many rows."""
    key = key_of(shape)
    below, above = (Entry(count, base.choose(count, *key)) for count in (rows - 1, rows + 1))
    return ScheduleTable({**base.entries, key: (below, Entry(rows, choice), above)}, base.norm_rows)


def measure(chain: Chain, shape: Shape, base: ScheduleTable, args: argparse.Namespace) -> tuple[list[str], Choice]:
    """A line for every choice; the schedule that is best, None where none saves enough."""
    rows, found = len(chain.stream), choices(shape, len(chain.stream), args)
    wide = [choice for choice in found if choice is not None]
    compile_ahead((source(choice, torch.bfloat16, shape.name in ADDING) for choice in wide), "wide_linear.cu")
    named = {"no schedule" if choice is None else described(choice): choice for choice in found}
    graphs = {"table": chain.captured(base)}
    graphs |= {name: chain.captured(table_with(base, shape, rows, choice)) for name, choice in named.items()}
    graphs["table again"] = chain.captured(base)
    # What comes first in a row of them has another clock than those behind.
    sustained([graphs["table"]], args.seconds)
    turns = dict(zip(graphs, sustained_turns(list(graphs.values()), args.seconds, args.turns), strict=True))
    usual, count = mean(turns["table"] + turns["table again"]), len(chain.layers)
    lines = [
        f"| {rows} | {shape.name} | {name} | {mean(spans) / count * 1e6:.1f} | {mean(spans) / usual - 1:+.2%} | "
        f"{min(spans) / usual - 1:+.2%} to {max(spans) / usual - 1:+.2%} |"
        for name, spans in turns.items()
    ]
    best = min(named, key=lambda name: mean(turns[name]))
    return lines, named[best] if mean(turns[best]) <= (1 - args.least_gain / 100) * usual else None


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    gated = "gate-up, silu · mul"
    parser.add_argument("--rows", nargs="+", type=int, required=True, help="M, rows of x")
    parser.add_argument("--model", default="llama-8b", choices=list(models()))
    parser.add_argument("--layers", nargs="+", default=[gated], choices=["qkv", "o", gated, "down"])
    parser.add_argument("--tokens", nargs="+", type=int, default=[192, 256], help="rows of x in a tile")
    parser.add_argument("--groups", nargs="+", type=int, default=[2], help="of 64 rows of the weight")
    parser.add_argument("--clusters", nargs="+", type=int, default=[2], choices=(1, 2))
    parser.add_argument("--bands", nargs="+", type=int, default=[8], help="tiles of rows taken together")
    parser.add_argument("--stream_k", nargs="+", type=int, default=[0, 1], choices=(0, 1), help="1: by Stream-K")
    parser.add_argument("--chain", type=int, default=8, help="layers, each with weights of its own")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=0.9, help="of a turn")
    parser.add_argument("--least_gain", type=float, default=0.5, help="percent of a chain, for --out")
    parser.add_argument("--out", type=Path, help="where to write a table, for `load_table`")
    return parser.parse_args()


@torch.inference_mode()
def main() -> None:
    args, began = arguments(), time.perf_counter()
    print(", ".join(f"{name}: {value}" for name, value in machine().items()), flush=True)
    model = models()[args.model]
    layers = replace(model, layers=args.chain).weights()[0]
    base = measured_table(torch.device("cuda", 0))
    shapes = [shape for shape in model.shapes if shape.name in args.layers]
    # What the table knows of other rows stays.
    chosen: dict[Shape, dict[int, Choice]] = {
        shape: {entry.rows: None for entry in base.entries.get(key_of(shape), ())} for shape in shapes
    }
    print("\n| rows | layer | by | µs of a layer of the chain | change | of turns |\n" + "| --- " * 6 + "|", flush=True)
    for rows in args.rows:
        chain = Chain(model, layers, rows)
        for shape in shapes:
            lines, chosen[shape][rows] = measure(chain, shape, base, args)
            print("\n".join(lines), flush=True)
    if args.out:
        table = base
        for shape in shapes:
            table = with_clusters(table, key_of(shape), chosen[shape])
        save_table(table, args.out)
    print(f"\n{time.perf_counter() - began:.0f} s")


if __name__ == "__main__":
    main()
