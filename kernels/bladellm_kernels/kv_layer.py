"""`KvLayer`: one layer's KV memory as the operators see it."""

from dataclasses import dataclass

import torch

from bladellm_kernels.kv_format import KvFormat


@dataclass(frozen=True, slots=True)
class KvLayer:
    """Stored keys and values of one layer, and where their scales are.

    payload: [rows, 2, Hk, W], K at index 0 and V at 1, of `format.dtype` and W = `format.width(D)`. Any strides but the
    last, which is 1; offsets exceed 32 bits. RaggedAttention memory keeps a sequence contiguous: its position p is row
    base + p for one base row. Rows outside a sequence's mapped memory must not be touched. Those behind its newest
    token, up to the end of that token's granule, are its own and hold nothing: an operator may use them.

    Memory is handed out in granules of `granule_tokens` consecutive tokens of a sequence. `table` [slots, G], int32,
    names the physical granule that holds positions [g * granule_tokens, ...) of a slot's sequence. It serves
      - scales: float16 [granules, Hk, 2, planes, granule_tokens], tokens contiguous, plane 0 the scale, 1 the zero;
      - `paged` memory, where position p of a slot is payload row table[slot, p // granule_tokens] * granule_tokens +
        p % granule_tokens, and base rows mean nothing.
    Table and scales are None where neither is needed.
    """

    payload: torch.Tensor
    format: KvFormat
    granule_tokens: int
    table: torch.Tensor | None = None
    scales: torch.Tensor | None = None
    paged: bool = False

    @property
    def kv_heads(self) -> int:
        return self.payload.shape[2]

    @property
    def head_dim(self) -> int:
        return self.format.head_dim(self.payload.shape[3])
