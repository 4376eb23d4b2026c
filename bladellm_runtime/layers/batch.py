"""`ForwardBatch`: everything a forward pass reads about its step, made once by the runner, never changed by a layer."""

from dataclasses import dataclass

import torch

from bladellm_runtime.kv.arena import KvArena


@dataclass(slots=True)
class PrefillRow:
    """One prefill chunk: query tokens `[first, first + query_len)` of the flat batch, at positions from `start` on."""

    first: int
    query_len: int
    start: int
    base_row: int


@dataclass(slots=True)
class ForwardBatch:
    """T query tokens of one step, flat, the `num_decode` decode rows first (one token each).

    input_ids, positions: int64 [T]. kv_rows: int64 [T], the arena row each token's K and V go to.
    decode_base_rows: int64 [num_decode], row of position 0; decode_kv_lens: int64 [num_decode], KV length after the
    write; max_decode_kv_len: an upper bound of those, known to the CPU. logit_tokens: int64 [R], indices into T whose
    logits are wanted.
    """

    input_ids: torch.Tensor
    positions: torch.Tensor
    kv_rows: torch.Tensor
    num_decode: int
    decode_base_rows: torch.Tensor
    decode_kv_lens: torch.Tensor
    max_decode_kv_len: int
    prefills: list[PrefillRow]
    logit_tokens: torch.Tensor
    kv: KvArena
