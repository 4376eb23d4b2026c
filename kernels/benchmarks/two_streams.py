"""Whether decode attention and the products of prompts hide each other on a GPU: one stream or two, a captured graph.

    python kernels/benchmarks/two_streams.py [--rows 512] [--prompts 1536 3584] [--processors 132 66 44 33]

Layers of Llama-3.1-8B's shape: `rows` sequences of 512 to 768 tokens decode while so many prompt tokens go through the
same linear layers. Printed are all of it in one stream, as a step of the engine does it; decodes and prompts in a
stream each, attention's programs being those of fewer multiprocessors; and attention alone beside the prompts.
"""

import argparse
import random
from collections.abc import Callable
from itertools import pairwise
from unittest.mock import patch

import torch
from bladellm_kernels import decode_work
from bladellm_kernels.decode_work import DecodeWork, DecodeWorkspace
from bladellm_kernels.kv_format import NO_QUANT
from bladellm_kernels.linear import linear, linear_silu_mul
from bladellm_kernels.ragged_decode_attention import ragged_decode_attention
from bladellm_kernels.rms_norm import rms_norm
from decode_problem import Problem, make_inputs
from gpu_timing import machine
from torch import Tensor

LAYERS, HIDDEN, INNER, HEADS, KV_HEADS, DIM = 8, 4096, 14336, 32, 8, 128
EPS = 1e-5


class Layers:
    """Random weights, and KV of sequences that decode."""

    def __init__(self, rows: int) -> None:
        def weight(outputs: int, inputs: int) -> Tensor:
            return torch.randn(outputs, inputs, device="cuda").bfloat16() * inputs**-0.5

        shapes = {"qkv": (6144, HIDDEN), "o": (HIDDEN, HIDDEN), "gate_up": (2 * INNER, HIDDEN), "down": (HIDDEN, INNER)}
        self.weights = [{name: weight(*shape) for name, shape in shapes.items()} for _ in range(LAYERS)]
        self.norm = torch.ones(HIDDEN, device="cuda").bfloat16()
        lens = tuple(random.randint(512, 768) for _ in range(rows))
        problem = Problem(HEADS, KV_HEADS, DIM, lens, NO_QUANT, torch.bfloat16, LAYERS, 256, False)
        self.rows, self.longest, self.inputs = rows, max(lens), make_inputs(problem, torch.device("cuda"))

    def plan(self, processors: int) -> tuple[DecodeWorkspace, DecodeWork]:
        """Of attention by as many programs as so many multiprocessors hold."""
        with patch.object(decode_work, "multiprocessors", lambda device: processors):
            workspace = DecodeWorkspace(torch.device("cuda"), self.rows, HEADS, KV_HEADS, DIM, 1)
            return workspace, workspace.plan(self.inputs.kv_lens)

    def attend(self, layer: int, work: DecodeWork, q: Tensor, out: Tensor) -> None:
        given, shape = self.inputs, (self.rows, HEADS, DIM)
        ragged_decode_attention(
            q.reshape(shape), given.kv[layer], given.base_rows, given.slots, given.kv_lens, self.longest, DIM**-0.5,
            work=work, out=out.view(shape),
        )  # fmt: skip

    def attend_alone(self, work: DecodeWork) -> None:
        for layer in range(LAYERS):
            self.attend(layer, work, self.inputs.q, torch.empty_like(self.inputs.out))

    def step(self, x: Tensor, work: DecodeWork | None = None) -> None:
        """All layers; work: the first rows decode, of the others queries stand for attention."""
        normed = rms_norm(x, self.norm, EPS)
        for layer, weight in enumerate(self.weights):
            qkv = linear(normed, weight["qkv"])
            mixed = qkv[:, :HIDDEN].contiguous()
            if work is not None:
                self.attend(layer, work, qkv[: self.rows, :HIDDEN], mixed[: self.rows])
            linear(mixed, weight["o"], out=x, residual=x)
            inner = linear_silu_mul(rms_norm(x, self.norm, EPS), weight["gate_up"])
            linear(inner, weight["down"], out=x, residual=x)
            normed = rms_norm(x, self.norm, EPS)


def milliseconds(work: Callable[[], None], repeats: int = 7) -> float:
    """Median of a captured graph's replays."""
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 3)]
    for event in events:
        event.record()
        graph.replay()
    torch.cuda.synchronize()
    return sorted(first.elapsed_time(last) for first, last in list(pairwise(events))[2:])[repeats // 2]


def beside(first: Callable[[], None], second: Callable[[], None]) -> Callable[[], None]:
    """Both, in streams of which the first goes before the other."""
    streams = torch.cuda.Stream(priority=-1), torch.cuda.Stream()

    def work() -> None:
        own = torch.cuda.current_stream()
        for stream, part in zip(streams, (first, second), strict=True):
            stream.wait_stream(own)
            with torch.cuda.stream(stream):
                part()
        for stream in streams:
            own.wait_stream(stream)

    return work


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=512)
    parser.add_argument("--prompts", type=int, nargs="+", default=[1536, 3584])
    parser.add_argument("--processors", type=int, nargs="+", default=[132, 66, 44, 33])
    args = parser.parse_args()
    torch.manual_seed(0)
    random.seed(0)
    print(", ".join(f"{name}: {value}" for name, value in machine().items()), flush=True)
    layers = Layers(args.rows)
    plans = {count: layers.plan(count) for count in args.processors}
    for count, (_, work) in plans.items():
        print(f"attention alone, {count} multiprocessors: {milliseconds(lambda w=work: layers.attend_alone(w)):.3f} ms")
    full = plans[max(plans)][1]
    for tokens in args.prompts:
        decodes, prompts, both = (
            torch.randn(count, HIDDEN, device="cuda").bfloat16() for count in (args.rows, tokens, args.rows + tokens)
        )
        print(f"{tokens} prompt tokens, one stream: {milliseconds(lambda x=both: layers.step(x, full)):.3f} ms")
        print(f"{tokens} prompt tokens alone: {milliseconds(lambda x=prompts: layers.step(x)):.3f} ms", flush=True)
        for count, (_, work) in plans.items():
            two = beside(lambda x=decodes, w=work: layers.step(x, w), lambda x=prompts: layers.step(x))
            alone = beside(lambda w=work: layers.attend_alone(w), lambda x=prompts: layers.step(x))
            print(
                f"  attention by {count} multiprocessors: decodes in another stream {milliseconds(two):.3f} ms, "
                f"attention alone in another {milliseconds(alone):.3f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
