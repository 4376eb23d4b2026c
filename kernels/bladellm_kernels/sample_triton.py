"""The launches of `sample_step` on CUDA: three to five kernels, the same whatever the rows ask for.

1. `peak_kernel`: penalties, bias, masks; the arg-max. 2. `histogram_kernel` and 3. `refine_kernel`: where top-k and
top-p cut. 4. `draw_kernel`: the draw. 5. `finish_kernel`: the exact cut, and the token written. A row's programs leave
a kernel at once where its flags need nothing of it.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import triton

from bladellm_kernels.early_launch import early_launch
from bladellm_kernels.gumbel_triton import EXACT
from bladellm_kernels.sample_draw_triton import draw_kernel
from bladellm_kernels.sample_finish_triton import finish_kernel
from bladellm_kernels.sample_peak_triton import peak_kernel
from bladellm_kernels.sample_rows_triton import PARTS, Rows, Slots, Work
from bladellm_kernels.sample_threshold_triton import histogram_kernel, refine_kernel
from bladellm_kernels.slot_parameters import SlotParameters

if TYPE_CHECKING:
    from bladellm_kernels.sample_step import SampleRows, SampleWorkspace, Stage


@dataclass(frozen=True, slots=True)
class SampleSchedule:
    """programs: about how many share the rows of a step. block: tokens a program holds. few: candidates for which the
    exact cut is found in fewer registers. warps: of a program, twice as many of the last kernel's."""

    programs: int = 1056
    block: int = 1024
    few: int = 256
    warps: int = 4

    def parts(self, rows: int, vocab: int) -> tuple[int, int]:
        """Programs of a row, and tokens of each: a multiple of `block`."""
        # Triton compiles 1 and multiples of 16 apart: some numbers of rows would need kernels of their own.
        wanted = max(2, min(PARTS.value, self.programs // max(rows, 1)))
        chunk = triton.cdiv(triton.cdiv(vocab, wanted), self.block) * self.block
        while triton.cdiv(vocab, chunk) % 16 == 0:
            chunk += self.block
        return triton.cdiv(vocab, chunk), chunk


def launch(
    logits: torch.Tensor,
    rows: "SampleRows",
    slots: SlotParameters,
    workspace: "SampleWorkspace",
    outputs: tuple[torch.Tensor, torch.Tensor],
    last_token: torch.Tensor | None,
    stage: "Stage",
    schedule: SampleSchedule,
) -> None:
    """Queue the kernels; the arguments have been checked."""
    count, vocab = logits.shape
    if count == 0:
        return
    parts, chunk = schedule.parts(count, vocab)
    words = 0 if rows.masks is None else rows.masks.shape[1]
    of_rows = Rows(
        logits, logits.stride(0), rows.slots, rows.positions, rows.mask_rows, rows.masks, words, vocab,
    )  # fmt: skip
    of_slots = Slots(
        slots.flags, slots.floats, slots.top_ks, slots.streams, slots.seen.view(torch.uint8), slots.counts,
        slots.bias_tokens, slots.bias_values, slots.bias_counts, slots.free_from, slots.bias_tokens.shape[1],
    )  # fmt: skip
    work = Work(
        workspace.changed, workspace.peaks, workspace.peak_tokens, workspace.histograms, workspace.sums,
        workspace.candidates, workspace.scores, workspace.score_tokens, parts, chunk,
    )  # fmt: skip
    drawn, ordered = stage.value > 0, stage.value > 1
    capacity, block = workspace.candidates.shape[1], schedule.block
    options = {**early_launch(logits.device), "num_warps": schedule.warps}
    if logits.is_cuda:
        options |= EXACT
    grid = (parts, count)
    peak_kernel[grid](of_rows, of_slots, work, ORDERED=ordered, BLOCK=block, **options)
    if ordered:
        histogram_kernel[grid](of_rows, of_slots, work, BLOCK=block, **options)
        refine_kernel[grid](of_rows, of_slots, work, CAPACITY=capacity, BLOCK=block, **options)
    if drawn:
        draw_kernel[grid](of_rows, of_slots, work, ORDERED=ordered, CAPACITY=capacity, BLOCK=block, **options)
    finish_kernel[(count,)](
        of_rows, of_slots, work, *outputs, last_token, DRAWN=drawn, ORDERED=ordered, CAPACITY=capacity,
        FEW=min(schedule.few, capacity), BLOCK=block, **options | {"num_warps": 2 * schedule.warps},
    )  # fmt: skip
