"""Time decode attention of sequences that share a beginning: read by each of them, and read once for a tile of rows.

python kernels/benchmarks/cascade_decode.py [--cases 64x2048+500 64x0+500] [--formats no_quant int8] [--repeats 20]

A case is SEQUENCESxSHARED+OWN tokens, of 32 query and 8 KV heads of 128. The memory is paged in granules of 256 tokens,
so that sequences can show the same granules. The calls of a graph take memories in turn that together are larger than
the L2 cache. `alone` reads the beginning for each sequence, from the L2 cache for all but one; a case that shares
nothing shows what the two kernels more cost. TB/s counts what is stored once.
"""

import argparse
import re
from collections.abc import Callable
from functools import partial

import torch
from bladellm_kernels.cascade_decode_attention import CascadeWorkspace, SharedPrefixes, cascade_decode_attention
from bladellm_kernels.decode_work import DecodeWorkspace
from bladellm_kernels.kv_format import KV_FORMATS
from bladellm_kernels.kv_layer import KvLayer
from bladellm_kernels.prefix_groups import PrefixGroup
from bladellm_kernels.ragged_decode_attention import ragged_decode_attention, ragged_decode_attention_reference
from decode_problem import Problem, random_memory, random_scales
from gpu_timing import GpuTimer

L2_BYTES = 60 * 2**20
GRANULE = 256
HEADS = (32, 8, 128)
TOLERANCE = 0.02
"""Error of an output beside the largest one."""


def shared_table(batch: int, shared: int, own: int) -> tuple[torch.Tensor, int]:
    """Granules that each sequence shows, in random order, and how many there are."""
    common, each = shared // GRANULE, -(-own // GRANULE)
    names = torch.randperm(common + batch * each).int()
    rows = names[common:].view(batch, each)
    return torch.cat((names[:common].expand(batch, common), rows), 1).cuda(), len(names)


def measure(case: str, format_name: str, timer: GpuTimer) -> list[str]:
    batch, shared, own = (int(number) for number in re.split(r"[x+]", case))
    table, granules = shared_table(batch, shared, own)
    heads, kv_heads, head_dim = HEADS
    problem = Problem(*HEADS, (granules * GRANULE,), KV_FORMATS[format_name], torch.bfloat16, 1, GRANULE, True)
    layers = [
        KvLayer(
            random_memory(problem, torch.device("cuda"))[:, 0].transpose(1, 2), problem.format, GRANULE, table,
            random_scales(problem, granules, torch.device("cuda")), True,
        )
        for _ in range(max(8, 2 + 2 * L2_BYTES // problem.payload_bytes))
    ]  # fmt: skip
    q = torch.randn(batch, heads, head_dim, device="cuda").bfloat16()
    slots = torch.arange(batch, device="cuda")
    lens = torch.full_like(slots, shared + own)
    memory = (slots, slots, lens)
    scale = head_dim**-0.5
    expected = ragged_decode_attention_reference(q, layers[0], *memory, scale)
    out = torch.empty_like(q)
    sizes = (torch.device("cuda"), batch, heads, kv_heads, head_dim)
    plain = DecodeWorkspace(*sizes, 1, problem.format).plan(lens)
    workspace = CascadeWorkspace(*sizes, problem.format)
    prefixes = SharedPrefixes(torch.device("cuda"), batch, workspace.members)
    prefixes.set([PrefixGroup(tuple(range(batch)), shared // GRANULE)] if shared else [], GRANULE)
    cascade = workspace.plan(prefixes, *memory)
    most = shared + own
    ways: dict[str, Callable[[KvLayer], object]] = {
        "alone": lambda kv: ragged_decode_attention(q, kv, *memory, most, scale, work=plain, out=out),
        "cascade": lambda kv: cascade_decode_attention(q, kv, *memory, scale, prefixes, cascade, out),
    }
    stored = ((shared + batch * own) * kv_heads * 2) * problem.payload_bytes // (granules * GRANULE * kv_heads * 2)
    lines = []
    for name, way in ways.items():
        out.fill_(torch.nan)
        way(layers[0])
        error = float((out.float() - expected).abs().max() / expected.abs().max())
        if not error < TOLERANCE:
            raise RuntimeError(f"{case} {format_name} {name}: wrong by {error:.2g} of the largest output")
        seconds = timer.replayed([partial(way, kv) for kv in layers]) / len(layers)
        lines.append(f"| {case} | {format_name} | {name} | {seconds * 1e6:.1f} | {stored / seconds / 1e12:.2f} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", default=["64x2048+500", "64x512+500", "16x2048+500", "64x0+500"])
    parser.add_argument("--formats", nargs="+", default=["no_quant", "int8"], choices=list(KV_FORMATS))
    parser.add_argument("--repeats", type=int, default=20)
    args = parser.parse_args()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}\n")
    print("| sequences x shared + own | format | beginning | µs | TB/s |\n| --- | --- | --- | --- | --- |")
    for case in args.cases:
        for name in args.formats:
            print("\n".join(measure(case, name, GpuTimer(args.repeats))), flush=True)


if __name__ == "__main__":
    main()
