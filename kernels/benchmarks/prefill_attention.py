"""Time ragged prefill attention beside torch's attention on plain tensors.

python kernels/benchmarks/prefill_attention.py [--heads 32x8x128] [--cases 8192 2048+5000 512,512,2048+8192]
                                               [--formats no_quant int8] [--ways operator triton] [--captured 16]

A case is a batch of chunks, QUERIES or QUERIES+PREFIX each. 100 % is the better of the cuDNN and the flash back end of
`scaled_dot_product_attention` on a whole sequence of contiguous tensors, and for a prefix the same rate of operations
as that of the case's queries without mask against all its keys (`all keys` is the time of that); `masked` are these
back ends on what the case asks for, with a mask. Operations are those of the visible scores. With `--captured` a figure
is that of one of so many calls in a CUDA graph. Before a way is timed, some rows of its output, NaN until then, are
compared with attention in float32.
"""

import argparse
import json
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from bladellm_kernels import prefill_sdpa
from bladellm_kernels.kv_dequantize import dequantized_layers
from bladellm_kernels.kv_format import KV_FORMATS, KvFormat
from bladellm_kernels.kv_layer import KvLayer
from bladellm_kernels.kv_read import kv_read
from bladellm_kernels.listed_prefill_attention import (
    ListViews,
    fill_list,
    list_shape,
    list_views,
    listed_prefill_attention,
    one_pass_programs,
)
from bladellm_kernels.one_pass_gate import one_pass_takes
from bladellm_kernels.prefill_costs import SCRATCH_ELEMENTS
from bladellm_kernels.prefill_tiles import Span, TileShape
from bladellm_kernels.ragged_prefill_attention import ragged_prefill_attention, takes_kernels
from gpu_timing import capture
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

GRANULE = 512
CASES = [
    *("512", "777", "1000", "1024", "2048", "3000", "8191", "8192", "32768"),
    *(f"2048+{prefix}" for prefix in (2048, 5000, 8192, 32768, 131072)),
    *("1500+5000", "300+777", "64+8192", "64+131072", "512,512,512,512", "100,700+300,1200+3000,64+9000"),
]
BACKENDS = {"cuDNN": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}


@dataclass(frozen=True, slots=True)
class Result:
    """One measurement: microseconds, TFLOP/s of visible scores, share of the better library rate, seconds of the first
    call (plans, compilation, the check)."""

    heads: str
    case: str
    name: str
    microseconds: float
    tflops: float
    share: float
    first_seconds: float


@dataclass(frozen=True, slots=True)
class Setting:
    heads: tuple[int, int, int]
    dtype: torch.dtype
    device: str
    repeats: int
    layers: int
    captured: int

    def seconds(self, work: Callable[[], object]) -> tuple[float, float]:
        """(least of several runs, first run)."""
        first = self._once(work)
        if not self.captured:
            return min(self._once(work) for _ in range(self.repeats)), first
        replay = capture([work] * self.captured).replay
        return min(self._once(replay) for _ in range(self.repeats)) / self.captured, first

    def _once(self, work: Callable[[], object]) -> float:
        if self.device == "cpu":
            start = time.perf_counter()
            work()
            return time.perf_counter() - start
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        # The queue is kept full, so that the device is timed and not the host.
        torch.cuda._sleep(2_000_000)
        begin.record()
        work()
        end.record()
        torch.cuda.synchronize()
        return float(begin.elapsed_time(end)) / 1e3


def parse_case(case: str) -> list[Span]:
    """Chunks one behind the other, in memory and in the batch."""
    spans: list[Span] = []
    first = base = 0
    for slot, text in enumerate(case.split(",")):
        query_len, _, start = text.partition("+")
        spans.append(Span(first, int(query_len), int(start or 0), base, slot))
        first += int(query_len)
        base += -(-(int(query_len) + int(start or 0)) // GRANULE) * GRANULE
    return spans


def operations(spans: list[Span], heads: tuple[int, int, int]) -> float:
    scores = sum(span.query_len * span.start + span.query_len * (span.query_len + 1) / 2 for span in spans)
    return 4 * heads[0] * heads[2] * scores


def memory(setting: Setting, format: KvFormat, spans: list[Span], paged: bool) -> KvLayer:
    """One layer of a group of `layers` interleaved ones, with codes and scales of magnitude 1."""
    _, kv_heads, head_dim = setting.heads
    ends = [span.base_row + span.start + span.query_len for span in spans]
    granules = -(-max(ends) // GRANULE)
    shape = (granules * GRANULE, setting.layers, kv_heads, 2, format.width(head_dim))
    stored = format.dtype(setting.dtype)
    if stored.is_floating_point:
        payload = torch.randn(shape, device=setting.device, dtype=setting.dtype).to(stored)
    else:
        payload = torch.randint(0, 256, shape, dtype=torch.uint8, device=setting.device).view(stored)
    longest = -(-max(span.start + span.query_len for span in spans) // GRANULE)
    table = torch.zeros(len(spans), longest, dtype=torch.int32)
    for span in spans:
        count = -(-(span.start + span.query_len) // GRANULE)
        table[span.slot, :count] = torch.arange(count) + span.base_row // GRANULE
    scale_shape = (granules, kv_heads, 2, format.planes, GRANULE)
    scales = torch.rand(scale_shape, device=setting.device).div(format.highest or 1).half()
    payload = payload[:, 0].transpose(1, 2)
    quantized = format.quantized
    return KvLayer(
        payload, format, GRANULE, table.to(setting.device), scales if quantized else None, paged=paged and not quantized
    )


def library_rate(setting: Setting, spans: list[Span]) -> dict[str, float]:
    """Operations a second of each back end, on plain tensors of the case's largest chunk."""
    heads, kv_heads, head_dim = setting.heads
    span = max(spans, key=lambda each: each.query_len * (each.start + each.query_len))
    total = span.start + span.query_len
    q = torch.randn(1, heads, span.query_len, head_dim, device=setting.device, dtype=setting.dtype)
    k, v = torch.randn(2, 1, kv_heads, total, head_dim, device=setting.device, dtype=setting.dtype).unbind(0)
    causal = span.start == 0
    done = operations([span], setting.heads) if causal else 4 * heads * head_dim * span.query_len * total
    grouped = heads != kv_heads
    rates: dict[str, float] = {}
    for name, backend in _backends(setting).items():
        with sdpa_kernel(backend):
            seconds, _ = setting.seconds(
                lambda: F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=grouped)
            )
        rates[name] = done / seconds
    if causal:
        return rates
    everything = operations([span], setting.heads) * max(rates.values()) / done
    return rates | {"all keys": everything} | _masked_rates(setting, span, q, k, v)


def _backends(setting: Setting) -> dict[str, SDPBackend]:
    return BACKENDS if setting.device == "cuda" else {"math": SDPBackend.MATH}


def _masked_rates(setting: Setting, span: Span, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> dict[str, float]:
    """The same of a chunk behind a prefix as it is: flash attention's own mask of the lower right corner, and for the
    others one in memory."""
    done, group = operations([span], setting.heads), q.shape[1] // k.shape[1]
    keys, values = (each.repeat_interleave(group, 1) for each in (k, v))
    corner = causal_lower_right(span.query_len, k.shape[2])
    ones = torch.ones(span.query_len, k.shape[2], dtype=torch.bool, device=q.device)
    rates: dict[str, float] = {}
    for name, backend in _backends(setting).items():
        mask = corner if name == "flash" else ones.tril(span.start)
        with sdpa_kernel(backend):
            seconds, _ = setting.seconds(partial(F.scaled_dot_product_attention, q, keys, values, attn_mask=mask))
        rates[f"{name}, masked"] = done / seconds
    return rates


def routes(
    setting: Setting, kv: KvLayer, q: torch.Tensor, spans: list[Span], out: torch.Tensor, tile: TileShape | None
) -> Iterator[tuple[str, Callable[[], object]]]:
    """(name, call) of what the operator chooses, and on CUDA of each of its ways; a call returns its result, or None
    where that is in `out`."""
    scale = setting.heads[2] ** -0.5
    yield "operator", lambda: ragged_prefill_attention(q, kv, spans, scale)
    yield "operator, out=", lambda: ragged_prefill_attention(q, kv, spans, scale, out=out)
    if not takes_kernels(q, kv):
        return
    from bladellm_kernels.ragged_prefill_triton import launch

    yield "triton", lambda: launch(q, kv, spans, scale, None, out, tile)
    if kv.format.quantized:
        yield "triton on numbers", lambda: _launch_on_numbers(q, kv, spans, scale, out, tile)
    if q.dtype != torch.float32:
        for name, aside in (("cuDNN parts", True), ("cuDNN parts, one stream", False)):
            yield name, partial(_attend_by_parts, q, kv, spans, scale, out, aside)
    longest = max(span.start + span.query_len for span in spans)
    if one_pass_takes(q, kv, None, longest, out):
        from bladellm_kernels import one_pass_prefill

        yield "one pass", lambda: one_pass_prefill.launch(q, kv, spans, scale, out)
        yield "listed", partial(listed_prefill_attention, q, kv, _listed(q, kv, spans), scale, None, out)


def _listed(q: torch.Tensor, kv: KvLayer, spans: list[Span]) -> ListViews:
    """The chunks as captured steps have them."""
    programs = one_pass_programs(len(q), kv, q.dtype)
    shape = list_shape(len(q), len(spans), prefill_sdpa.layer_heads(q, kv), q.dtype, programs)
    numbers = np.zeros(shape.numbers, np.int64)
    assert fill_list(spans, None, shape, numbers)
    return list_views(torch.from_numpy(numbers).to(q.device), shape)


def _launch_on_numbers(
    q: torch.Tensor,
    kv: KvLayer,
    spans: list[Span],
    scale: float,
    out: torch.Tensor,
    tile: TileShape | None,
) -> None:
    from bladellm_kernels.ragged_prefill_triton import launch

    for plain, moved in dequantized_layers(kv, spans, None, q.dtype, SCRATCH_ELEMENTS):
        launch(q, plain, moved, scale, None, out, tile)


def _attend_by_parts(
    q: torch.Tensor, kv: KvLayer, spans: list[Span], scale: float, out: torch.Tensor, aside: bool
) -> torch.Tensor | None:
    for span in spans:
        result = prefill_sdpa.attend_chunk(q, kv, span, scale, None if len(spans) == 1 else out, aside=aside)
    return result if len(spans) == 1 else None


def check(q: torch.Tensor, kv: KvLayer, spans: list[Span], scale: float, result: torch.Tensor) -> None:
    """Raise `AssertionError` where sampled rows of a result are not those of attention in float32."""
    group = q.shape[1] // kv.kv_heads
    for span in spans:
        rows = torch.tensor(sorted({0, span.query_len - 1, *range(0, span.query_len, max(1, span.query_len // 30))}))
        rows = rows.to(q.device)
        stored = kv_read(kv, span.base_row, span.slot, 0, span.start + span.query_len, torch.float32)
        keys, values = (each.repeat_interleave(group, 1) for each in stored.unbind(1))
        scores = torch.einsum("nhd,mhd->hnm", q[span.first + rows].float(), keys) * scale
        hidden = torch.arange(len(keys), device=q.device) > span.start + rows[:, None]
        expected = torch.einsum("hnm,mhd->nhd", scores.masked_fill(hidden, -math.inf).softmax(-1), values)
        torch.testing.assert_close(result[span.first + rows].float(), expected, atol=2e-2, rtol=2e-2)


def measure(
    setting: Setting, case: str, formats: list[str], paged: bool, tile: TileShape | None, ways: list[str] | None
) -> Iterator[Result]:
    heads, _, head_dim = setting.heads
    spans, label = parse_case(case), "x".join(map(str, setting.heads))
    done = operations(spans, setting.heads)
    rates = library_rate(setting, spans)
    best = max(rates[name] for name in _backends(setting))
    for name, rate in rates.items():
        yield Result(label, case, f"torch {name}", done / rate * 1e6, rate / 1e12, rate / best, 0.0)
    tokens = sum(span.query_len for span in spans)
    q = prefill_sdpa.empty_queries((tokens, heads, head_dim), setting.dtype, torch.device(setting.device)).normal_()
    for format in formats:
        kv = memory(setting, KV_FORMATS[format], spans, paged)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        for name, work in routes(setting, kv, q, spans, out, tile):
            if ways and name not in ways:
                continue
            start = time.perf_counter()
            out.fill_(torch.nan)
            result = work()
            check(q, kv, spans, head_dim**-0.5, out if result is None else result)
            first = time.perf_counter() - start
            seconds, _ = setting.seconds(work)
            rate = done / seconds
            yield Result(label, case, f"{format} {name}", seconds * 1e6, rate / 1e12, rate / best, first)


def main(arguments: list[str] | None = None) -> None:
    parser = _arguments()
    args = parser.parse_args(arguments)
    if args.captured and args.device == "cpu":
        parser.error("--captured takes CUDA graphs, which --device cpu has none of")
    tile = TileShape(*map(int, args.tile.split("x"))) if args.tile else None
    if not args.json:
        device = torch.cuda.get_device_name() if args.device == "cuda" else "CPU"
        print(f"{device}, torch {torch.__version__}, {args.dtype}\n")
        print("| heads | case | | µs | TFLOP/s | share | first call, ms |\n| --- | --- | --- | --- | --- | --- | --- |")
    for heads in args.heads:
        query_heads, kv_heads, head_dim = map(int, heads.split("x"))
        setting = Setting(
            heads=(query_heads, kv_heads, head_dim), dtype=getattr(torch, args.dtype), device=args.device,
            repeats=args.repeats, layers=args.layers, captured=args.captured,
        )  # fmt: skip
        for case in args.cases:
            for each in measure(setting, case, args.formats, args.paged, tile, args.ways):
                print(json.dumps(asdict(each)) if args.json else _line(each), flush=True)


def _line(result: Result) -> str:
    figures = (
        f"{result.microseconds:,.1f} | {result.tflops:.1f} | {result.share:.1%} | {result.first_seconds * 1e3:.0f}"
    )
    return f"| {result.heads} | {result.case} | {result.name} | {figures} |"


def _arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cpu", "cuda"))
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    parser.add_argument("--heads", nargs="+", default=["32x8x128", "40x40x128"], help="query heads x KV heads x dim")
    parser.add_argument("--cases", nargs="+", default=CASES, help="QUERIES[+PREFIX][,...]")
    parser.add_argument("--formats", nargs="+", default=["no_quant"], choices=KV_FORMATS)
    parser.add_argument("--paged", action="store_true", help="paged memory for the unquantized format")
    parser.add_argument("--layers", type=int, default=4, help="layers interleaved in a row of memory")
    parser.add_argument("--tile", help="ROWSxKEYSxWARPSxSTAGES of the Triton kernel")
    parser.add_argument("--ways", nargs="+", help="only these, by their names in the table")
    parser.add_argument("--repeats", type=int, default=20, help="timed runs, of which the least counts")
    parser.add_argument("--captured", type=int, default=0, help="calls in a CUDA graph, of which one is timed")
    parser.add_argument("--json", action="store_true", help="a line of JSON a measurement")
    return parser


if __name__ == "__main__":
    main()
