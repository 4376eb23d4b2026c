"""Time `rotary_kv_write` beside the operators it fuses: microseconds and GB/s by format and number of tokens.

python kernels/benchmarks/kv_write.py [--device cuda] [--tokens 1 64 8192] [--format int8 int4] [--json FILE]

GB/s count q, k, v, both tables and everything written, once each; `of copy` is their share of what a plain copy of
256 MiB reaches here. On CUDA calls are captured in graphs, so that the host's time does not count.
"""

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
from bladellm_kernels.hadamard import hadamard, hadamard_matrix
from bladellm_kernels.kv_format import KV_FORMATS, KvFormat
from bladellm_kernels.kv_layer import KvLayer
from bladellm_kernels.kv_write import kv_write, kv_write_by_operators
from bladellm_kernels.rotary import rotary, rotary_tables
from bladellm_kernels.rotary_kv_write import rotary_kv_write

GRANULE_TOKENS = 64


@dataclass(frozen=True, slots=True)
class Heads:
    query: int
    kv: int
    dim: int
    dtype: torch.dtype
    device: torch.device


@dataclass(frozen=True, slots=True)
class Inputs:
    """One step's tensors: q, k and v are views of one qkv; a layer's rows lie among those of other layers."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor
    kv: KvLayer
    rows: torch.Tensor
    matrix: torch.Tensor | None

    @property
    def moved(self) -> int:
        """Bytes read and written: q twice, k and v, tables, payload, scales."""
        tokens = len(self.rows)
        payload = self.kv.payload[0].numel() * self.kv.payload.element_size()
        scales = 0 if self.kv.scales is None else self.kv.scales[0, ..., 0].numel() * 2
        vectors = 2 * self.q.nbytes + self.k.nbytes + self.v.nbytes
        return vectors + self.cos.nbytes + self.sin.nbytes + tokens * (payload + scales)


@dataclass(frozen=True, slots=True)
class Row:
    """Seconds: of the fused operator, of its parts in plain PyTorch, and of `kv_write` alone."""

    format: str
    rotate: bool
    tokens: int
    fused: float
    parts: float
    write: float
    moved: int


def inputs(heads: Heads, format: KvFormat, tokens: int, rotate: bool) -> Inputs:
    device, dim = heads.device, heads.dim
    granules = -(-tokens // GRANULE_TOKENS) + 1
    rows = torch.randperm(granules * GRANULE_TOKENS, device=device)[:tokens].sort().values
    qkv = torch.randn(tokens, heads.query + 2 * heads.kv, dim, device=device).to(heads.dtype)
    frequencies = torch.rand(dim // 2, device=device)
    cos, sin = rotary_tables(torch.arange(tokens, device=device), frequencies, 1.0)
    shape = (granules * GRANULE_TOKENS, 4, heads.kv, 2, format.width(dim))
    payload = torch.zeros(shape, dtype=format.dtype(heads.dtype), device=device)[:, 1].transpose(1, 2)
    scales = None
    if format.planes:
        scales = torch.zeros(granules, heads.kv, 2, format.planes, GRANULE_TOKENS, dtype=torch.float16, device=device)
    kv = KvLayer(payload, format, GRANULE_TOKENS, None, scales)
    q, k, v = qkv.split((heads.query, heads.kv, heads.kv), 1)
    return Inputs(q, k, v, cos, sin, kv, rows, hadamard_matrix(dim, heads.dtype, device) if rotate else None)


def fused(given: Inputs, out: torch.Tensor, schedule: dict[str, int]) -> None:
    if not schedule:
        rotary_kv_write(
            given.q, given.k, given.v, given.cos, given.sin, given.kv, given.rows, given.rows,
            rotate=given.matrix, out=out,
        )  # fmt: skip
        return
    from bladellm_kernels.kv_write_triton import launch_rotary_kv_write

    launch_rotary_kv_write(
        given.q, given.k, given.v, None, given.cos, given.sin, given.kv, given.rows, given.rows, given.matrix, out,
        **schedule,
    )  # fmt: skip


def by_parts(given: Inputs, out: torch.Tensor) -> None:
    q, k = (rotary(x, given.cos, given.sin) for x in (given.q, given.k))
    if given.matrix is not None:
        q, k = hadamard(q, given.matrix), hadamard(k, given.matrix)
    kv_write_by_operators(given.kv, given.rows, k, given.v, given.rows)
    out.copy_(q)


def seconds(work: Callable[[], object], device: torch.device, budget: float) -> float:
    """Median of one call's times; on CUDA of replays of a graph of ten calls, divided by ten."""
    work()
    calls = 1
    if device.type == "cuda":
        calls, work = 10, _captured(work, 10)
    times: list[float] = []
    end = time.perf_counter() + budget
    while time.perf_counter() < end or len(times) < 5:
        _wait(device)
        start = time.perf_counter()
        for _ in range(1 if device.type == "cpu" else 20):
            work()
        _wait(device)
        times.append((time.perf_counter() - start) / (1 if device.type == "cpu" else 20))
    return statistics.median(times) / calls


def _captured(work: Callable[[], object], calls: int) -> Callable[[], object]:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            work()
    return graph.replay


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def copy_speed(device: torch.device, budget: float) -> float:
    """Bytes a second, read and written, of a plain copy."""
    size = 2**28 if device.type == "cuda" else 2**24
    source, target = (torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(2))
    return 2 * size / seconds(lambda: target.copy_(source), device, budget)


def measure(heads: Heads, name: str, rotate: bool, tokens: int, budget: float, schedule: dict[str, int]) -> Row:
    given = inputs(heads, KV_FORMATS[name], tokens, rotate)
    out = torch.empty(given.q.shape, dtype=given.q.dtype, device=given.q.device)
    works: tuple[Callable[[], object], ...] = (
        partial(fused, given, out, schedule),
        partial(by_parts, given, out),
        lambda: kv_write(given.kv, given.rows, given.k, given.v, given.rows),
    )
    fused_time, parts, write = (seconds(work, heads.device, budget) for work in works)
    return Row(name, rotate, tokens, fused_time, parts, write, given.moved)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 64, 256, 2048, 8192])
    parser.add_argument("--format", nargs="+", default=list(KV_FORMATS), choices=list(KV_FORMATS))
    parser.add_argument("--rotate", action="store_true", help="with the Hadamard rotation too")
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv_heads", type=int, default=8)
    parser.add_argument("--head_dim", type=int, default=128)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--seconds", type=float, default=0.05, help="for each figure")
    parser.add_argument("--tile", type=int, help="numbers of a half that a program of the kernel holds")
    parser.add_argument("--warps", type=int, help="of a program of the kernel")
    parser.add_argument("--json", type=Path, help="file for the figures")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    device = torch.device(args.device)
    heads = Heads(args.heads, args.kv_heads, args.head_dim, getattr(torch, args.dtype), device)
    schedule = {name: value for name in ("tile", "warps") if (value := getattr(args, name)) is not None}
    copy = copy_speed(device, args.seconds)
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    print(f"{where}, torch {torch.__version__}; copy {copy / 1e9:,.0f} GB/s\n")
    print("| format | tokens | fused µs | GB/s | of copy | parts µs | faster | kv_write µs |\n| --- |" + " ---: |" * 7)
    rows: list[Row] = []
    for name in args.format:
        for rotate in (False, True) if args.rotate else (False,):
            for tokens in args.tokens:
                row = measure(heads, name, rotate, tokens, args.seconds, schedule)
                rows.append(row)
                speed = row.moved / row.fused
                cells = [
                    name + (" rotated" if rotate else ""), str(tokens), f"{row.fused * 1e6:,.1f}",
                    f"{speed / 1e9:,.1f}", f"{speed / copy:.0%}", f"{row.parts * 1e6:,.1f}",
                    f"{row.parts / row.fused:.1f}", f"{row.write * 1e6:,.1f}",
                ]  # fmt: skip
                print("| " + " | ".join(cells) + " |", flush=True)
    if args.json is not None:
        figures = {"device": where, "copy_bytes_per_second": copy, "rows": [asdict(row) for row in rows]}
        args.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
