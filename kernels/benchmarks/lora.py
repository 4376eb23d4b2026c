"""Time LoRA's kernels beside the layers that they add to, over the layers of a model.

python kernels/benchmarks/lora.py [--rows 32] [--adapters 8 32] [--rank 16] [--layers 32] [--hidden 4096]
    [--inner 14336] [--heads 32x8x128] [--tokens 0] [--repeats 20] [--no_tiles]
    [--no_borrow] [--table TABLE]

All layers have matrices of their own, as in a model, so that nothing stays in the L2 cache. Row r has adapter r modulo
their number. With --tokens a step has so many tokens, in tiles. `base` is the layer with what follows it: the gate, or
the residual addition and the norm; `apart` with A and B by kernels of their own, `stacked` with A behind the layer's
weight, of rows alone. `step` is that of all linear layers but the head: µs with adapters over µs without; attention and
the head are left out, so that the whole model's share is less.
"""

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from bladellm_kernels import lora_stacked_tiles_triton
from bladellm_kernels.delayed_norm import DelayedNorm
from bladellm_kernels.linear import linear, linear_silu_mul, use_table
from bladellm_kernels.linear_schedules import load_table
from bladellm_kernels.lora_expand import lora_expand, lora_expand_silu_mul
from bladellm_kernels.lora_shrink import lora_shrink
from bladellm_kernels.lora_stacked import (
    StackedOutputs,
    stacked_expand,
    stacked_expand_add,
    stacked_expand_silu_mul,
)
from bladellm_kernels.lora_tokens import TokenAdapters, token_adapters
from bladellm_kernels.rms_norm import add_rms_norm
from gpu_timing import GpuTimer

Shape = tuple[str, int, tuple[int, ...]]
Work = Callable[[], object]


def shapes(hidden: int, inner: int, heads: int, kv_heads: int, dim: int) -> list[Shape]:
    """Name, inputs, and outputs of each slice of a decoder layer's linear layers."""
    qkv = (heads * dim, kv_heads * dim, kv_heads * dim)
    return [
        ("qkv", hidden, qkv),
        ("output", heads * dim, (hidden,)),
        ("gate_up", hidden, (inner, inner)),
        ("down", inner, (hidden,)),
    ]


class Layer:
    """A random linear layer in bfloat16, its adapters, and inputs."""

    def __init__(
        self, inputs: int, rows: tuple[int, ...], tokens: int, adapters: int, rank: int, borrows: bool
    ) -> None:
        self.rows = rows
        self.measured = sum(rows) if borrows else None
        self.x = torch.randn(tokens, inputs, device="cuda").bfloat16()
        count = adapters * len(rows) * rank
        self.stacked = torch.randn(-(-(sum(rows) + count) // 16) * 16, inputs, device="cuda").mul_(inputs**-0.5)
        self.stacked = self.stacked.bfloat16()
        self.weight = self.stacked[: sum(rows)]
        self.a = self.stacked[sum(rows) : sum(rows) + count].view(adapters, -1, inputs)
        self.b = torch.randn(adapters, sum(rows), rank, device="cuda").bfloat16()
        self.scales = torch.ones(adapters, len(rows), device="cuda")
        self.y = torch.zeros(tokens, sum(rows), device="cuda").bfloat16()
        self.residual = torch.zeros_like(self.y)
        self.norm_weight = torch.ones(sum(rows), device="cuda").bfloat16()
        # Of the layer in front: as many parts as that has blocks of outputs.
        self.norm = DelayedNorm(self.x, torch.ones(tokens, 8, device="cuda"), 1e-5)

    def base(self) -> None:
        """The gate is applied by the layer's own kernel."""
        if len(self.rows) == 2:
            linear_silu_mul(self.x, self.weight)
        else:
            linear(self.x, self.weight, out=self.y)
            self._add()

    def added(self, adapters: TokenAdapters) -> None:
        """The kernels of LoRA alone, among them the gate's, and the norm."""
        self._expand(lora_shrink(self.x, self.a, self.scales, adapters), adapters)

    def both(self, adapters: TokenAdapters) -> None:
        shrunk = lora_shrink(self.x, self.a, self.scales, adapters)
        linear(self.x, self.weight, out=self.y)
        self._expand(shrunk, adapters)

    def riding(self, adapters: TokenAdapters) -> None:
        y = linear(self.x, self.stacked, measured=self.measured)
        front = None if len(self.rows) == 1 else self.norm
        given = StackedOutputs(y, self.b, self.scales, self.rows, adapters, None, front)
        if len(self.rows) == 1:
            stacked_expand_add(given, self.residual, self.norm_weight, 1e-5)
        elif len(self.rows) == 2:
            stacked_expand_silu_mul(given)
        else:
            stacked_expand(given)

    def _add(self) -> None:
        if len(self.rows) == 1:
            add_rms_norm(self.y, self.residual, self.norm_weight, 1e-5, total=self.residual)

    def _expand(self, shrunk: torch.Tensor, adapters: TokenAdapters) -> None:
        if len(self.rows) == 2:
            lora_expand_silu_mul(shrunk, self.b, (self.rows[0], self.rows[1]), adapters, self.y)
        else:
            lora_expand(shrunk, self.b, self.rows, adapters, self.y)
            self._add()


def measure(args: argparse.Namespace, count: int, timer: GpuTimer) -> list[str]:
    tokens = args.tokens or args.rows
    slots = [token * count // tokens if args.tokens else token % count for token in range(tokens)]
    adapters = token_adapters(slots, count, torch.device("cuda"), bool(args.tokens))
    lines: list[str] = []
    sums = [0.0, 0.0, 0.0]
    heads, kv_heads, dim = map(int, args.heads.split("x"))
    for name, inputs, rows in shapes(args.hidden, args.inner, heads, kv_heads, dim):
        layers = [Layer(inputs, rows, tokens, count, args.rank, not args.no_borrow) for _ in range(args.layers)]
        base: list[Work] = [layer.base for layer in layers]
        added: list[Work] = [partial(layer.added, adapters) for layer in layers]
        both: list[Work] = [partial(layer.both, adapters) for layer in layers]
        stacked: list[Work] = [] if args.tokens else [partial(layer.riding, adapters) for layer in layers]
        alone, kernels, together = (timer.replayed(works) / len(works) * 1e6 for works in (base, added, both))
        riding = timer.replayed(stacked) / len(stacked) * 1e6 if stacked else 0.0
        sums = [before + time for before, time in zip(sums, (alone, together, riding), strict=True)]
        lines.append(f"| {count} | {name} | {alone:.1f} | {kernels:.1f} | {shares(alone, together, riding)} |")
        del layers, base, added, both, stacked
    alone, together, riding = (args.layers * time for time in sums)
    lines.append(f"| {count} | step | {alone:.0f} | | {shares(alone, together, riding)} |")
    return lines


def shares(alone: float, together: float, riding: float) -> str:
    """Times with adapters, each with what it is more than without."""
    return " | ".join(f"{time:.1f} | {time / alone - 1:.0%}" if time else " | " for time in (together, riding))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=32, help="decode rows")
    parser.add_argument("--adapters", type=int, nargs="+", default=[8, 32])
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--inner", type=int, default=14336)
    parser.add_argument("--heads", default="32x8x128", help="query heads x KV heads x dim")
    parser.add_argument("--tokens", type=int, default=0, help="tokens of a step with chunks, in place of rows")
    parser.add_argument("--no_tiles", action="store_true", help="every row reads the B of gate and up by itself")
    parser.add_argument("--no_borrow", action="store_true", help="stacked weights take no schedule of weights alone")
    parser.add_argument("--table", type=Path, help="schedules in place of the shipped ones")
    parser.add_argument("--repeats", type=int, default=20)
    args = parser.parse_args()
    lora_stacked_tiles_triton.TILED = not args.no_tiles
    use_table(load_table(args.table) if args.table else None)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, bfloat16, rank {args.rank}, ", end="")
    print(f"{args.tokens} tokens in tiles\n" if args.tokens else f"{args.rows} rows\n")
    print("| adapters | layer | base µs | LoRA alone µs | apart µs | more | stacked µs | more |")
    print("|" + " --- |" * 8)
    for count in args.adapters:
        print("\n".join(measure(args, count, GpuTimer(args.repeats))), flush=True)


if __name__ == "__main__":
    main()
