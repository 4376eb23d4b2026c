"""RaggedAttention, prefill, for captured graphs: the chunks are a work list of fixed length in device memory.

What is captured is one launch (two where keys are divided) with a program for every entry that the list may have, and
one more where attention in one pass serves the layer and steps are large. The host writes the lists anew for every
step; entries that a step does not need have no queries, and their programs end at once. Decode rows and padding are in
no entry.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from bladellm_kernels.kv_dequantize import BLOCK_FIELDS
from bladellm_kernels.kv_layer import KvLayer
from bladellm_kernels.kv_read import kv_read
from bladellm_kernels.listed_scratch import listed_numbers, most_blocks, place_chunks
from bladellm_kernels.multiprocessors import multiprocessors
from bladellm_kernels.one_pass_gate import attends_fresh, one_pass_serves, one_pass_serves_numbers
from bladellm_kernels.one_pass_list import ENTRY_FIELDS, list_programs, programs_beside
from bladellm_kernels.prefill_costs import KERNEL_CALL, Heads, chunk_cost
from bladellm_kernels.prefill_routes import Routes, one_pass_routes
from bladellm_kernels.prefill_tiles import (
    ITEM_FIELDS,
    MERGE_FIELDS,
    PROGRAMS,
    PrefillTiles,
    Span,
    TileShape,
    list_tiles,
    tile_shape,
)
from bladellm_kernels.ragged_prefill_attention import ragged_prefill_attention, takes_kernels

ONE_PASS_TOKENS = 256
"""Steps of fewer are attended to by Triton alone: there is nothing to gain, and each launch takes its time."""
NO_BLOCKS = np.empty((0, BLOCK_FIELDS), np.int64)
NARROW_TILES = 16
"""Where attention in one pass takes what has no room elsewhere, tiles of chunks of few queries are all that is left."""


class ListShape(NamedTuple):
    """What is the same for all lists of a captured step: rows of a tile, query heads of a KV head, KV heads; entries
    that the list has room for, and of these the ones that may see a part of their keys; programs of attention in one
    pass, 0 without it; dimensions of a head; tokens of a step where that reads numbers made of codes
    (`listed_scratch`), else 0."""

    rows: int
    group: int
    kv_heads: int
    items: int
    merges: int
    parts: int
    programs: int = 0
    dim: int = 128
    scratch: int = 0

    @property
    def item_numbers(self) -> int:
        """int64 numbers of the items, with a spare one so that merges begin at a multiple of 16 bytes."""
        return (self.items * ITEM_FIELDS + 1) // 2 * 2

    @property
    def tile_numbers(self) -> int:
        """int64 numbers of the items and merges, a multiple of 16 bytes."""
        return self.item_numbers + (self.merges * MERGE_FIELDS + 1) // 2 * 2

    @property
    def numbers(self) -> int:
        """int64 numbers of the list, a multiple of 16 bytes."""
        return self.program_numbers + (self.blocks * BLOCK_FIELDS + 1) // 2 * 2

    @property
    def program_numbers(self) -> int:
        """int64 numbers of the items, merges and programs."""
        return self.tile_numbers + self.programs * ENTRY_FIELDS

    @property
    def blocks(self) -> int:
        """Of the numbers that attention in one pass reads."""
        return most_blocks(self.scratch) if self.scratch and self.programs else 0


class ListViews(NamedTuple):
    """A list on the device: tiles for the Triton kernel; programs of attention in one pass; blocks of the numbers that
    this reads. Tiles or programs may be None: not to be looked at. Blocks are None where it reads what is stored, or
    fresh."""

    tiles: PrefillTiles | None
    programs: torch.Tensor | None
    blocks: torch.Tensor | None = None


def one_pass_programs(tokens: int, kv: KvLayer, dtype: torch.dtype) -> int:
    """How many programs of attention in one pass lists of steps of `tokens` tokens have, queries of `dtype`."""
    fresh = attends_fresh(kv, dtype) and one_pass_serves_numbers(kv, dtype)
    if tokens < ONE_PASS_TOKENS or not (fresh or one_pass_serves(kv, dtype)):
        return 0
    return multiprocessors(kv.payload.device)


def list_shape(
    tokens: int,
    chunks: int,
    heads: Heads,
    dtype: torch.dtype,
    programs: int = 0,
    windows: bool = False,
    fresh: bool = False,
) -> ListShape:
    """For steps of up to `tokens` tokens in about `chunks` chunks, queries of `dtype`; programs: `one_pass_programs`;
    windows: whether lists are filled for some, too; fresh: `attends_fresh`.

    There is room for the parts of one chunk whose keys are divided, and unless all chunks can be attended to in one
    pass for every tile of such a step.
    """
    group = heads.query // heads.kv
    tile = _tile(tokens, group, heads.dim, dtype, heads.quantized)
    parts = max(2, PROGRAMS // heads.kv)
    all_in_one_pass = programs and not (windows or fresh)
    items = (NARROW_TILES if all_in_one_pass else -(-tokens * group // tile.rows) + chunks) + parts
    scratch = tokens if fresh else 0
    return ListShape(tile.rows, group, heads.kv, items, parts // 2, parts, programs, heads.dim, scratch)


def fill_list(
    spans: Sequence[Span], window: int | None, shape: ListShape, target: NDArray[np.int64], decode_tokens: int = 0
) -> bool:
    """Write the work of the chunks to `target`, int64 [shape.numbers], on the host. False where there is no room.

    decode_tokens: KV tokens of decode attention that runs beside this where all of it is in one pass.
    """
    if not shape.programs or window is not None:
        return _write(np.empty((0, ENTRY_FIELDS), np.int64), spans, window, shape, target)
    heads = Heads(shape.group * shape.kv_heads, shape.kv_heads, shape.dim, quantized=shape.scratch > 0)
    for chosen in one_pass_routes(tuple(spans), heads):
        routes, blocks = _placed(chosen, shape)
        programs = shape.programs
        if decode_tokens and routes.one_pass and not routes.stored:
            programs = programs_beside(routes.one_pass, heads, programs, decode_tokens)
        entries = list_programs(routes.one_pass, heads, programs)
        if _write(entries, routes.stored, window, shape, target, blocks):
            return True
    return False


def _placed(routes: Routes, shape: ListShape) -> tuple[Routes, NDArray[np.int64]]:
    """Routes on what attention in one pass reads, and the blocks of that."""
    if not shape.scratch:
        return routes, NO_BLOCKS
    placed = place_chunks(routes.one_pass, shape.scratch)
    return Routes(stored=routes.stored + placed.others, one_pass=placed.chunks), placed.blocks


def _write(
    entries: NDArray[np.int64],
    spans: Sequence[Span],
    window: int | None,
    shape: ListShape,
    target: NDArray[np.int64],
    blocks: NDArray[np.int64] = NO_BLOCKS,
) -> bool:
    """Programs of attention in one pass, and the tiles of chunks; False where there is no room."""
    items, merges = list_tiles(spans, shape.group, shape.kv_heads, window, shape.rows)
    parts = sum(item[8] >= 0 for item in items)
    room = len(items) <= shape.items and len(merges) <= shape.merges and parts <= shape.parts
    if not room or len(entries) > shape.programs:
        return False
    target[:] = 0
    parts_of = {0: items, shape.item_numbers: merges, shape.tile_numbers: entries, shape.program_numbers: blocks}
    for place, lines in parts_of.items():
        numbers = np.asarray(lines, np.int64).ravel()
        target[place : place + len(numbers)] = numbers
    return True


def one_pass_alone(numbers: NDArray[np.int64], shape: ListShape) -> bool:
    """Whether attention in one pass, where numbers are made of codes that of fresh ones, is all that a list of
    `fill_list` needs; on the host."""
    behind_prefix = False
    if shape.scratch:
        programs = numbers[shape.tile_numbers : shape.program_numbers].reshape(-1, ENTRY_FIELDS)
        behind_prefix = bool(programs[:, 2].any())
    return not (behind_prefix or numbers[: shape.items * ITEM_FIELDS].any())


def list_views(numbers: torch.Tensor, shape: ListShape) -> ListViews:
    """The list in int64 [shape.numbers] on the device, as `listed_prefill_attention` takes it."""
    last = shape.items * ITEM_FIELDS
    merges = numbers[shape.item_numbers :][: shape.merges * MERGE_FIELDS]
    tiles = PrefillTiles(numbers[:last].view(-1, ITEM_FIELDS), merges.view(-1, MERGE_FIELDS), shape.parts)
    programs = numbers[shape.tile_numbers : shape.program_numbers].view(-1, ENTRY_FIELDS)
    blocks = numbers[shape.program_numbers :][: shape.blocks * BLOCK_FIELDS].view(-1, BLOCK_FIELDS)
    return ListViews(tiles, programs if shape.programs else None, blocks if shape.blocks else None)


def listed_cost(spans: Sequence[Span], heads: Heads) -> float:
    """µs of `listed_prefill_attention` on a layer, by the model of `prefill_costs`."""
    return KERNEL_CALL + sum(chunk_cost(heads, span, heads.quantized, len(spans) == 1) for span in spans)


def listed_prefill_attention(
    q: torch.Tensor,
    kv: KvLayer,
    lists: ListViews,
    scale: float,
    window: int | None,
    out: torch.Tensor,
    fresh: KvLayer | None = None,
) -> None:
    """`ragged_prefill_attention` of the chunks in a list of `fill_list` for steps of as many tokens as q has.

    q, out: [T, Hq, D]. kv, fresh: as there, of any format. lists: from `list_views`, for the same window; without
    blocks fresh, if given, is what attention in one pass reads. Writes the rows of the chunks' tokens and no others. On
    CUDA it launches only, reads lengths on the device, and can be captured.
    """
    read = fresh or kv
    if lists.blocks is not None and lists.programs is not None and window is None:
        read = listed_numbers(kv, lists.blocks, len(q), q.dtype)
    tile = _tile(q.shape[0], q.shape[1] // kv.kv_heads, kv.head_dim, q.dtype, kv.format.quantized)
    if not takes_kernels(q, kv):
        if lists.programs is not None and window is None:
            _attend_to_chunks(q, read, lists.programs, scale, out)
        if lists.tiles is not None:
            _attend_plainly(q, kv, lists.tiles, tile.rows, scale, window, out)
        return
    from bladellm_kernels import one_pass_prefill, ragged_prefill_triton

    if lists.programs is not None and window is None:
        one_pass_prefill.launch_listed(q, read, lists.programs, scale, out)
    if lists.tiles is not None:
        ragged_prefill_triton.launch_tiles(q, kv, lists.tiles, tile, scale, window, out, True)


def _tile(tokens: int, group: int, head_dim: int, dtype: torch.dtype, quantized: bool) -> TileShape:
    return tile_shape(head_dim, dtype, quantized, tokens * group)


def _attend_to_chunks(q: torch.Tensor, kv: KvLayer, programs: torch.Tensor, scale: float, out: torch.Tensor) -> None:
    """The chunks of the programs, of which each chunk has a first one."""
    for first, query_len, start, base_row, place, _ in programs.tolist():
        if query_len and place == 0:
            ragged_prefill_attention(q, kv, [Span(first, query_len, start, base_row, 0)], scale, None, out)


def _attend_plainly(
    q: torch.Tensor, kv: KvLayer, tiles: PrefillTiles, rows: int, scale: float, window: int | None, out: torch.Tensor
) -> None:
    """The list by PyTorch's operators, entry by entry; reads it on the host."""
    group = q.shape[1] // kv.kv_heads
    parts: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    for first_row, first, query_len, start, base_row, slot, key_first, key_end, part in tiles.items.tolist():
        if not query_len:
            continue
        row = torch.arange(first_row, min(first_row + rows, query_len * group), device=q.device)
        queries = _by_kv_head(q[first : first + query_len], kv.kv_heads)[:, row].float()
        k, v = kv_read(kv, base_row, slot, key_first, key_end, torch.float32).permute(1, 2, 0, 3)
        key = torch.arange(key_first, key_end, device=q.device)
        position = (start + row // group).unsqueeze(1)
        visible = key <= position if window is None else (key <= position) & (key > position - window)
        scores = (queries @ k.transpose(1, 2) * scale).masked_fill(~visible, float("-inf"))
        # A row may see no key of its part.
        attended, lse = scores.softmax(-1).nan_to_num(0.0) @ v, scores.logsumexp(-1)
        if part < 0:
            _store(attended, out[first : first + query_len], row, group)
        else:
            parts[part] = attended, lse
    for first_row, first, query_len, part, count in tiles.merges.tolist():
        if query_len:
            row = torch.arange(first_row, min(first_row + rows, query_len * group), device=q.device)
            attended, lse = (torch.stack(each) for each in zip(*(parts[part + i] for i in range(count)), strict=True))
            merged = (attended * lse.softmax(0).unsqueeze(-1)).sum(0)
            _store(merged, out[first : first + query_len], row, group)


def _by_kv_head(q: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """q [n, Hq, D] -> [Hk, n · group, D], rows as in `list_tiles`."""
    queries, heads, head_dim = q.shape
    return q.view(queries, kv_heads, heads // kv_heads, head_dim).transpose(0, 1).flatten(1, 2)


def _store(attended: torch.Tensor, out: torch.Tensor, row: torch.Tensor, group: int) -> None:
    """attended [Hk, rows, D] to out [n, Hq, D]."""
    kv_heads = attended.shape[0]
    target = out.unflatten(1, (kv_heads, group))
    target[row // group, :, row % group] = attended.transpose(0, 1).to(out.dtype)
