"""Windows through the runtime's own decoder and a small KV arena, one prefill row each: what the server computes."""

import torch
from bladellm_kernels.kv_format import NO_QUANT

from bladellm_runtime.errors import ConfigError
from bladellm_runtime.kv.arena import KvArena, KvShape
from bladellm_runtime.kv.factory import arena_kind, make_arena, page_bytes
from bladellm_runtime.kv.operations import MemoryPlan, Show
from bladellm_runtime.kv.sizing import kv_groups, plan_spec
from bladellm_runtime.layers.batch import ForwardBatch, PrefillRow
from bladellm_runtime.models.decoder import Decoder

GRANULE_TOKENS = 16
LAYERS_PER_GROUP = 4
LARGEST_GRANULE = 4096
"""Tokens, at most, in a granule of whole pages: a token takes at least one byte."""


class WindowForward:
    """A model with an arena for `batch` windows of `window` tokens. Use as a context: its end frees the arena."""

    def __init__(self, model: Decoder, window: int, batch: int) -> None:
        self.model = model
        self._window = window
        self._arena = window_arena(model, window, batch)
        count = self._arena.spec.granules(window)
        shown = [Show(slot, 0, list(range(slot * count, (slot + 1) * count))) for slot in range(batch)]
        self._arena.submit(MemoryPlan(views=list(shown)))
        self._arena.wait()
        self._bases = [self._arena.base_row(slot) for slot in range(batch)]

    def __enter__(self) -> "WindowForward":
        return self

    def __exit__(self, *_: object) -> None:
        self._arena.close()

    def hidden(self, windows: torch.Tensor) -> torch.Tensor:
        """windows int64 [B, T] -> hidden states that predict their tokens 1 to T − 1, [B · (T − 1), hidden]."""
        count, length = windows.shape
        device = self.model.device
        offsets = torch.arange(length, device=device)
        firsts = torch.arange(count, device=device).unsqueeze(1) * length
        bases = torch.tensor(self._bases[:count], device=device).unsqueeze(1)
        none = torch.empty(0, dtype=torch.int64, device=device)
        batch = ForwardBatch(
            input_ids=windows.to(device).flatten(),
            positions=offsets.repeat(count),
            kv_rows=(bases + offsets).flatten(),
            granule_rows=None,
            num_decode=0,
            decode_base_rows=none,
            decode_slots=none,
            decode_kv_lens=none,
            max_decode_kv_len=0,
            prefills=[PrefillRow(row * length, length, 0, self._bases[row], row) for row in range(count)],
            logit_tokens=(firsts + offsets[:-1]).flatten(),
            kv=self._arena,
        )
        return self.model.forward(batch)


def window_arena(model: Decoder, window: int, batch: int) -> KvArena:
    """The KV arena a server on this device would have, of `batch` slots. Raises `ConfigError` where it is too large."""
    spec = model.spec
    shape = KvShape(spec.kv_heads, spec.head_dim, model.dtype, NO_QUANT)
    groups = kv_groups(spec.layers, shape.payload_bytes, LAYERS_PER_GROUP)
    page = page_bytes(arena_kind("auto", model.device), model.device)
    budget = batch * (window + LARGEST_GRANULE) * sum(group.token_bytes for group in groups)
    plan = plan_spec(groups, budget, batch, window, GRANULE_TOKENS, page)
    try:
        return make_arena("auto", "ragged_flash", plan, shape, model.device)
    except ConfigError as error:
        size = plan.num_granules * plan.granule_bytes / 2**30
        raise ConfigError(
            f"K and V of {batch} windows of {window} tokens take {size:.3g} GiB, which cannot be had; "
            "lower --batch_size or --window"
        ) from error
