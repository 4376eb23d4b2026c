"""Time the merge of attention over parts of the keys, beside a read-only ceiling.

python kernels/benchmarks/merge_attention.py [--cases 2048x2 300x2 2048x5 64x8] [--heads 32x128] [--repeats 20]

A case is TOKENSxPARTS. The calls of a graph take buffers in turn that together are larger than the L2 cache. The
ceiling is that of reading as many bytes as one call reads and writes.
"""

import argparse
from functools import partial

import torch
from bladellm_kernels.merge_attention import merge_attention, merge_attention_reference
from gpu_timing import GpuTimer

L2_BYTES = 60 * 2**20
# Bytes and TB/s of reading only, measured on an H200 (results/ceilings_h200.md).
READ_CEILING = {2**32: 4.70, 2**30: 4.63, 2**26: 3.96, 2**24: 2.86}


def parts_of(tokens: int, parts: int, heads: int, dim: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    outs = [torch.randn(tokens, heads, dim, device="cuda").bfloat16() for _ in range(parts)]
    # As cuDNN gives them: tokens contiguous.
    return outs, [torch.randn(heads, tokens, device="cuda").mul_(3).T for _ in range(parts)]


def ceiling(size: int) -> float:
    """TB/s for about that many bytes."""
    return next((rate for bytes, rate in READ_CEILING.items() if size >= bytes), min(READ_CEILING.values()))


def measure(tokens: int, parts: int, heads: int, dim: int, timer: GpuTimer) -> str:
    size = tokens * heads * (dim * 2 * (parts + 1) + 4 * parts)
    sets = [parts_of(tokens, parts, heads, dim) for _ in range(1 + 2 * L2_BYTES // size)]
    results = [torch.full_like(outs[0], torch.nan) for outs, _ in sets]
    works = [partial(merge_attention, *given, result) for given, result in zip(sets, results, strict=True)]
    works[0]()
    expected = merge_attention_reference(*sets[0])
    torch.testing.assert_close(results[0].double(), expected, atol=2e-2, rtol=2e-2)
    seconds = timer.replayed(works) / len(works)
    rate = size / seconds / 1e12
    return f"| {tokens} x {parts} | {seconds * 1e6:.1f} | {rate:.2f} | {rate / ceiling(size):.0%} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", default=["300x2", "2048x2", "2048x5", "8192x2"], help="TOKENSxPARTS")
    parser.add_argument("--heads", default="32x128", help="query heads x dim")
    parser.add_argument("--repeats", type=int, default=20)
    args = parser.parse_args()
    heads, dim = map(int, args.heads.split("x"))
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, bfloat16, heads {args.heads}\n")
    print("| tokens x parts | µs | TB/s | of reading alone |\n| --- | --- | --- | --- |")
    for case in args.cases:
        tokens, parts = map(int, case.split("x"))
        print(measure(tokens, parts, heads, dim, GpuTimer(args.repeats)), flush=True)


if __name__ == "__main__":
    main()
