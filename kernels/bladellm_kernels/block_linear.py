"""A linear layer whose weight is dequantized a block of rows at a time: the path of all weights without a kernel.

Bounded memory: one block of the weight in the type of the activations, whatever the weight's size.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from bladellm_kernels.row_blocks import block_slices

_CPU_ELEMENTS, _CUDA_ELEMENTS = 1 << 19, 1 << 24
"""Elements dequantized at a time: on a CPU what its caches hold (measured), on CUDA a bound on the workspace."""


def weight_blocks(rows: int, columns: int, device: torch.device) -> Iterator[slice]:
    """Slices that cover the rows of a weight [rows, columns] in order."""
    return block_slices(rows, columns, _CPU_ELEMENTS if device.type == "cpu" else _CUDA_ELEMENTS)


@dataclass(frozen=True, slots=True)
class BlockWeight:
    """The weight `scales · (codes − zeros)`, [N, K], its codes as small as they go.

    codes: uint8 [N, ⌈K/2⌉] of 4-bit codes (column j in the low half of byte j, column ⌈K/2⌉ + j in its high half), or
    uint8 or float8 [N, K]. scales: float32 [N, G], contiguous. zeros: float32 [N, G], or one for all.
    """

    columns: int
    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | float

    def read(self, part: slice, values: torch.Tensor) -> None:
        """Write rows `part` of the weight into `values`, float32 [R, K]."""
        codes = self.codes[part]
        if codes.shape[1] != self.columns:
            codes = torch.cat((codes & 15, codes >> 4), dim=1)[:, : self.columns]
        grouped = values.copy_(codes).view(len(codes), self.scales.shape[1], -1)
        grouped.sub_(self.zeros[part].unsqueeze(2) if isinstance(self.zeros, torch.Tensor) else self.zeros)
        grouped.mul_(self.scales[part].unsqueeze(2))


def block_weight(
    codes: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None, bits: int, middle: float
) -> BlockWeight:
    """The `BlockWeight` of codes of `bits`, one a byte. `middle`: the zero where zeros is None."""
    columns = codes.shape[1]
    if bits == 4 and columns > 1:
        half = (columns + 1) // 2
        low, high = codes[:, :half], F.pad(codes[:, half:], (0, 2 * half - columns))
        codes = low | high << 4
    return BlockWeight(
        columns, codes.contiguous(), scales.float().contiguous(), middle if zeros is None else zeros.float()
    )


def block_linear(x: torch.Tensor, weight: BlockWeight, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`x @ weight.T + bias`. x: [T, K]; bias: [N] of x's type or None. Returns [T, N] of x's type."""
    # float16 products are not vectorised on a CPU; in float32 they are an order of magnitude faster.
    dtype = torch.float32 if x.is_cpu and x.dtype == torch.float16 else x.dtype
    rows, wide = len(weight.codes), x.to(dtype)
    bias = None if bias is None else bias.to(dtype)
    y = x.new_empty(len(x), rows)
    values = torch.empty(0, device=x.device)
    for part in weight_blocks(rows, weight.columns, x.device):
        shape = (part.stop - part.start, weight.columns)
        if values.shape != shape:  # One workspace for all blocks: on a CPU fresh pages cost more than the arithmetic.
            values = torch.empty(shape, device=x.device)
        weight.read(part, values)
        y[:, part] = F.linear(wide, values.to(dtype), None if bias is None else bias[part])
    return y
