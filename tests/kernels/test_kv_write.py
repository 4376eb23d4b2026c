"""kv_write in every format: what it stores, what kv_read gives back, and what it leaves alone."""

import json

import pytest
import torch
from bladellm_kernels.kv_format import KV_FORMATS
from bladellm_kernels.kv_layer import KvLayer
from bladellm_kernels.kv_read import granule_rows, kv_read
from bladellm_kernels.kv_write import kv_write, kv_write_reference

from tests.kernels.conditions import DEVICES, DTYPES
from tests.kernels.kv_memory import KINDS, QUANTIZED, Memory, check_nearest, memory, numbers
from tests.support.cases import some_pairs
from tests.support.warm import ROOT, run_script

FORMATS = list(KV_FORMATS)
LAYOUTS = [{}, {"mapped": True}, {"paged": True}]
SIZES = [(1, 1, 2), (19, 3, 18), (7, 8, 64), (48, 2, 6)]
"""Tokens, heads, and numbers of a head."""


def tokens_of(kind: str, tokens: int, heads: int, dim: int, dtype: torch.dtype, device: str) -> torch.Tensor:
    """[T, heads, D] cut out of something wider, as out of qkv."""
    return numbers(kind, tokens, heads + 4, dim, dtype=dtype).to(device)[:, 2 : 2 + heads]


def written(memory: Memory, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Payload rows and granule rows of `tokens` tokens, neither of them in order."""
    device = memory.kv.payload.device
    rows = torch.randperm(48, device=device)[:tokens]
    return rows, rows if memory.kv.paged else torch.randperm(48, device=device)[:tokens]


def same_bits(actual: KvLayer, expected: KvLayer) -> None:
    assert torch.equal(actual.payload.contiguous().view(torch.uint8), expected.payload.contiguous().view(torch.uint8))
    if actual.scales is not None and expected.scales is not None:
        torch.testing.assert_close(actual.scales, expected.scales, atol=0, rtol=0, equal_nan=True)


def twin(memory: Memory) -> KvLayer:
    """The same layer in memory of its own."""
    kv = memory.kv
    scales = None if kv.scales is None else kv.scales.clone()
    return KvLayer(kv.payload.clone(), kv.format, kv.granule_tokens, kv.table, scales, kv.paged)


@pytest.mark.turns
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(("layout", "size"), some_pairs(LAYOUTS, SIZES), ids=str)
def test_it_writes_its_rows_and_scales_and_nothing_else(device, dtype, layout, name, size):
    tokens, heads, dim = size
    given = memory(name, heads, dim, dtype, device, **layout)
    expected = twin(given)
    rows, places = written(given, tokens)
    k, v = (tokens_of("normal", tokens, heads, dim, dtype, device) for _ in range(2))
    kv_write(given.kv, rows, k, v, None if given.kv.paged else places)
    kv_write_reference(expected, rows, k, v, places)
    same_bits(given.kv, expected)
    given.untouched_but(rows, places)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("name", FORMATS)
def test_rows_of_minus_one_store_nothing(device, layout, name):
    """Padding of a fixed batch, whose K and V may be anything; a batch of nothing else included."""
    given = memory(name, 3, 16, torch.float32, device, **layout)
    expected = twin(given)
    rows, places = written(given, 13)
    k, v = (tokens_of("normal", 13, 3, 16, torch.float32, device) for _ in range(2))
    kept = torch.rand(13, device=device) < 0.5
    k[~kept], v[~kept] = torch.nan, torch.inf
    kv_write_reference(expected, rows[kept], k[kept], v[kept], places[kept])
    for here in (kept, torch.zeros_like(kept)):
        padded = torch.where(here, rows, -1)
        kv_write(given.kv, padded, k, v, None if given.kv.paged else torch.where(here, places, -1))
        same_bits(given.kv, expected)
    given.untouched_but(rows[kept], places[kept])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("name", "kind"), some_pairs(QUANTIZED, KINDS), ids=str)
def test_numbers_of_every_kind(device, name, kind):
    """On CUDA: the kernel gives the bits of the reference."""
    given = memory(name, 4, 32, torch.float32, device)
    expected = twin(given)
    rows, places = written(given, 48)
    k, v = (tokens_of(kind, 48, 4, 32, torch.float32, device) for _ in range(2))
    k[3, 2, 7], v[5, 0, 31], v[6, 1, 0], k[8, 0] = torch.nan, torch.inf, -torch.inf, torch.nan
    kv_write(given.kv, rows, k, v, places)
    kv_write_reference(expected, rows, k, v, places)
    same_bits(given.kv, expected)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("name", FORMATS)
def test_kv_read_gives_back_what_was_written(device, dtype, layout, name):
    """A sequence of 21 tokens at base row 16, its granules anywhere, written in two parts."""
    given = memory(name, 3, 16, dtype, device, **layout)
    places = granule_rows(given.kv, 0, 0, 21)
    rows = places if given.kv.paged else torch.arange(16, 37, device=device)
    k, v = (tokens_of("outliers", 21, 3, 16, dtype, device) for _ in range(2))
    for part in (slice(0, 8), slice(8, 21)):
        kv_write(given.kv, rows[part], k[part], v[part], places[part])
    stored = torch.stack((k, v), 1).cpu()
    back = kv_read(given.kv, 16, 0, 0, 21).cpu()
    if not given.kv.format.quantized:
        assert torch.equal(back, stored)
        return
    assert back.dtype == torch.float32
    assert given.kv.scales is not None
    scales = given.kv.scales[places // 8, ..., places % 8].transpose(1, 2)
    codes = given.kv.payload[rows]
    check_nearest(stored, codes.cpu(), scales.cpu(), given.kv.format)
    steps = scales[..., :1].float().cpu() * given.kv.format.highest
    assert ((back - stored.float()).abs() <= steps / 14 + 1e-3).all()
    part = kv_read(given.kv, 16, 0, 5, 18, dtype)
    assert torch.equal(part.cpu(), back[5:18].to(dtype))


@pytest.mark.parametrize("name", FORMATS)
def test_tokens_of_negative_rows_are_not_stored(device, name):
    """Padding of a captured step: neither payload nor scales, wherever its granule row points."""
    for places_too in (False, True):
        given = memory(name, 3, 16, torch.float32, device)
        expected = twin(given)
        rows, places = written(given, 9)
        k, v = (tokens_of("normal", 9, 3, 16, torch.float32, device) for _ in range(2))
        padding = torch.tensor([0, 3, 4, 8], device=device)
        rows[padding] = torch.tensor([-1, -1, -48, -1], device=device)
        if places_too:
            places[padding] = -1
        stored = rows >= 0
        kv_write(given.kv, rows, k, v, places)
        kv_write_reference(expected, rows, k, v, places)
        same_bits(given.kv, expected)
        given.untouched_but(rows[stored], places[stored])
        kv_write(given.kv, torch.full_like(rows, -1), k, v, places)
        same_bits(given.kv, expected)


@pytest.mark.parametrize("name", FORMATS)
def test_no_tokens(device, name):
    given = memory(name, 2, 8, torch.float32, device)
    none = torch.empty(0, dtype=torch.int64, device=device)
    kv_write(given.kv, none, *[torch.empty(0, 2, 8, device=device)] * 2, none)
    given.untouched_but(none, none)


@pytest.mark.parametrize("name", ["no_quant", "int4_affine", "fp8_e4m3"])
@pytest.mark.parametrize("dim", [6, 24, 64, 128, 256])
def test_heads_of_every_size(device, name, dim):
    given = memory(name, 5, dim, torch.bfloat16, device, mapped=True)
    expected = twin(given)
    rows, places = written(given, 11)
    k, v = (tokens_of("mixed", 11, 5, dim, torch.bfloat16, device) for _ in range(2))
    kv_write(given.kv, rows, k, v, places)
    kv_write_reference(expected, rows, k, v, places)
    same_bits(given.kv, expected)


def test_wrong_arguments_are_refused(device):
    def refused(match: str, kv: KvLayer, rows: torch.Tensor, k: torch.Tensor, *places: torch.Tensor) -> None:
        with pytest.raises(ValueError, match=match):
            kv_write(kv, rows, k, k, *places)

    plain = memory("no_quant", 2, 8, torch.float32, device).kv
    rows, k = torch.arange(3, device=device), torch.randn(3, 2, 8, device=device)
    refused("k and v must be", plain, rows, k[:2])
    refused("k and v must be", plain, rows, k[:, :1])
    refused("must be torch.float32 as the memory is", plain, rows, k.half())
    refused("rows must be int64", plain, rows.int(), k)
    refused("last dimension of k must be contiguous", plain, rows, torch.randn(3, 8, 2, device=device).transpose(1, 2))
    quantized = memory("int8", 2, 8, torch.float32, device).kv
    refused("int8 needs scales and granule_rows", quantized, rows, k)
    refused("granule_rows must be int64", quantized, rows, k, rows[:2])
    refused("needs scales", KvLayer(quantized.payload, quantized.format, 8), rows, k, rows)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["no_quant", "int8", "int4_affine"])
def test_rows_beyond_32_bits(name):
    """Rows of 4 KiB, the last of them past 2^32 bytes and elements."""
    format = KV_FORMATS[name]
    dtype, count = format.dtype(torch.bfloat16), 2**32 // 4096 + 300
    payload = torch.zeros(count, 2, 2, 1024, dtype=dtype, device="cuda")[..., : format.width(128)]
    scales = torch.zeros(2, 2, 2, format.planes, 256, dtype=torch.float16, device="cuda") if format.planes else None
    kv = KvLayer(payload, format, 256, torch.tensor([[1]], dtype=torch.int32, device="cuda"), scales)
    k, v = (numbers("normal", 256, 2, 128, dtype=torch.bfloat16).cuda() for _ in range(2))
    rows = torch.arange(count - 256, count, device="cuda")
    kv_write(kv, rows, k, v, torch.arange(256, 512, device="cuda"))
    back = kv_read(kv, count - 256, 0, 0, 256).cpu().float()
    limit = 0.5 if name.startswith("int4") else 0.05
    assert (back - torch.stack((k, v), 1).cpu().float()).abs().max() < limit
    assert not payload[: count - 256].any()


def test_the_benchmark_runs_on_a_cpu(tmp_path):
    flags = ["--device", "cpu", "--tokens", "1", "5", "--rotate", "--heads", "4", "--kv_heads", "2", "--head_dim", "16"]
    flags += ["--seconds", "0.001", "--json", tmp_path / "b.json"]
    done = run_script(ROOT / "kernels" / "benchmarks" / "kv_write.py", *flags)
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "b.json").read_text())["rows"]
    assert [(row["format"], row["rotate"], row["tokens"]) for row in rows] == [
        (name, rotate, tokens) for name in FORMATS for rotate in (False, True) for tokens in (1, 5)
    ]
    # q twice, k, v and both tables; then bfloat16 or codes with scales.
    plain = 2 * 4 * 16 * 2 + 2 * 2 * 16 * 2 + 2 * 16 * 4
    stored = {(row["format"], row["tokens"]): row["moved"] - row["tokens"] * plain for row in rows}
    assert stored["no_quant", 5] == 5 * 2 * 2 * 16 * 2
    assert stored["int4_affine", 1] == 2 * 2 * (8 + 4)
