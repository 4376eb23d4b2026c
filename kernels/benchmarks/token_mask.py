"""Time `mask_tokens_`: microseconds a step by rows, vocabulary and how many tokens are allowed.

python kernels/benchmarks/token_mask.py [--rows 1 8 64 256] [--vocab 128256 151936] [--dtype bfloat16] [--json FILE]

`of memory`: the masks read, and the logits of forbidden tokens read and written, at the 4.70 TB/s that a read kernel
reaches here, as a share of the step's time. `upload`: a copy of the masks from pinned memory. Each figure is the median
of replays of a graph of steps over several logits, so that the cache does not hold them from step to step.
"""

import argparse
import json
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
from bladellm_kernels.token_mask import mask_tokens_, token_mask_reference
from gpu_timing import GpuTimer, clocks, machine

SPEED = 4.70e12
SOME_BYTES = 256 << 20
"""Logits that steps go through before the first come again."""
SHARES = (0.0, 0.5, 1.0)
"""Of the tokens that are allowed, in words of 32."""


@dataclass(frozen=True, slots=True)
class Row:
    """Seconds of a step, and of the upload of its masks."""

    rows: int
    vocab: int
    allowed: float
    kernel: float
    upload: float

    def line(self, itemsize: int) -> str:
        moved = self.rows * self.vocab * (1 / 8 + 2 * itemsize * (1 - self.allowed))
        share = f"{moved / SPEED / self.kernel:.0%}"
        cells = [str(self.rows), str(self.vocab), f"{self.allowed:.0%}", f"{self.kernel * 1e6:,.1f}", share]
        return "| " + " | ".join([*cells, f"{self.upload * 1e6:,.1f}"]) + " |"


def measure(rows: int, vocab: int, allowed: float, dtype: torch.dtype, timer: GpuTimer) -> Row:
    """Check a row against the reference, then time a step."""
    copies = max(1, min(8, SOME_BYTES // (rows * vocab * dtype.itemsize)))
    logits = [torch.randn(rows, vocab, device="cuda").to(dtype) for _ in range(copies)]
    words = -(torch.rand(rows, -(-vocab // 32)) < allowed).int()
    host, masks, every = words.pin_memory(), words.cuda(), torch.arange(rows, device="cuda")
    first = logits[0][:1].clone()
    mask_tokens_(first, masks[:1], every[:1])
    expected = token_mask_reference(logits[0][:1].cpu(), words[:1], every[:1].cpu())
    assert torch.equal(first.cpu(), expected), "the kernel differs from the reference"
    kernel = timer.replayed([partial(mask_tokens_, each, masks, every) for each in logits]) / copies
    upload = timer.replayed([partial(masks.copy_, host, non_blocking=True)])
    return Row(rows, vocab, allowed, kernel, upload)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 64, 256])
    parser.add_argument("--vocab", type=int, nargs="+", default=[128256, 151936])
    parser.add_argument("--dtype", default="bfloat16", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--json", type=Path, help="file for the figures")
    args = parser.parse_args()
    timer, dtype = GpuTimer(args.repeats), getattr(torch, args.dtype)
    print(f"{machine()}, clocks {clocks()}\n{args.dtype}\n")
    print("| rows | vocab | allowed | µs | of memory | upload µs |\n|" + " ---: |" * 6)
    results = []
    for vocab in args.vocab:
        for rows in args.rows:
            for allowed in SHARES:
                results.append(measure(rows, vocab, allowed, dtype, timer))
                print(results[-1].line(dtype.itemsize), flush=True)
    if args.json is not None:
        args.json.write_text(json.dumps({"machine": machine(), "rows": [asdict(row) for row in results]}, indent=2))


if __name__ == "__main__":
    main()
