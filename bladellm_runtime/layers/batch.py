"""`ForwardBatch`: everything a forward pass reads about its step, made once by the runner, never changed by a layer."""

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from bladellm_kernels.cascade_decode_attention import CascadeWork, CascadeWorkspace, SharedPrefixes
from bladellm_kernels.decode_schedule import ALONE, DecodeSetting
from bladellm_kernels.decode_work import DecodeWork, DecodeWorkspace
from bladellm_kernels.listed_prefill_attention import ListViews
from bladellm_kernels.lora_tokens import TokenAdapters
from bladellm_kernels.prefill_calls import PlannedCalls

from bladellm_runtime.kv.arena import KvArena


@dataclass(slots=True)
class PrefillRow:
    """One prefill chunk: query tokens `[first, first + query_len)` of the flat batch, at positions from `start` on of
    the sequence in `slot`, whose position 0 is row `base_row` of the arena."""

    first: int
    query_len: int
    start: int
    base_row: int
    slot: int


@dataclass(slots=True)
class WantedTokens:
    """The R tokens of a step whose hidden states are wanted, each the newest of its sequence.

    tokens: their places in the flat batch; base_rows, slots: of their sequences; kv_lens: of those, after the write;
    all int64 [R]. max_kv_len: an upper bound of those, known to the CPU.
    """

    tokens: torch.Tensor
    base_rows: torch.Tensor
    slots: torch.Tensor
    kv_lens: torch.Tensor
    max_kv_len: int


@dataclass(slots=True)
class ForwardBatch:
    """T query tokens of one step, flat, the `num_decode` decode rows first (one token each).

    input_ids, positions: int64 [T]. kv_rows: int64 [T], the arena row each token's K and V go to; granule_rows: the
    same counted in granules (granule number * granule_tokens + place), None where layers have no table.
    decode_base_rows, decode_slots: int64 [num_decode], row of position 0 and slot; decode_kv_lens: int64 [num_decode],
    KV length after the write; max_decode_kv_len: an upper bound of those, known to the CPU. logit_tokens: int64 [R],
    indices into T whose logits are wanted, None for all tokens. workspace: where decode attention plans its work, None
    on a CPU. rotation: [D, D], turns queries and keys before they are stored. planned: what prefill attention may ask
    of cuDNN. prefill_lists: by window, the chunks as work lists on the device, in place of `prefills`; decode rows may
    then be any token's: what they leave in rows of chunks is overwritten. setting: what is around decode
    attention. prefixes: beginnings that decode rows share, read once in layers without a window; cascade: where that is
    planned, None on a CPU. wanted: those of `logit_tokens`, where they are few: the last layer then attends, and has
    its MLP, for them alone. hidden: [T, hidden], what the stage before left, used up by the forward pass; None on the
    first stage, which alone reads input_ids. adapters: of the tokens; None where none of them has one. id_slots: int64
    [T], where input_ids have the newest token of every slot: those of the step's tokens. attended: [T, Hq, D], zeros,
    in a step with padding: attention's outputs of all layers go there. Padding, of ids below 0, has embeddings of zeros
    and no outputs: it stays zeros from layer to layer, and products of zeros take less power. beside: the chunks are
    all attended to in one pass, and decode attention starts beside that; it leaves their rows as they are.
    """

    input_ids: torch.Tensor
    positions: torch.Tensor
    kv_rows: torch.Tensor
    granule_rows: torch.Tensor | None
    num_decode: int
    decode_base_rows: torch.Tensor
    decode_slots: torch.Tensor
    decode_kv_lens: torch.Tensor
    max_decode_kv_len: int
    prefills: list[PrefillRow]
    logit_tokens: torch.Tensor | None
    kv: KvArena
    workspace: DecodeWorkspace | None = None
    rotation: torch.Tensor | None = None
    planned: PlannedCalls | None = None
    prefill_lists: dict[int | None, ListViews] | None = None
    setting: DecodeSetting = ALONE
    prefixes: SharedPrefixes | None = None
    cascade: CascadeWorkspace | None = None
    wanted: WantedTokens | None = None
    hidden: torch.Tensor | None = None
    adapters: TokenAdapters | None = None
    id_slots: torch.Tensor | None = None
    attended: torch.Tensor | None = None
    beside: bool = False
    _reserved: dict[int | None, DecodeWork] = field(default_factory=dict)
    _works: dict[int | None, DecodeWork] = field(default_factory=dict)
    _cascade_work: CascadeWork | None = None

    @property
    def padded(self) -> bool:
        """Whether tokens of padding may be among the step's."""
        return self.attended is not None

    def reserve_works(self, windows: Iterable[int | None]) -> None:
        """Have the plans of decode attention made beside other kernels of the step, which a graph captures: before the
        first of them."""
        if self.workspace is not None:
            for window in set(windows):
                self._reserved[window] = self.workspace.reserve(self.num_decode, window, 1, self.setting)

    def decode_work(self, window: int | None) -> DecodeWork | None:
        """How decode attention shares out this step's work: planned once for all layers that see the same window, when
        it is asked for first."""
        if self.workspace is None:
            return None
        if window not in self._works:
            work = self._reserved.get(window)
            if work is None:
                work = self.workspace.plan(self.decode_kv_lens, window, setting=self.setting)
            else:
                # The graph's inputs were there before its first kernel, and so was this memory, for nobody else.
                self.workspace.fill(work, self.decode_kv_lens, settled=True)
            self._works[window] = work
        return self._works[window]

    def cascade_work(self, prefixes: SharedPrefixes) -> CascadeWork | None:
        """The same for reading `prefixes` once: planned once for all layers without a window."""
        if self.cascade is None:
            return None
        if self._cascade_work is None:
            rows = (self.decode_base_rows, self.decode_slots, self.decode_kv_lens)
            self._cascade_work = self.cascade.plan(prefixes, *rows)
        return self._cascade_work
