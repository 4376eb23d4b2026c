"""The Triton kernel of ragged prefill attention: its work list, interpreted on the CPU, and compiled for Hopper."""

import random
from collections.abc import Iterable
from itertools import product

import pytest
import torch
from bladellm_kernels import prefill_tiles
from bladellm_kernels.kv_dequantize import dequantized_layers
from bladellm_kernels.kv_format import KV_FORMATS
from bladellm_kernels.kv_layer import KvLayer
from bladellm_kernels.prefill_tiles import Span, TileShape, list_tiles, tile_shape
from bladellm_kernels.ragged_prefill_attention import ragged_prefill_attention_reference
from hypothesis import given
from hypothesis import strategies as st

from tests.kernels.conditions import assert_close
from tests.kernels.hopper import products_left_under_way
from tests.kernels.interpreted import run_interpreted
from tests.kernels.prefill_support import SPANS, hopper, kv_memory, prefill_case
from tests.support.cases import some_of

spans = st.lists(
    st.tuples(st.integers(1, 300), st.integers(0, 5000)).map(lambda pair: Span(0, pair[0], pair[1], 0, 0)),
    min_size=1,
    max_size=4,
)


@given(spans, st.sampled_from([1, 3, 8]), st.sampled_from([1, 8]), st.sampled_from([None, 1, 100, 4000]))
def test_items_hold_every_visible_key_of_every_row_once(chunks, group, kv_heads, window):
    chunks = [span._replace(slot=index, first=1000 * index) for index, span in enumerate(chunks)]
    items, merges = list_tiles(chunks, group, kv_heads, window, 64)
    lengths = [item[7] - item[6] for item in items]
    assert lengths == sorted(lengths, reverse=True)
    for span in chunks:
        own = [item for item in items if item[5] == span.slot]
        assert {item[0] for item in own} == set(range(0, span.query_len * group, 64))
        for first_row in range(0, span.query_len * group, 64):
            parts = sorted((item for item in own if item[0] == first_row), key=lambda item: item[6])
            assert all(item[1:5] == [span.first, span.query_len, span.start, 0] for item in parts)
            lowest = span.start + first_row // group
            last_row = min(first_row + 63, span.query_len * group - 1)
            seen_from = 0 if window is None else max(0, lowest - window + 1)
            bounds = [item[6] for item in parts] + [parts[-1][7]]
            assert bounds[0] == seen_from
            assert bounds[-1] == span.start + last_row // group + 1
            assert bounds == sorted(set(bounds))
            assert [item[7] for item in parts] == bounds[1:]
            merged = [line for line in merges if line[:3] == [first_row, span.first, span.query_len]]
            numbers = [item[8] for item in parts]
            if len(parts) == 1:
                assert (numbers, merged) == ([-1], [])
            else:
                assert [line[3:] for line in merged] == [[numbers[0], len(parts)]]
                assert numbers == list(range(numbers[0], numbers[0] + len(parts)))
    numbers = sorted(item[8] for item in items if item[8] >= 0)
    assert numbers == list(range(len(numbers)))


@given(spans, st.sampled_from([None, 700]))
def test_a_chunk_is_cut_alike_whatever_is_beside_it(chunks, window):
    chunks = [span._replace(slot=index) for index, span in enumerate(chunks)]
    together, _ = list_tiles(chunks, 4, 8, window, 128)
    for span in chunks:
        alone, _ = list_tiles([span], 4, 8, window, 128)
        own = [item[:8] for item in together if item[5] == span.slot]
        assert sorted(own) == sorted(item[:8] for item in alone)


def test_keys_of_a_short_chunk_behind_a_long_prefix_are_divided():
    items, merges = list_tiles([Span(0, 30, 32768, 0, 0)], 4, 8, None, 128)
    assert 8 * len(items) >= 96
    assert merges == [[0, 0, 30, 0, len(items)]]


def check(case, dtype, window, tile):
    from bladellm_kernels.ragged_prefill_triton import launch

    q, kv, chunks = case
    prefill_tiles.tiles_on_device.cache_clear()
    out = torch.full(q.shape, 7.0, dtype=dtype)
    launch(q, kv, chunks, 0.21, window, out, tile)
    assert (out[:2] == 7).all()
    assert_close(out[2:], ragged_prefill_attention_reference(q, kv, chunks, 0.21, window)[2:], dtype)


def check_dequantized(q, kv, chunks, window) -> None:
    """The kernel on numbers made of codes, with base rows that may lie before the first number."""
    from bladellm_kernels.ragged_prefill_triton import launch

    out = torch.full(q.shape, torch.nan)
    for plain, moved in dequantized_layers(kv, chunks, window, torch.float32, 60 * 2 * kv.kv_heads * kv.head_dim):
        launch(q, plain, moved, 0.21, window, out, TileShape(16, 16, 4, 1))
    assert_close(out[2:], ragged_prefill_attention_reference(q, kv, chunks, 0.21, window)[2:], torch.float32)


def interpreted_some_unquantized() -> None:
    interpreted_unquantized(random.sample(range(5), 1))


def interpreted_unquantized(places: Iterable[int] = range(5)) -> None:
    """Tiles of 16 and 32, one part and many, every window; the padding of heads that are no power of two."""
    short = [span for span in SPANS if span[1] < 70]
    tiles = [TileShape(16, 16, 4, 1), TileShape(32, 16, 4, 1), TileShape(16, 32, 4, 1)]
    cases = zip(
        [(6, 2, 32), (1, 1, 8), (7, 1, 24), (4, 4, 16), (6, 2, 32)],
        [None, 1, 6, 23, 200],
        [1024, 16, 16, 7, 32],
        tiles * 2,
        strict=False,
    )
    for heads, window, part, tile in [case for place, case in enumerate(cases) if place in places]:
        prefill_tiles.PART_KEYS = part
        check(prefill_case("no_quant", torch.float32, heads, short, mapped=part == 16), torch.float32, window, tile)
    check(prefill_case("no_quant", torch.float16, (6, 2, 32), short, paged=True), torch.float16, None, tiles[0])
    # A window with room for tiles of keys that every row of a tile sees.
    check(prefill_case("no_quant", torch.float32, (2, 2, 16), [(40, 50)]), torch.float32, 45, tiles[0])


def interpreted_some_quantized() -> None:
    """Each format in one of the types, with windows and without, in every kind of memory."""
    interpreted_quantized(random.sample([0, 3, 5, 6, 9, 10, 12], 2))


def interpreted_quantized(places: list[int] | None = None) -> None:
    cases = list(enumerate(product(KV_FORMATS, (torch.float32, torch.float16))))
    for index, (name, dtype) in [cases[place] for place in places] if places else cases:
        heads = (3, 1, 24) if index % 3 else (2, 2, 16)
        case = prefill_case(
            name, dtype, heads, [(13, 7), (0, 19), (30, 21)], paged=index % 2 == 1, mapped=index % 3 == 1
        )
        q, kv, chunks = case
        if kv.format.quantized and dtype == torch.float32:
            check_dequantized(q, kv, chunks, [None, 9][index % 2])
        check(case, dtype, 9 if index % 4 == 1 else None, TileShape(16, 16, 4, 1))


INTERPRETED = [
    "interpreted_some_unquantized", "interpreted_some_quantized", "interpreted_unquantized", "interpreted_quantized"
]  # fmt: skip


@pytest.mark.parametrize("call", some_of(INTERPRETED, INTERPRETED[:2]))
def test_the_kernel_interpreted_gives_the_reference(call):
    pytest.importorskip("triton")
    run_interpreted("tests.kernels.test_ragged_prefill_triton", call)


def compiled_text(name: str, dtype: torch.dtype, heads: tuple[int, int, int], paged: bool, window: int | None) -> str:
    """PTX of the kernel as a launch on CUDA with the default tile compiles it for long chunks."""
    from bladellm_kernels import ragged_prefill_triton as kernels

    query_heads, kv_heads, head_dim = heads
    format = KV_FORMATS[name]
    table = torch.zeros(2, 4, dtype=torch.int32)
    scales = torch.zeros(4, kv_heads, 2, format.planes, 16, dtype=torch.float16) if format.quantized else None
    kv = KvLayer(kv_memory(format, dtype, kv_heads, head_dim, 64, True, "cpu"), format, 16, table, scales, paged)
    tile = tile_shape(head_dim, dtype, format.quantized, 4096)
    q = torch.empty(16, query_heads + 2 * kv_heads, head_dim, dtype=dtype)[:, :query_heads]
    shape = kernels.kernel_shape(kv, query_heads // kv_heads, tile, window is not None, dtype)
    rows, numbers = kernels.Rows(q, q.stride(0), q.stride(1)), torch.zeros(16)
    items, memory = torch.zeros(9, dtype=torch.int64), kernels.kernel_memory(kv)
    with hopper(kernels.ragged_prefill_kernel):
        compiled = kernels.ragged_prefill_kernel.warmup(
            rows, rows, memory, items, numbers, numbers, 0.1, window or 0,
            FIELDS=9, SHAPE=shape, num_warps=tile.warps, num_stages=tile.stages, grid=(1,), EARLY=True,
            launch_pdl=True,
        )  # fmt: skip
    assert not products_left_under_way(compiled.asm["ttgir"])
    return compiled.asm["ptx"]


@pytest.mark.parametrize(
    ("name", "dtype", "heads", "paged", "window"),
    [
        ("no_quant", torch.bfloat16, (32, 8, 128), False, None),
        pytest.param("no_quant", torch.float16, (28, 4, 64), True, 1024, marks=pytest.mark.slow),
        pytest.param("no_quant", torch.bfloat16, (8, 1, 256), False, None, marks=pytest.mark.slow),
        pytest.param("int8", torch.bfloat16, (32, 8, 128), False, None, marks=pytest.mark.slow),
        ("int4_affine", torch.bfloat16, (40, 40, 128), True, None),
        pytest.param("fp8_e4m3", torch.float16, (32, 8, 96), False, None, marks=pytest.mark.slow),
        pytest.param("fp8_e5m2", torch.bfloat16, (32, 8, 128), False, 512, marks=pytest.mark.slow),
    ],
)
def test_half_precision_compiles_to_hopper_products(name, dtype, heads, paged, window):
    pytest.importorskip("triton")
    text = compiled_text(name, dtype, heads, paged, window)
    assert "wgmma.mma_async" in text
    assert "mma.sync" not in text
    assert "cp.async" in text, "tiles are not fetched ahead"


def test_float32_compiles_to_exact_products():
    pytest.importorskip("triton")
    text = compiled_text("no_quant", torch.float32, (4, 2, 64), False, None)
    assert "fma.rn.f32" in text
    assert "mma" not in text, "tensor cores round float32"
