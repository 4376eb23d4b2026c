"""What a captured step with prefill chunks reads: arrays that stay where they are, filled by one copy a step."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

import numpy as np
import torch
from bladellm_kernels.decode_schedule import ALONE
from bladellm_kernels.decode_work import DecodeWorkspace
from bladellm_kernels.kv_layer import KvLayer
from bladellm_kernels.listed_prefill_attention import (
    ListShape,
    fill_list,
    list_shape,
    list_views,
    one_pass_alone,
    one_pass_programs,
)
from bladellm_kernels.lora_tokens import FIELDS, AdapterTiles, TokenAdapters, fill_tiles, most_tiles
from bladellm_kernels.one_pass_gate import attends_fresh
from bladellm_kernels.prefill_costs import Heads
from bladellm_kernels.prefill_tiles import Span
from bladellm_kernels.ragged_decode_attention import runs_beside
from numpy.typing import NDArray
from torch import Tensor

from bladellm_runtime.engine.host_ring import HostRing
from bladellm_runtime.engine.inputs import FlatPlan, are_few
from bladellm_runtime.kv.arena import KvArena
from bladellm_runtime.layers.batch import ForwardBatch, WantedTokens

CHUNK_TOKENS, LEAST_CHUNKS = 64, 4
"""Work lists have room for tiles of a chunk for each so many tokens, of `LEAST_CHUNKS` at least."""

DECODED, PADDING = -1, -2
"""In place of token ids: of decode rows, whose token the device has, and of tokens that are none."""

Ints = NDArray[np.int64]
Array = TypeVar("Array", Tensor, Ints)


class TokenArrays(NamedTuple, Generic[Array]):
    """[T] each. prompt_ids: `DECODED` for decode rows, `PADDING` in padding. positions: 0 in padding. kv_rows,
    granule_rows: as in `ForwardBatch`, -1 in padding, which stores nothing. logit_tokens, and behind the sampling
    rows' the scored tokens, whose targets are at the same places: read by eager operators, as many as the step has."""

    prompt_ids: Array
    positions: Array
    kv_rows: Array
    granule_rows: Array
    logit_tokens: Array
    targets: Array


class RowArrays(NamedTuple, Generic[Array]):
    """[R] each, R sequences at most decode. slots: where the token comes from; in padding, a slot nobody has.
    base_rows, kv_lens, table_slots: what decode attention reads; a kv_len of 0 in padding, which reads nothing. wanted
    and what follows: of the sampling rows, the fields of `WantedTokens`, padded likewise with the first token."""

    slots: Array
    base_rows: Array
    kv_lens: Array
    table_slots: Array
    wanted: Array
    wanted_base_rows: Array
    wanted_slots: Array
    wanted_kv_lens: Array


class AdapterArrays(NamedTuple, Generic[Array]):
    """slots, order: [T], -1 and 0 in padding; tiles: as in `AdapterTiles`. Undefined where no token has an adapter."""

    slots: Array
    order: Array
    tiles: Array


@dataclass(frozen=True, slots=True)
class Layout:
    """How int64 numbers of steps padded to `tokens` lie: token arrays, row arrays, a work list a window, and arrays of
    adapters, of which up to `max_loras` are in a step. Where tokens and rows are even each begins at a multiple of 16
    bytes, by which Triton compiles kernels apart. beside: decode attention runs beside attention in one pass, where
    that takes all chunks."""

    tokens: int
    rows: int
    list: ListShape
    windows: tuple[int | None, ...]
    max_loras: int = 0
    beside: bool = False

    @property
    def wants_few(self) -> bool:
        """Whether the last layer is computed for the wanted tokens alone."""
        return are_few(self.rows, self.tokens)

    @property
    def token_numbers(self) -> int:
        return len(TokenArrays._fields) * self.tokens

    @property
    def row_numbers(self) -> int:
        return len(RowArrays._fields) * self.rows

    @property
    def numbers(self) -> int:
        return self.first_adapter + self.adapter_numbers

    @property
    def first_adapter(self) -> int:
        return self.token_numbers + self.row_numbers + len(self.windows) * self.list.numbers

    @property
    def adapter_numbers(self) -> int:
        return 2 * self.tokens + FIELDS * most_tiles(self.tokens, self.max_loras) if self.max_loras else 0

    def split(self, numbers: Array) -> tuple[TokenArrays[Array], RowArrays[Array], dict[int | None, Array]]:
        """Views of an array of as many numbers."""
        first, second = self.token_numbers, self.token_numbers + self.row_numbers
        lists = numbers[second : self.first_adapter].reshape(len(self.windows), self.list.numbers)
        return (
            TokenArrays(*numbers[:first].reshape(-1, self.tokens)),
            RowArrays(*numbers[first:second].reshape(-1, self.rows)),
            dict(zip(self.windows, lists, strict=True)),
        )

    def adapters(self, numbers: Array) -> AdapterArrays[Array]:
        """The views of `split` for adapters, of which there are some."""
        own, tokens = numbers[self.first_adapter :], self.tokens
        tiles = own[2 * tokens : self.adapter_numbers].reshape(-1, FIELDS)
        return AdapterArrays(own[:tokens], own[tokens : 2 * tokens], tiles)


class MixedInputs:
    """The arrays of steps of up to `max(sizes)` tokens, decode rows and prefill chunks. One stream writes and reads
    them."""

    def __init__(
        self,
        sizes: Sequence[int],
        arena: KvArena,
        heads: Heads,
        windows: Sequence[int | None],
        dtype: torch.dtype,
        in_flight: int = 2,
        max_loras: int = 0,
        workspace: DecodeWorkspace | None = None,
    ) -> None:
        """sizes: token counts that steps are padded to. windows: of the model's layers. dtype: the model's. in_flight:
        as in `HostRing`. max_loras: adapters in a step, at most. workspace: of decode attention, None on a CPU."""
        self._arena = arena
        self._heads = heads
        self._dtype = dtype
        layer = arena.layer(0)
        self._tabled = layer.table is not None
        self._layouts: dict[int, Layout] = {}
        for size in sizes:
            rows = min(size, arena.spec.num_slots)
            chunks = min(rows, max(LEAST_CHUNKS, size // CHUNK_TOKENS))
            programs, windowed = one_pass_programs(size, layer, dtype), any(window is not None for window in windows)
            shape = list_shape(size, chunks, heads, dtype, programs, windowed, attends_fresh(layer, dtype))
            beside = bool(programs) and not windowed and _runs_beside(workspace, layer, heads, dtype, rows)
            self._layouts[size] = Layout(size, rows, shape, tuple(dict.fromkeys(windows)), max_loras, beside)
        most = max(layout.numbers for layout in self._layouts.values())
        self._static = torch.zeros(most, dtype=torch.int64, device=arena.device)
        self._host = HostRing(most, arena.device, in_flight)
        self.adapted = False
        """Whether tokens of the plan sent last have adapters."""
        self.one_pass = False
        """Whether attention in one pass is all that its chunks need."""

    def has_one_pass(self, size: int) -> bool:
        """Whether such a step has the choice of all kinds of attention."""
        return self._layouts[size].list.programs > 0

    def batch(self, size: int, last_token: Tensor, adapted: bool = False, one_pass: bool = False) -> ForwardBatch:
        """The forward batch over these arrays. last_token: int64 [slots + 1], read on the device. adapted: tokens may
        have adapters; one_pass: attention in one pass is all that chunks need."""
        layout = self._layouts[size]
        tokens, rows, lists = layout.split(self._static[: layout.numbers])
        first, longest = tokens.prompt_ids[: layout.rows], self._arena.spec.max_tokens
        wanted = WantedTokens(rows.wanted, rows.wanted_base_rows, rows.wanted_slots, rows.wanted_kv_lens, longest)
        views_of = [(window, list_views(numbers, layout.list)) for window, numbers in lists.items()]
        decoded = torch.where(first == DECODED, last_token.index_select(0, rows.slots), first)
        return ForwardBatch(
            input_ids=torch.cat([decoded, tokens.prompt_ids[layout.rows :]]),
            positions=tokens.positions,
            kv_rows=tokens.kv_rows,
            granule_rows=tokens.granule_rows if self._tabled else None,
            num_decode=layout.rows,
            decode_base_rows=rows.base_rows,
            decode_slots=rows.table_slots,
            decode_kv_lens=rows.kv_lens,
            max_decode_kv_len=longest,
            prefills=[],
            logit_tokens=None,
            kv=self._arena,
            wanted=wanted if layout.wants_few else None,
            prefill_lists={
                window: views._replace(tiles=None, blocks=None) if one_pass else views for window, views in views_of
            },
            adapters=self._token_adapters(layout) if adapted else None,
            # Zeros in the places of padding, as its embeddings are.
            attended=torch.zeros(
                size, self._heads.query, self._heads.dim, dtype=self._dtype, device=self._static.device
            ),
            # Where numbers are made of codes most steps have graphs of both kinds, of which one pass goes first then.
            beside=layout.beside and (one_pass or (layout.list.blocks > 0 and not adapted)),
        )

    def _token_adapters(self, layout: Layout) -> TokenAdapters:
        arrays = layout.adapters(self._static[: layout.numbers])
        return TokenAdapters(arrays.slots, AdapterTiles(arrays.order, arrays.tiles))

    def send(self, flat: FlatPlan | None, size: int) -> bool:
        """Queue the upload of a plan, padded to `size` tokens; without a plan all of it is padding.

        False, with nothing queued, where a work list has no room for the chunks, or tokens are scored and the last
        layer is not computed for all. Never waits for the device.
        """
        layout = self._layouts[size]
        if flat is not None and flat.scores and layout.wants_few:
            return False
        buffer = self._host.next()
        host = buffer.array[: layout.numbers]
        tokens, rows, lists = layout.split(host)
        prefills = [] if flat is None else flat.prefills
        chunks = [Span(each.first, each.query_len, each.start, each.base_row, each.slot) for each in prefills]
        decode_tokens = _tokens_beside(flat, layout)
        if not all(fill_list(chunks, window, layout.list, target, decode_tokens) for window, target in lists.items()):
            return False
        self._pad(tokens, rows)
        if flat is not None:
            _fill(tokens, rows, flat)
        self.adapted = flat is not None and flat.adapters is not None
        self.one_pass = self.has_one_pass(size) and all(one_pass_alone(each, layout.list) for each in lists.values())
        if layout.max_loras:
            _fill_adapters(layout.adapters(host), None if flat is None else flat.adapters)
        length = layout.numbers if self.adapted or flat is None else layout.first_adapter
        buffer.send(self._static, length)
        return True

    def logit_tokens(self, flat: FlatPlan, size: int) -> Tensor | None:
        """Of the plan sent last, on the device, None where the graph computes those alone, first of all; its scores get
        their targets."""
        layout = self._layouts[size]
        if layout.wants_few:
            return None
        tokens, _, _ = layout.split(self._static[: layout.numbers])
        first = len(flat.sampling_rows)
        for score in flat.scores:
            score.wanted = tokens.targets[first : first + len(score.targets)]
            first += len(score.targets)
        return tokens.logit_tokens[:first]

    def _pad(self, tokens: TokenArrays[Ints], rows: RowArrays[Ints]) -> None:
        for array, value in zip(tokens, (PADDING, 0, -1, -1, 0, 0), strict=True):
            array[:] = value
        rows.slots[:] = self._arena.spec.num_slots
        for array in rows[1:]:
            array[:] = 0


def _tokens_beside(flat: FlatPlan | None, layout: Layout) -> int:
    """KV tokens of decode attention that runs beside that of the plan's chunks."""
    if flat is None or flat.adapters is not None or not layout.beside:
        return 0
    return int(flat.decode_kv_lens.sum())


def _runs_beside(
    workspace: DecodeWorkspace | None, layer: KvLayer, heads: Heads, dtype: torch.dtype, rows: int
) -> bool:
    like = torch.empty(0, heads.query, heads.dim, dtype=dtype, device=layer.payload.device)
    return runs_beside(like, layer, None if workspace is None else workspace.reserve(rows, None, 1, ALONE))


def _fill_adapters(arrays: AdapterArrays[Ints], adapters: Ints | None) -> None:
    arrays.slots[:] = -1
    arrays.order[:] = 0
    arrays.tiles[:] = 0
    if adapters is not None:
        arrays.slots[: len(adapters)] = adapters
        fill_tiles(adapters, arrays.order, arrays.tiles)


def _fill(tokens: TokenArrays[Ints], rows: RowArrays[Ints], flat: FlatPlan) -> None:
    decode, end, wanted = flat.num_decode, flat.tokens, len(flat.logit_tokens)
    tokens.prompt_ids[:decode] = DECODED
    tokens.prompt_ids[decode:end] = flat.prompt_ids
    tokens.positions[:end] = flat.positions
    tokens.kv_rows[:end] = flat.kv_rows
    if flat.granule_rows is not None:
        tokens.granule_rows[:end] = flat.granule_rows
    tokens.logit_tokens[:wanted] = flat.logit_tokens
    if flat.scores:
        tokens.targets[len(flat.sampling_rows) : wanted] = np.concatenate([score.targets for score in flat.scores])
    rows.slots[:decode] = rows.table_slots[:decode] = flat.decode_slots
    rows.base_rows[:decode] = flat.decode_base_rows
    rows.kv_lens[:decode] = flat.decode_kv_lens
    count = len(flat.sampling_rows)
    rows.wanted[:count] = flat.logit_tokens[:count]
    rows.wanted_base_rows[:count] = flat.sampled.base_rows
    rows.wanted_slots[:count] = flat.sampled.slots
    rows.wanted_kv_lens[:count] = flat.sampled.kv_lens
