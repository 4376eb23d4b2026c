"""Time decode and prefill attention of a captured step on one GPU: in turn, and beside each other.

    python kernels/benchmarks/beside_attention.py [--cases 34x1100+1024 128x576+512 ...] [--programs 132 96 64]
                                                  [--repeats 15]

A case is so many sequences of as many tokens that decode, padded to `ROWS` rows, beside a prompt of its own. Times are
of a layer, µs, what a norm takes in front of each taken off. `chosen`: by `programs_beside`; the others: by so many
programs of prefill attention. Outputs must be as close to those in turn as bfloat16 is.
"""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from bladellm_kernels.decode_work import DecodeWork, DecodeWorkspace
from bladellm_kernels.kv_format import NO_QUANT
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
    """Queries and outputs of a step, the decode rows first; memory of its layers, and what padded rows read of it."""

    inputs: Inputs
    rows: tuple[Tensor, Tensor, Tensor]
    work: DecodeWork
    span: Span
    longest: int
    q: Tensor
    out: Tensor
    stream: Tensor

    def norm(self) -> None:
        rms_norm(self.stream, self.stream[0], 1e-5)

    def decode(self, layer: int, beside: bool = False) -> None:
        memory = self.q[:ROWS], self.inputs.kv[layer], *self.rows
        ragged_decode_attention(*memory, self.longest, SCALE, work=self.work, out=self.out[:ROWS], beside=beside)

    def prefill(self, layer: int, entries: Tensor) -> None:
        launch_listed(self.q, self.inputs.kv[layer], entries, SCALE, self.out)


def make_step(decodes: int, length: int, prompt: int, device: torch.device) -> tuple[Step, DecodeWorkspace]:
    """A step, and what its plan lies in."""
    lens = (length,) * decodes + (prompt,)
    inputs = make_inputs(Problem(32, 8, 128, lens, NO_QUANT, torch.bfloat16, LAYERS, 256, False), device)
    rows = []
    for given in (inputs.base_rows, inputs.slots, inputs.kv_lens):
        rows.append(torch.zeros(ROWS, dtype=given.dtype, device=device))
        rows[-1][:decodes] = given[:decodes]
    workspace = DecodeWorkspace(device, ROWS, HEADS.query, HEADS.kv, HEADS.dim)
    span = Span(decodes, prompt, 0, int(inputs.base_rows[-1]), int(inputs.slots[-1]))
    tokens = max(ROWS, -(-(decodes + prompt) // 128) * 128)
    q = torch.randn(tokens, HEADS.query, HEADS.dim, device=device).bfloat16()
    stream = torch.randn(tokens, HIDDEN, device=device).bfloat16()
    base, slots, kv_lens = rows
    work = workspace.plan(kv_lens)
    return Step(
        inputs, (base, slots, kv_lens), work, span, max(length, prompt), q, torch.zeros_like(q), stream
    ), workspace


def entries_of(span: Span, programs: int, device: torch.device) -> Tensor:
    """A list with room for a program on each multiprocessor."""
    entries = torch.zeros(MULTIPROCESSORS, ENTRY_FIELDS, dtype=torch.int64)
    listed = torch.from_numpy(list_programs([span], HEADS, programs))
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


def measure(case: str, counts: Sequence[int], timer: GpuTimer) -> str:
    """A line of the table."""
    device = torch.device("cuda", torch.cuda.current_device())
    decodes, length, prompt = (int(number) for number in case.replace("+", "x").split("x"))
    step, _workspace = make_step(decodes, length, prompt, device)

    def microseconds(layer_work: Callable[[int], object]) -> float:
        return 1e6 * timer.replayed([partial(layer_work, layer) for layer in range(LAYERS)]) / LAYERS

    norm = microseconds(lambda layer: step.norm())
    whole = entries_of(step.span, MULTIPROCESSORS, device)
    turns = microseconds(partial(in_turn, step, whole)) - norm
    expected = step.out[: decodes + prompt].clone()
    chosen = programs_beside([step.span], HEADS, MULTIPROCESSORS, decodes * length)
    found = []
    for programs in (chosen, *counts):
        step.out.fill_(torch.nan)
        found.append(microseconds(partial(together, step, entries_of(step.span, programs, device))) - norm)
        error = (step.out[: decodes + prompt] - expected).abs().max()
        assert error <= TOLERANCE, f"{case}, {programs} programs: {error}"
    cells = [case, f"{turns:.1f}", f"{found[0]:.1f} ({chosen})", *(f"{each:.1f}" for each in found[1:])]
    return f"| {' | '.join(cells)} |"


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", default=list(CASES), help="decodes x tokens of each + prompt")
    parser.add_argument("--programs", nargs="*", type=int, default=[132, 96, 80, 64, 48], help="of prefill attention")
    parser.add_argument("--repeats", type=int, default=15)
    args = parser.parse_args()
    print(", ".join(f"{name}: {value}" for name, value in machine().items()), flush=True)
    header = ["case", "in turn", "beside, chosen", *map(str, args.programs)]
    print(f"\n| {' | '.join(header)} |\n|{' --- |' * len(header)}", flush=True)
    for case in args.cases:
        print(measure(case, args.programs, GpuTimer(args.repeats)), flush=True)


if __name__ == "__main__":
    main()
