"""Time decode and prefill attention of a captured step on one GPU: in turn, and beside each other.

    python kernels/benchmarks/beside_attention.py [--cases 34x1100+1024 254x700+512+512 ...] [--programs 132 96 64]
                                                  [--formats no_quant fp12_e4m7] [--repeats 15]

A case is so many sequences of as many tokens that decode, padded to `ROWS` rows, beside prompts of their own, which
are attended to on the step's own keys and values where those in memory are codes. Times are of a layer, µs, what a norm
takes in front of each taken off. `alone`: decode attention; `chosen`: by `programs_beside`; the others: by so many
programs of prefill attention. Outputs must be as close to those in turn as bfloat16 is.
"""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from bladellm_kernels.decode_work import DecodeWork, DecodeWorkspace
from bladellm_kernels.kv_format import KV_FORMATS, NO_QUANT, KvFormat
from bladellm_kernels.kv_layer import KvLayer
from bladellm_kernels.one_pass_list import ENTRY_FIELDS, list_programs, programs_beside
from bladellm_kernels.one_pass_prefill import launch_listed
from bladellm_kernels.prefill_costs import MULTIPROCESSORS, Heads
from bladellm_kernels.prefill_tiles import Span
from bladellm_kernels.ragged_decode_attention import ragged_decode_attention
from bladellm_kernels.rms_norm import rms_norm
from decode_problem import Inputs, Problem, make_inputs
from gpu_timing import GpuTimer, machine
from torch import Tensor

HEADS, HIDDEN, LAYERS, ROWS = Heads(32, 8, 128), 4096, 8, 256
SCALE = HEADS.dim**-0.5
CASES = ("34x1100+1024", "128x576+512", "8x1100+512", "200x576+1024", "64x1100+960", "32x1100+300", "64x4000+512")
TOLERANCE = 2.0**-6


@dataclass(frozen=True, slots=True)
class Step:
    """Queries and outputs of a step, the decode rows first; memory of its layers, what padded rows read of it, and the
    prompts' keys and values, by layers, or fresh ones for all."""

    inputs: Inputs
    rows: tuple[Tensor, Tensor, Tensor]
    work: DecodeWork
    spans: list[Span]
    longest: int
    fresh: KvLayer | None
    q: Tensor
    out: Tensor
    stream: Tensor

    def norm(self) -> None:
        rms_norm(self.stream, self.stream[0], 1e-5)

    def decode(self, layer: int, beside: bool = False) -> None:
        memory = self.q[:ROWS], self.inputs.kv[layer], *self.rows
        ragged_decode_attention(*memory, self.longest, SCALE, work=self.work, out=self.out[:ROWS], beside=beside)

    def prefill(self, layer: int, entries: Tensor) -> None:
        launch_listed(self.q, self.fresh or self.inputs.kv[layer], entries, SCALE, self.out)


def make_step(
    decodes: int, length: int, prompts: Sequence[int], format: KvFormat, device: torch.device
) -> tuple[Step, DecodeWorkspace]:
    """A step, and what its plan lies in."""
    lens = (length,) * decodes + tuple(prompts)
    inputs = make_inputs(Problem(32, 8, 128, lens, format, torch.bfloat16, LAYERS, 256, False), device)
    rows = []
    for given in (inputs.base_rows, inputs.slots, inputs.kv_lens):
        rows.append(torch.zeros(ROWS, dtype=given.dtype, device=device))
        rows[-1][:decodes] = given[:decodes]
    workspace = DecodeWorkspace(device, ROWS, HEADS.query, HEADS.kv, HEADS.dim, format=format)
    used = decodes + sum(prompts)
    tokens = max(ROWS, -(-used // 128) * 128)
    numbers = torch.randn(tokens, 2, HEADS.kv, HEADS.dim, device=device).bfloat16()
    fresh = KvLayer(numbers, NO_QUANT, 256) if format.quantized else None
    spans, first = [], decodes
    for slot, prompt in enumerate(prompts, decodes):
        spans.append(Span(first, prompt, 0, first if fresh else int(inputs.base_rows[slot]), slot))
        first += prompt
    q = torch.randn(tokens, HEADS.query, HEADS.dim, device=device).bfloat16()
    stream = torch.randn(tokens, HIDDEN, device=device).bfloat16()
    base, slots, kv_lens = rows
    work = workspace.plan(kv_lens)
    return Step(
        inputs, (base, slots, kv_lens), work, spans, max(lens), fresh, q, torch.zeros_like(q), stream
    ), workspace


def entries_of(spans: Sequence[Span], programs: int, device: torch.device) -> Tensor:
    """A list with room for a program on each multiprocessor."""
    entries = torch.zeros(MULTIPROCESSORS, ENTRY_FIELDS, dtype=torch.int64)
    listed = torch.from_numpy(list_programs(spans, HEADS, programs))
    entries[: len(listed)] = listed
    return entries.to(device)


def in_turn(step: Step, entries: Tensor, layer: int) -> None:
    step.norm()
    step.decode(layer)
    step.prefill(layer, entries)


def together(step: Step, entries: Tensor, layer: int) -> None:
    step.norm()
    step.prefill(layer, entries)
    step.decode(layer, beside=True)


def measure(case: str, format: KvFormat, counts: Sequence[int], timer: GpuTimer) -> str:
    """A line of the table."""
    device = torch.device("cuda", torch.cuda.current_device())
    sequences, *others = case.split("+")
    decodes, length = (int(number) for number in sequences.split("x"))
    prompts = [int(other) for other in others]
    step, _workspace = make_step(decodes, length, prompts, format, device)

    def microseconds(layer_work: Callable[[int], object]) -> float:
        return 1e6 * timer.replayed([partial(layer_work, layer) for layer in range(LAYERS)]) / LAYERS

    def alone(layer: int) -> None:
        step.norm()
        step.decode(layer)

    norm = microseconds(lambda layer: step.norm())
    found = [microseconds(alone) - norm]
    whole = entries_of(step.spans, MULTIPROCESSORS, device)
    found.append(microseconds(partial(in_turn, step, whole)) - norm)
    used = decodes + sum(prompts)
    expected = step.out[:used].clone()
    chosen = programs_beside(step.spans, HEADS, MULTIPROCESSORS, decodes * length)
    for programs in (chosen, *counts):
        step.out.fill_(torch.nan)
        found.append(microseconds(partial(together, step, entries_of(step.spans, programs, device))) - norm)
        error = (step.out[:used] - expected).abs().max()
        assert error <= TOLERANCE, f"{case}, {programs} programs: {error}"
    cells = [case, format.name, *(f"{each:.1f}" for each in found)]
    cells[4] += f" ({chosen})"
    return f"| {' | '.join(cells)} |"


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", default=list(CASES), help="decodes x tokens of each + prompts")
    parser.add_argument("--programs", nargs="*", type=int, default=[132, 96, 80, 64, 48], help="of prefill attention")
    parser.add_argument("--formats", nargs="+", default=["no_quant"], choices=list(KV_FORMATS), help="of the memory")
    parser.add_argument("--repeats", type=int, default=15)
    args = parser.parse_args()
    print(", ".join(f"{name}: {value}" for name, value in machine().items()), flush=True)
    header = ["case", "format", "alone", "in turn", "beside, chosen", *map(str, args.programs)]
    print(f"\n| {' | '.join(header)} |\n|{' --- |' * len(header)}", flush=True)
    for case in args.cases:
        for name in args.formats:
            print(measure(case, KV_FORMATS[name], args.programs, GpuTimer(args.repeats)), flush=True)


if __name__ == "__main__":
    main()
