"""Time sums over ranks and what follows them: microseconds a call in a CUDA graph of 64 calls, beside NCCL.

    python kernels/benchmarks/all_reduce.py [--ranks 2] [--rows 1 4 ...] [--hidden 4096 8192] [--vocab 128256]

One process a GPU. Each figure is the slowest rank's median. `one` and `two` are the steps of our kernels, `nccl` the
collective, with `add_rms_norm` or `delayed_norm` behind it where there is a norm. Results are checked first. With these
`Bounds` are chosen: the rows from which on two steps, and then NCCL, are faster.
"""

import argparse
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from bladellm_kernels.all_reduce import AllReduce, Bounds, all_reduce_reference
from gpu_timing import GpuTimer, machine

CALLS, EPS, PLENTY = 64, 1e-5, 256 << 20
WAYS = {"one": Bounds(PLENTY, 0), "two": Bounds(0, PLENTY), "nccl": Bounds(0, 0)}


class SlowestRank(GpuTimer):
    """Graphs captured beside NCCL's threads, which look at events meanwhile."""

    def call(self, work: Callable[[], object]) -> float:
        """Seconds of one call among CALLS of a graph, of the slowest rank."""
        side, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
        with torch.cuda.stream(side):
            work()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            for _ in range(CALLS):
                work()
        dist.barrier()
        seconds = torch.tensor(self._spaced(graph.replay) / CALLS, device="cuda")
        dist.all_reduce(seconds, dist.ReduceOp.MAX)
        return float(seconds)


def check(group: AllReduce, rows: int, hidden: int, device: torch.device) -> None:
    y = torch.randn(rows, hidden, device=device).bfloat16()
    parts = [torch.empty_like(y) for _ in range(group.size)]
    dist.all_gather(parts, y)
    expected = all_reduce_reference(parts)
    error = (group.all_reduce(y).float() - expected).abs().amax() / expected.abs().amax()
    if not float(error) <= 0.02:
        raise AssertionError(f"{rows} rows of {hidden}: off by {float(error)}")


def sums_row(groups: dict[str, AllReduce], rows: int, hidden: int, timer: SlowestRank, device: torch.device) -> str:
    """Zeros, since sums in place would grow without end; the time does not depend on the numbers."""
    y, residual = (torch.zeros(rows, hidden, dtype=torch.bfloat16, device=device) for _ in range(2))
    weight = torch.ones(hidden, dtype=torch.bfloat16, device=device)
    cells = [str(rows), str(hidden)]
    for what in ("all_reduce", "add_norm", "add_delayed_norm"):
        for name, group in groups.items():
            if rows > group.fast_rows and name != "nccl":
                cells.append("")
                continue
            check(group, rows, hidden, device)
            more = () if what == "all_reduce" else (residual, weight, EPS)
            call = getattr(group, what)
            cells.append(f"{timer.call(lambda call=call, more=more: call(y, *more)) * 1e6:.2f}")
    return "| " + " | ".join(cells) + " |"


def gather_row(groups: dict[str, AllReduce], rows: int, vocab: int, timer: SlowestRank, device: torch.device) -> str:
    x = torch.randn(rows, vocab // dist.get_world_size(), device=device)
    cells = [f"{timer.call(lambda group=group: group.all_gather_last(x)) * 1e6:.2f}" for group in groups.values()]
    return "| " + " | ".join([str(rows), str(vocab), *cells]) + " |"


def say(line: str) -> None:
    if dist.get_rank() == 0:
        print(line, flush=True)


def run(rank: int, args: argparse.Namespace, meet: str) -> None:
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", init_method=meet, rank=rank, world_size=args.ranks, device_id=device)
    timer, most = SlowestRank(args.repeats), max(args.rows)
    say(", ".join(f"{name} {value}" for name, value in machine().items()) + f", {args.ranks} ranks\n")
    titles = [f"{what} {way}" for what in ("all_reduce", "add_norm", "delayed") for way in WAYS]
    say(f"| rows | hidden | {' | '.join(titles)} |\n|" + " ---: |" * (2 + len(titles)))
    with torch.inference_mode():
        for hidden in args.hidden:
            groups = {
                name: AllReduce(
                    dist.group.WORLD, rows=most, hidden=hidden, dtype=torch.bfloat16, device=device, bounds=bounds
                )
                for name, bounds in WAYS.items()
            }
            for rows in args.rows:
                say(sums_row(groups, rows, hidden, timer, device))
        say("\n| rows | columns | all_gather_last | nccl |\n| ---: | ---: | ---: | ---: |")
        columns = args.vocab // args.ranks
        groups = {
            name: AllReduce(
                dist.group.WORLD, rows=most, hidden=64, dtype=torch.float32, device=device,
                gather_rows=most, gather_columns=columns, bounds=bounds,
            )
            for name, bounds in (("one", WAYS["one"]), ("nccl", WAYS["nccl"]))
        }  # fmt: skip
        for rows in args.rows:
            say(gather_row(groups, rows, args.vocab, timer, device))
    torch.cuda.synchronize()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64, 128, 256])
    parser.add_argument("--hidden", type=int, nargs="+", default=[4096, 8192])
    parser.add_argument("--vocab", type=int, default=128256)
    parser.add_argument("--repeats", type=int, default=20)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        meet = f"file://{Path(folder) / 'meet'}"
        torch.multiprocessing.spawn(run, (args, meet), nprocs=args.ranks)  # type: ignore[no-untyped-call]


if __name__ == "__main__":
    main()
