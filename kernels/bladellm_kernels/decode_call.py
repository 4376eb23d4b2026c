"""What decode attention is called for."""

from dataclasses import dataclass

import torch

from bladellm_kernels.decode_work import DecodeWork
from bladellm_kernels.kv_layer import KvLayer


@dataclass(frozen=True, slots=True)
class DecodeCall:
    """A call of `ragged_decode_attention`, whose arguments have been checked: `out` is there, `work` planned; beside:
    as there."""

    q: torch.Tensor
    kv: KvLayer
    base_rows: torch.Tensor
    slots: torch.Tensor
    kv_lens: torch.Tensor
    scale: float
    work: DecodeWork
    out: torch.Tensor
    beside: bool = False
