"""Time `ragged_decode_attention` beside a kernel that only reads the same bytes, and beside PyTorch's attention.

python kernels/benchmarks/decode_attention.py [--heads 32/8/128] [--sizes 32x4096 mix] [--formats int8] [--layers 1 8]
    [--schedules 64,4,4,2 64,4,4,2,0] [--variants late apart] [--paged] [--compare] [--json FILE] [--device cpu]

Each figure is the time of one layer's attention, split sequences merged, in a replayed CUDA graph; the plan that all
layers of a step share is timed by itself (`plan us`). TB/s counts the stored keys, values and scales that are read;
`share` is that of what the reading kernel reaches on the same payload. Where it fits, memory rotates past the L2 cache.
Results are compared with the reference before anything is timed. Calls follow one another, and may start while the one
before ends; in the variant `apart` they do not.
"""

import argparse
import json
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import pairwise, product
from pathlib import Path
from unittest.mock import patch

import torch
import torch.nn.functional as F
from bladellm_kernels.decode_schedule import (
    DecodeSchedule,
    DecodeSetting,
    default_schedule,
    is_long,
    row_tile,
    short_tokens,
)
from bladellm_kernels.decode_work import DecodeWork, DecodeWorkspace
from bladellm_kernels.has_triton import has_triton
from bladellm_kernels.hopper_device import is_hopper
from bladellm_kernels.kv_format import KV_FORMATS
from bladellm_kernels.ragged_decode_attention import ragged_decode_attention, ragged_decode_attention_reference
from decode_problem import LEAST_CALLS, Inputs, Problem, lengths, make_inputs

HEADS = ("32/8/128", "40/40/128")
SIZES = ("1x4096", "1x70000", "1x280000", "32x4096", "64x1024", "256x1024", "8x32768", "mix")
SMALL_SIZES = ("2x40", "mix")
MEMORY_SHARE = 0.85
TOLERANCE = 0.02
"""Error of an output beside the largest one."""


@dataclass(frozen=True, slots=True)
class Result:
    heads: str
    size: str
    format: str
    layers: int
    paged: bool
    schedule: str
    variant: str
    us: float
    plan_us: float
    tb_s: float
    ceiling_tb_s: float
    share: float
    torch_us: float | None


def seconds(work: Callable[[], object], calls: int, device: torch.device, repeats: int) -> float:
    """Median seconds of one of the `calls` calls that `work` makes; on CUDA of a graph's replays."""
    work()
    if device.type != "cuda":
        times = []
        for _ in range(repeats):
            start = time.perf_counter()
            work()
            times.append(time.perf_counter() - start)
        return sorted(times)[repeats // 2] / calls
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        work()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    for _ in range(3):
        graph.replay()
    for event in events:
        event.record()
        graph.replay()
    torch.cuda.synchronize()
    times = [first.elapsed_time(last) / 1e3 for first, last in pairwise(events)]
    return sorted(times)[repeats // 2] / calls


def attend(
    problem: Problem, inputs: Inputs, work: DecodeWork | None, between: Callable[[], object] = int
) -> Callable[[], None]:
    """The calls of a problem, `between` after each."""
    longest, scale = max(problem.lens), problem.head_dim**-0.5

    def calls() -> None:
        for kv in inputs.kv:
            ragged_decode_attention(
                inputs.q, kv, inputs.base_rows, inputs.slots, inputs.kv_lens, longest, scale, work=work, out=inputs.out
            )
            between()

    return calls


def ceiling(problem: Problem, inputs: Inputs, device: torch.device, repeats: int) -> float:
    """Bytes a second of reading the payload's rows and nothing else."""
    rows = sum(problem.lens)
    memories = [kv.payload.transpose(1, 2)[:rows].view(torch.int8).flatten(1) for kv in inputs.kv]

    def timed(read: Callable[[torch.Tensor], object]) -> float:
        return seconds(lambda: [read(memory) for memory in memories], problem.calls, device, repeats)

    if device.type != "cuda":
        return problem.payload_bytes / timed(torch.sum)
    from read_rows import read_rows

    return problem.payload_bytes / min(timed(partial(read_rows, tile=tile)) for tile in (8192, 16384, 32768))


def torch_seconds(problem: Problem, device: torch.device, repeats: int) -> float | None:
    """PyTorch's attention on contiguous unquantized KV of its own; None for lengths that differ."""
    if len(set(problem.lens)) > 1 or problem.format.quantized:
        return None
    batch, tokens = len(problem.lens), problem.lens[0]
    calls = max(1, min(problem.calls, int(16e9 // problem.payload_bytes)))
    shape = (calls, 2, batch, problem.kv_heads, tokens, problem.head_dim)
    kv = torch.randn(shape, dtype=problem.dtype, device=device)
    q = torch.randn(batch, problem.heads, 1, problem.head_dim, dtype=problem.dtype, device=device)

    def work() -> None:
        for k, v in kv:
            F.scaled_dot_product_attention(q, k, v, enable_gqa=True)

    return seconds(work, calls, device, repeats)


def measure(
    problem: Problem,
    names: tuple[str, str],
    schedules: list[DecodeSchedule],
    arguments: argparse.Namespace,
) -> list[Result]:
    """One problem under every schedule, in every variant."""
    device = torch.device(arguments.device)
    inputs = make_inputs(problem, device)
    reached = ceiling(problem, inputs, device, arguments.repeats)
    theirs = torch_seconds(problem, device, arguments.repeats) if arguments.compare else None
    expected = reference(problem, inputs) if arguments.check else None
    results = []
    rows = row_tile(problem.heads // problem.kv_heads, problem.head_dim, problem.dtype)
    shape = (problem.head_dim, problem.format, problem.dtype, rows, len(problem.lens))
    specialized = is_hopper(device) and not problem.paged
    long = is_long(len(problem.lens), sum(problem.lens), short_tokens(problem.kv_heads))
    setting = DecodeSetting(long=long)
    own = default_schedule(*shape, setting, specialized, problem.kv_heads)
    plans = schedules or [own]
    for schedule, variant in product(plans, arguments.variants):
        label = ",".join(str(value) for value in asdict(schedule).values())
        try:
            with varied(variant):
                checked = None if variant == "unmerged" else expected
                timed = (problem, inputs, schedule, checked, variant == "apart", arguments.repeats)
                taken, plan_seconds = scheduled_seconds(*timed)
        except failures() as error:
            print(f"{names[0]:>10} {names[1]:>9} {problem.format.name:>12} {label:>23} {first_line(error)}", flush=True)
            continue
        rate = problem.read_bytes / taken
        result = Result(
            *names, problem.format.name, problem.layers, problem.paged, label, variant, taken * 1e6,
            plan_seconds * 1e6, rate / 1e12, reached / 1e12, rate / reached, None if theirs is None else theirs * 1e6,
        )  # fmt: skip
        print(line(result), flush=True)
        results.append(result)
    return results


@contextmanager
def varied(variant: str) -> Iterator[None]:
    """The kernels `as_is`, `apart`, `late` (no kernel starts before the one ahead has ended), or `unmerged`, to know
    what the merges of a kernel behind take."""
    if variant in ("as_is", "apart"):
        yield
        return
    from bladellm_kernels import merge_attention_triton, ragged_decode_triton, ring_decode, warp_rings

    with ExitStack() as patches:
        if variant == "unmerged":
            patches.enter_context(patch.object(ragged_decode_triton, "merge_segments", lambda *given: None))
        else:
            for module in (merge_attention_triton, ragged_decode_triton, ring_decode, warp_rings):
                patches.enter_context(patch.object(module, "early_launch", lambda device: {"EARLY": False}))
        yield


def reference(problem: Problem, inputs: Inputs) -> torch.Tensor:
    """What the first call must return, in float32."""
    memory = (inputs.q, inputs.kv[0], inputs.base_rows, inputs.slots, inputs.kv_lens)
    return ragged_decode_attention_reference(*memory, problem.head_dim**-0.5)


def check(problem: Problem, inputs: Inputs, work: DecodeWork | None, expected: torch.Tensor | None) -> None:
    """RuntimeError unless the first call returns what is expected."""
    if expected is None:
        return
    inputs.out.fill_(torch.nan)
    attend(problem, replace(inputs, kv=inputs.kv[:1]), work)()
    error = float((inputs.out.float() - expected).abs().max() / expected.abs().max())
    if not error < TOLERANCE:
        raise RuntimeError(f"wrong by {error:.2g} of the largest output")


def scheduled_seconds(
    problem: Problem,
    inputs: Inputs,
    schedule: DecodeSchedule,
    expected: torch.Tensor | None,
    apart: bool,
    repeats: int,
) -> tuple[float, float]:
    """Seconds of a layer's attention, and of the plan of a step.

    apart: no call of attention starts while the one before it ends: small kernels lie between, their time taken off.
    """
    device = inputs.q.device
    if device.type != "cuda":
        check(problem, inputs, None, expected)
        return seconds(attend(problem, inputs, None), problem.calls, device, repeats), 0.0
    workspace = DecodeWorkspace(
        device, len(problem.lens), problem.heads, problem.kv_heads, problem.head_dim, 1,
        problem.format, problem.dtype, schedule,
    )  # fmt: skip
    work = workspace.plan(inputs.kv_lens)
    check(problem, inputs, work, expected)
    plans = [partial(workspace.plan, inputs.kv_lens)] * LEAST_CALLS
    plan_seconds = seconds(lambda: [plan() for plan in plans], len(plans), device, repeats)
    if not apart:
        return seconds(attend(problem, inputs, work), problem.calls, device, repeats), plan_seconds
    between = torch.zeros(1, device=device).zero_
    taken = seconds(attend(problem, inputs, work, between), problem.calls, device, repeats)
    return taken - seconds(lambda: [between() for _ in inputs.kv], problem.calls, device, repeats), plan_seconds


def failures() -> tuple[type[Exception], ...]:
    """What a schedule that does not compile, or does not fit, raises."""
    if not has_triton():
        return (RuntimeError,)
    from triton.compiler.errors import CompilationError
    from triton.runtime.errors import OutOfResources, PTXASError

    return RuntimeError, CompilationError, OutOfResources, PTXASError


def first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"


def line(result: Result) -> str:
    theirs = "-" if result.torch_us is None else f"{result.torch_us:.1f}"
    layout = f"{result.layers}{' paged' if result.paged else ''}"
    return (
        f"{result.heads:>10} {result.size:>9} {result.format:>12} {layout:>9} {result.schedule:>13} "
        f"{result.variant:>9} {result.us:10.1f} "
        f"{result.plan_us:8.1f} {result.tb_s:7.3f} {result.ceiling_tb_s:8.3f} {result.share:6.1%} {theirs:>9}"
    )


def problems(arguments: argparse.Namespace) -> list[tuple[Problem, tuple[str, str]]]:
    dtype = getattr(torch, arguments.dtype)
    sizes = arguments.sizes or (SIZES if arguments.device != "cpu" else SMALL_SIZES)
    found = []
    for heads in arguments.heads:
        query_heads, kv_heads, head_dim = (int(part) for part in heads.split("/"))
        for size in sizes:
            lens = lengths(size if size != "mix" or arguments.device != "cpu" else "mix64")
            for name in arguments.formats:
                for layers in arguments.layers:
                    for paged in (False, True) if arguments.paged else (False,):
                        granule = 16 if paged else arguments.granule_tokens
                        shape = (query_heads, kv_heads, head_dim, lens, KV_FORMATS[name], dtype, layers, granule, paged)
                        found.append((Problem(*shape), (heads, size)))
    return found


def given_schedules(texts: list[str]) -> list[DecodeSchedule]:
    schedules = []
    for text in texts:
        try:
            schedules.append(DecodeSchedule(*(int(part) for part in text.split(","))))
        except ValueError as error:
            print(f"{text}: {error}")
    return schedules


def free_bytes(device: torch.device) -> float:
    return torch.cuda.get_device_properties(device).total_memory * MEMORY_SHARE if device.type == "cuda" else 4e9


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="bfloat16", help="the model's type")
    parser.add_argument("--heads", nargs="+", default=HEADS, help="query heads/KV heads/head dimension")
    parser.add_argument("--sizes", nargs="+", help="batch x tokens, batch x least-most, or mix")
    parser.add_argument("--formats", nargs="+", default=["no_quant"], choices=list(KV_FORMATS))
    parser.add_argument("--layers", nargs="+", type=int, default=[1], help="layers interleaved in a row of memory")
    parser.add_argument("--granule_tokens", type=int, default=256)
    parser.add_argument(
        "--schedules",
        nargs="+",
        default=[],
        help="fields of DecodeSchedule: block_kv,stages,warps,ctas_per_sm[,segment_blocks,idle_ns,stay_ns,"
        "warp_specialized,lane_heads,late,merge_beside,private_rings]",
    )
    parser.add_argument("--variants", nargs="+", default=["as_is"], choices=["as_is", "apart", "late", "unmerged"])
    parser.add_argument("--unchecked", dest="check", action="store_false", help="time without comparing results")
    parser.add_argument("--paged", action="store_true", help="also memory in pages of 16 tokens")
    parser.add_argument("--compare", action="store_true", help="also PyTorch's attention")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--json", type=Path, help="where to write the results")
    return parser.parse_args()


def main() -> None:
    arguments = parse()
    device = torch.device(arguments.device)
    schedules = given_schedules(arguments.schedules)
    print(
        f"{'heads':>10} {'size':>9} {'format':>12} {'layers':>9} {'schedule':>13} {'variant':>9} {'us':>10} "
        f"{'plan us':>8} {'TB/s':>7} {'ceiling':>8} {'share':>6} {'torch us':>9}"
    )
    results = []
    for problem, names in problems(arguments):
        if problem.memory_bytes > free_bytes(device):
            print(f"{names[0]:>10} {names[1]:>9} {problem.format.name:>12} {problem.layers:>9} does not fit")
            continue
        results += measure(problem, names, schedules, arguments)
    if arguments.json:
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
        text = {"device": name, "torch": torch.__version__, "results": [asdict(result) for result in results]}
        arguments.json.write_text(json.dumps(text, indent=1) + "\n")


if __name__ == "__main__":
    main()
