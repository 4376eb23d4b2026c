"""Linear layers in integers: activations become 8-bit integers, their scale found on the fly for each row, or given."""

from collections.abc import Callable

import torch

from bladellm_kernels.int8_matmul import MIDDLE, PackedInt8, int8_matmul

_LARGEST = 127

_BLOCK_ELEMENTS, _BLOCK_ROWS = 1 << 19, 64
"""Elements rounded and multiplied at a time, and the fewest rows: what a cache holds, and enough to reuse a weight."""


def fixed_point_linear(x: torch.Tensor, packed: PackedInt8, bias: torch.Tensor | None, digits: int) -> torch.Tensor:
    """`x @ weight.T + bias`, each row of x rounded to `digits` 8-bit digits. x: [T, K]. Returns [T, N] of x's type."""

    def block(rows: torch.Tensor) -> torch.Tensor:
        codes, scales = dynamic_codes(rows, digits)
        total = int8_matmul(codes, packed)
        if digits > 1:
            *lower, total = total.chunk(digits)
            for product in reversed(lower):
                total.mul_(256).add_(product)
        return _finish(total.mul_(scales), bias, x.dtype)

    return _by_blocks(x, block)


def static_linear(x: torch.Tensor, packed: PackedInt8, bias: torch.Tensor | None, scale: float) -> torch.Tensor:
    """`x @ weight.T + bias`, x rounded to 8 bits of the given scale. x: [T, K]. Returns [T, N] of x's type."""

    def block(rows: torch.Tensor) -> torch.Tensor:
        # Codes keep no NaN, but its row must be NaN.
        steps = torch.where(rows.isnan().any(dim=1, keepdim=True), torch.nan, scale)
        return _finish(int8_matmul(static_codes(rows, scale), packed).mul_(steps), bias, x.dtype)

    return _by_blocks(x, block)


def _by_blocks(x: torch.Tensor, block: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    size = max(_BLOCK_ROWS, _BLOCK_ELEMENTS // x.shape[1])
    return block(x) if len(x) <= size else torch.cat([block(rows) for rows in x.split(size)])


def _finish(y: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    return (y if bias is None else y.add_(bias)).to(dtype)


def row_scales(x: torch.Tensor, largest: float) -> torch.Tensor:
    """float32 [..., 1]: each row's largest magnitude / `largest`, or the least normal number. x: float32 [..., K]."""
    # Subnormal scales are too coarse: quotients would leave the range of the codes.
    return exact_quotients(x.abs().amax(dim=-1, keepdim=True), largest).clamp_(min=torch.finfo(torch.float32).tiny)


def exact_quotients(x: torch.Tensor, divisor: float) -> torch.Tensor:
    """`x / divisor`, each rounded once. x: float32.

    On CUDA torch multiplies by the reciprocal of a number, which rounds twice: halves between two codes, common with
    16-bit x, would go another way than in the kernels.
    """
    return x / torch.full((), divisor, dtype=x.dtype, device=x.device)


def dynamic_codes(x: torch.Tensor, digits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Each row as fixed-point numbers of `digits` digits in base 256, the lowest first.

    x: [T, K]. Returns codes, uint8 [digits · T, K], and scales, float32 [T, 1]: with codes[d] the T rows of a digit,
    x ≈ scales · Σ_d 256^d · (codes[d] − 128), with an error of at most half a scale.
    One digit is the usual 8-bit rounding; three keep what float32 keeps.
    """
    x = x.float()
    scales = row_scales(x, _LARGEST * 256 ** (digits - 1))
    # Below 2^24 in every digit, so float32 holds the integers exactly and no digit overflows.
    numbers = (x / scales).round_().add_(sum(MIDDLE * 256**digit for digit in range(digits)))
    if digits == 1:
        return numbers.to(torch.uint8), scales
    numbers, codes = numbers.to(torch.int32), torch.empty(digits, *x.shape, dtype=torch.uint8, device=x.device)
    for digit, out in enumerate(codes):
        out.copy_(numbers >> 8 * digit)
    return codes.view(-1, x.shape[1]), scales


def static_codes(x: torch.Tensor, scale: float) -> torch.Tensor:
    """`x / scale` rounded half to even, −128 to 127, plus 128: uint8 [T, K]."""
    return exact_quotients(x.float(), scale).round_().add_(MIDDLE).clamp_(0, 255).to(torch.uint8)
