"""rotary_kv_write against complex rotation and kv_write, and its CUDA kernel interpreted and compiled on the CPU."""

import random
from itertools import cycle, product
from typing import Any

import pytest
import torch
from bladellm_kernels.hadamard import hadamard_matrix, hadamard_reference
from bladellm_kernels.kv_format import KV_FORMATS
from bladellm_kernels.kv_read import dequantize_kv
from bladellm_kernels.kv_write import kv_write_reference
from bladellm_kernels.rms_norm import rms_norm_reference
from bladellm_kernels.rotary import rotary_reference, rotary_tables
from bladellm_kernels.rotary_kv_write import HeadNorms, rotary_kv_write, rotary_kv_write_reference

from tests.kernels.conditions import DEVICES, DTYPES, TOLERANCE, assert_close
from tests.kernels.hopper import compiled_launches, spilled, waits_before_it_writes
from tests.kernels.interpreted import run_interpreted
from tests.kernels.kv_memory import KINDS, QUANTIZED, Memory, memory, numbers
from tests.kernels.test_kv_write import LAYOUTS, same_bits, tokens_of, twin, written
from tests.support.cases import some_of, some_pairs

FORMATS = list(KV_FORMATS)
TYPES = (torch.float32, torch.float16)
SHAPES = [(1, 1, 1, 2), (5, 8, 2, 32), (13, 7, 1, 18), (19, 3, 3, 64)]


def problem(tokens: int, heads: int, kv_heads: int, dim: int, dtype: torch.dtype, device: str) -> dict[str, Any]:
    """q, k and v as views of one qkv; positions and frequencies."""
    qkv = numbers("normal", tokens, heads + 2 * kv_heads, dim, dtype=dtype).to(device)
    q, k, v = qkv.split((heads, kv_heads, kv_heads), 1)
    positions = torch.randint(0, 5000, (tokens,), device=device)
    return {"q": q, "k": k, "v": v, "angles": (positions, torch.rand(dim // 2, device=device), 1.25)}


def called(given: Memory, parts: dict[str, Any], tokens: int, **options: Any) -> tuple[torch.Tensor, Any, Any]:
    rows, places = written(given, tokens)
    tables = rotary_tables(*parts["angles"])
    q = rotary_kv_write(parts["q"], parts["k"], parts["v"], *tables, given.kv, rows, places, **options)
    return q, rows, places


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize(("tokens", "heads", "kv_heads", "dim"), SHAPES)
def test_queries_and_keys_turn_and_values_do_not(device, dtype, layout, tokens, heads, kv_heads, dim):
    given = memory("no_quant", kv_heads, dim, dtype, device, **layout)
    parts = problem(tokens, heads, kv_heads, dim, dtype, device)
    kept = [parts[name].clone() for name in "qkv"]
    q, rows, places = called(given, parts, tokens)
    assert_close(q, rotary_reference(parts["q"], *parts["angles"]), dtype)
    assert_close(given.kv.payload[rows, 0], rotary_reference(parts["k"], *parts["angles"]), dtype)
    assert torch.equal(given.kv.payload[rows, 1], parts["v"])
    assert all(torch.equal(parts[name], before) for name, before in zip("qkv", kept, strict=True))
    given.untouched_but(rows, places)


@pytest.mark.turns
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("rotate", [False, True])
@pytest.mark.parametrize("name", QUANTIZED)
def test_turned_keys_are_quantized(device, dtype, layout, rotate, name):
    """Keys read back within a step of the turned ones, values are those of kv_write to the bit."""
    given = memory(name, 3, 32, dtype, device, **layout)
    parts = problem(17, 6, 3, 32, dtype, device)
    matrix = hadamard_matrix(32, dtype, device) if rotate else None
    q, rows, places = called(given, parts, 17, rotate=matrix)
    expected_q, expected_k = (rotary_reference(parts[part], *parts["angles"]) for part in "qk")
    if rotate:
        expected_q, expected_k = hadamard_reference(expected_q).float(), hadamard_reference(expected_k).float()
    assert_close(q, expected_q, dtype)
    assert given.kv.scales is not None
    scales = given.kv.scales[places // 8, :, 0, :, places % 8]
    back = dequantize_kv(given.kv.payload[rows, 0], scales, given.kv.format)
    steps = {"fp8_e4m3": 448 / 16, "fp8_e5m2": 57344 / 8, "fp12_e4m7": 2**-8}.get(name, 0.5)
    assert ((back - expected_k).abs() <= scales[..., :1].float() * steps * 1.01 + 1e-2).all()
    same = twin(given)
    kv_write_reference(same, rows, parts["k"], parts["v"], places)
    assert torch.equal(given.kv.payload[rows, 1].float(), same.payload[rows, 1].float())
    given.untouched_but(rows, places)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("rotate", [False, True])
@pytest.mark.parametrize("normed", [False, True])
def test_turned_keys_are_left_where_they_came_from(device, rotate, normed):
    """The very numbers that unquantized memory gets; queries and values beside them stay as they were."""
    dtype = torch.bfloat16
    given, parts = memory("no_quant", 3, 32, dtype, device), problem(17, 6, 3, 32, dtype, device)
    kept = {name: parts[name].clone() for name in "qv"}
    norms = HeadNorms(*torch.randn(2, 32, device=device).to(dtype), 1e-5) if normed else None
    matrix = hadamard_matrix(32, dtype, device) if rotate else None
    _, rows, _ = called(given, parts, 17, norms=norms, rotate=matrix, keep_keys=True)
    assert torch.equal(parts["k"], given.kv.payload[rows, 0])
    assert all(torch.equal(parts[name], before) for name, before in kept.items())


@pytest.mark.parametrize("rotate", [False, True])
@pytest.mark.parametrize("dim", [24, 40, 96, 128, 256])
def test_heads_of_every_size(device, dim, rotate):
    dtype = torch.bfloat16
    given = memory("no_quant", 2, dim, dtype, device)
    expected = twin(given)
    parts = problem(9, 6, 2, dim, dtype, device)
    matrix = hadamard_matrix(dim, dtype, device) if rotate else None
    q, rows, places = called(given, parts, 9, rotate=matrix)
    tables = rotary_tables(*parts["angles"])
    expected_q = rotary_kv_write_reference(*(parts[n] for n in "qkv"), *tables, expected, rows, places, rotate=matrix)
    assert_close(q, expected_q.float(), dtype)
    assert_close(given.kv.payload[rows], expected.payload[rows].float(), dtype)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("tokens", "heads", "kv_heads", "dim"), SHAPES)
def test_heads_are_normalised_before_they_turn(device, dtype, tokens, heads, kv_heads, dim):
    given = memory("no_quant", kv_heads, dim, dtype, device)
    parts = problem(tokens, heads, kv_heads, dim, dtype, device)
    norms = HeadNorms(*torch.randn(2, dim, device=device).to(dtype), 1e-4)
    q, rows, places = called(given, parts, tokens, norms=norms)
    for part, weight, actual in (("q", norms.q_weight, q), ("k", norms.k_weight, given.kv.payload[rows, 0])):
        expected = rotary_reference(rms_norm_reference(parts[part], weight, 1e-4), *parts["angles"])
        torch.testing.assert_close(actual.float(), expected, atol=3 * TOLERANCE[dtype], rtol=3 * TOLERANCE[dtype])
    assert torch.equal(given.kv.payload[rows, 1], parts["v"])
    given.untouched_but(rows, places)


def test_padding_turns_queries_but_stores_nothing(device):
    given = memory("int4_affine", 2, 16, torch.float32, device)
    parts = problem(5, 4, 2, 16, torch.float32, device)
    rows, places = written(given, 5)
    rows[1], rows[4] = -1, -1
    q = rotary_kv_write(*(parts[n] for n in "qkv"), *rotary_tables(*parts["angles"]), given.kv, rows, places)
    assert_close(q, rotary_reference(parts["q"], *parts["angles"]), torch.float32)
    given.untouched_but(rows[rows >= 0], places[rows >= 0])


def test_out_may_be_given_or_be_the_queries(device):
    for inside in (False, True):
        given = memory("int8", 2, 16, torch.float32, device)
        parts = problem(6, 4, 2, 16, torch.float32, device)
        expected = rotary_reference(parts["q"], *parts["angles"])
        keys = parts["k"].clone()
        out = parts["q"] if inside else torch.full((6, 9, 16), torch.nan, device=device)[:, 3:7]
        q, _, _ = called(given, parts, 6, out=out)
        assert q is out
        assert_close(out, expected, torch.float32)
        assert torch.equal(parts["k"], keys)


def test_strides_of_all_kinds(device):
    """Heads outermost, as after a normalisation that transposes."""
    given = memory("int4_affine", 3, 16, torch.float32, device)
    expected = twin(given)
    parts = problem(11, 5, 3, 16, torch.float32, device)
    plain = {name: parts[name].contiguous() for name in "qkv"}
    parts |= {name: x.transpose(0, 1).contiguous().transpose(0, 1) for name, x in plain.items()}
    q, rows, places = called(given, parts, 11)
    tables = rotary_tables(*parts["angles"])
    expected_q = rotary_kv_write_reference(plain["q"], plain["k"], plain["v"], *tables, expected, rows, places)
    assert_close(q, expected_q, torch.float32)
    assert torch.equal(given.kv.payload[:, 1], expected.payload[:, 1])
    assert (given.kv.payload[:, 0] != expected.payload[:, 0]).float().mean() < (0.02 if device == "cuda" else 1e-9)


def test_wrong_arguments_are_refused(device):
    kv = memory("no_quant", 2, 8, torch.float32, device).kv
    parts = problem(3, 4, 2, 8, torch.float32, device)
    cos, sin = rotary_tables(*parts["angles"])
    rows = torch.arange(3, device=device)
    good = {**{name: parts[name] for name in "qkv"}, "cos": cos, "sin": sin, "rotate": None, "out": None}
    for bad in (
        {"q": parts["q"][:2]},
        {"q": parts["q"].half()},
        {"out": torch.empty(3, 3, 8, device=device)},
        {"cos": cos[:2]},
        {"cos": cos.double()},
        {"sin": sin.expand(3, 2, 8)[:, 1:]},
        {"rotate": hadamard_matrix(4, torch.float32, device)},
        {"rotate": hadamard_matrix(8, torch.float16, device)},
        {"norms": HeadNorms(torch.ones(8, device=device), torch.ones(4, device=device), 1e-6)},
        {"norms": HeadNorms(torch.ones(8, device=device).half(), torch.ones(8, device=device), 1e-6)},
        {"q": parts["q"].transpose(1, 2).contiguous().transpose(1, 2)},
    ):
        args = good | bad
        q, k, v = (args.pop(name) for name in "qkv")
        if "sin" in bad:
            args["cos"] = torch.cat((cos, cos), 1)[:, :1]
        with pytest.raises(ValueError, match=r"must (be|have)"):
            rotary_kv_write(q, k, v, args.pop("cos"), args.pop("sin"), kv, rows, **args)


def interpreted_sample() -> None:
    """Some formats, each in one of the types."""
    interpreted(random.sample(list(zip(cycle(random.sample(TYPES, len(TYPES))), FORMATS, strict=False)), 2))


def interpreted(cases: list[tuple[torch.dtype, str]] | None = None) -> None:
    """The kernel, interpreted, gives the reference's very codes and scales, and leaves the rest alone, padding too."""
    from bladellm_kernels.kv_write_triton import launch_kv_write

    cases = cases or list(product(TYPES, FORMATS))
    for dtype, name in cases:
        for heads, dim, layout in ((3, 18, {}), (2, 32, {"mapped": True})):
            given = memory(name, heads, dim, dtype, "cpu", **layout)
            expected = twin(given)
            rows, places = written(given, len(KINDS))
            k, v = (torch.cat([tokens_of(kind, 1, heads, dim, dtype, "cpu") for kind in KINDS]) for _ in range(2))
            if name != "no_quant":
                k[3, 1, 7], v[5, 0, 3], v[6, 1, 0], k[0, 0] = torch.nan, torch.inf, -torch.inf, torch.nan
            rows[2], rows[-1], places[-1] = -1, -3, -3
            stored = rows >= 0
            launch_kv_write(given.kv, rows, places, k, v, tile=32)
            kv_write_reference(expected, rows, k, v, places)
            same_bits(given.kv, expected)
            given.untouched_but(rows[stored], places[stored])
    interpreted_rotary(cases)


def interpreted_rotary(cases: list[tuple[torch.dtype, str]]) -> None:
    from bladellm_kernels.kv_write_triton import launch_rotary_kv_write

    for dtype, name in cases:
        for rotate, dim in ((False, 18), (True, 24), (True, 32)):
            given = memory(name, 2, dim, dtype, "cpu", mapped=True)
            expected = twin(given)
            rows, places = written(given, 5)
            parts = problem(5, 6, 2, dim, dtype, "cpu")
            q, k, v = (parts[part] for part in "qkv")
            matrix = hadamard_matrix(dim, dtype) if rotate else None
            tables = rotary_tables(*parts["angles"])
            out = torch.full((5, 8, dim), torch.nan, dtype=dtype)
            norms = HeadNorms(*torch.randn(2, dim).to(dtype), 1e-5) if dim == 24 else None
            expected_q = rotary_kv_write_reference(q, k, v, *tables, expected, rows, places, norms=norms, rotate=matrix)
            turned = k.clone()
            rotary_kv_write(
                q, turned, v, *tables, twin(given), rows, places, norms=norms, rotate=matrix, keep_keys=True
            )
            keeps = random.random() < 0.5
            kept = turned if keeps else k.clone()
            launch_rotary_kv_write(q, k, v, norms, *tables, given.kv, rows, places, matrix, out[:, 1:7], keeps)
            assert_close(k, kept.float(), dtype)
            assert_close(out[:, 1:7], expected_q.float(), dtype)
            assert out[:, 0].isnan().all()
            assert out[:, 7].isnan().all()
            check_same_but_for_rounding(given, expected, rows)
            given.untouched_but(rows, places)


def check_same_but_for_rounding(given: Memory, expected: Any, rows: torch.Tensor) -> None:
    actual, wanted = given.kv.payload[rows].float(), expected.payload[rows].float()
    if given.kv.format.name == "no_quant":
        torch.testing.assert_close(actual, wanted, atol=5e-3, rtol=5e-3)
        return
    assert torch.equal(actual[:, 1], wanted[:, 1]), "values are not rotated"
    assert (actual != wanted).float().mean() < 0.02
    torch.testing.assert_close(given.kv.scales, expected.scales, atol=1e-6, rtol=2e-3, equal_nan=True)


@pytest.mark.parametrize("cases", some_of(["interpreted_sample", "interpreted"], ["interpreted_sample"]))
def test_the_kernel_gives_the_same_interpreted(cases):
    pytest.importorskip("triton")
    run_interpreted("tests.kernels.test_kv_rotary_write", cases)


COMPILED = ["no_quant", "int8", "int4_affine", "fp8_e4m3", "fp12_e4m7"]


@pytest.mark.parametrize(("name", "way"), some_pairs(COMPILED, product([64, 128], [False, True])), ids=str)
def test_the_kernel_compiles_for_hopper(name, way):
    """way: the head dimension, and whether keys are rotated."""
    pytest.importorskip("triton")
    dim, rotate = way
    from bladellm_kernels.kv_write_triton import launch_rotary_kv_write

    dtype = torch.bfloat16
    kv = memory(name, 8, dim, dtype, "cpu").kv
    parts = problem(3, 32, 8, dim, dtype, "cpu")
    norms = HeadNorms(torch.ones(dim, dtype=dtype), torch.ones(dim, dtype=dtype), 1e-6) if dim == 128 else None
    tables, rows = rotary_tables(*parts["angles"]), torch.arange(3)
    matrix = hadamard_matrix(dim, dtype) if rotate else None
    q, k, v = (parts[part] for part in "qkv")
    with compiled_launches() as compiled:
        launch_rotary_kv_write(q, k, v, norms, *tables, kv, rows, rows, matrix, torch.empty_like(q))
    text = compiled["kv_write_kernel"].asm["ptx"]
    assert "sm_90" in text
    assert "st.global.v4" in text
    assert "st.global.b8" not in text
    if not rotate:
        assert "st.global.v2" not in text, "numbers are stored 16 bytes at a time"
    assert "div.full" not in text, "an approximate division gives other codes than the CPU"
    assert "fma.rn.f32" not in text, "a fused product gives other codes than the CPU"
    assert ".ftz" not in text.replace("rsqrt.approx.ftz", ""), "subnormal numbers are numbers"
    assert waits_before_it_writes(text)
    assert spilled(text) == 0
