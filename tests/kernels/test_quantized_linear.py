"""Quantized linear operators against float64 computed from the codes."""

import pytest
import torch
from bladellm_kernels import block_linear, fixed_point, int4_matmul, int8_matmul
from bladellm_kernels.fp8_linear import pack_fp8
from bladellm_kernels.w4a16_linear import KERNEL_ROWS, pack_w4a16
from bladellm_kernels.w8a8_linear import pack_w8a8
from bladellm_kernels.w8a16_linear import pack_w8a16
from bladellm_kernels.weight_units import UnitWeight
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels.quantized_linear_support import DTYPES, MIDDLE, Layer, assert_close, make_layer, rounding
from tests.support.cases import some_pairs

NAMES = ("w4a16", "w8a16", "w8a8", "fp8")
SHAPES = (
    (64, 128, 1),
    (192, 192, 3),  # groups of 64
    (80, 512, 2),  # groups of 256, a partial tile of channels
    (77, 96, 3),  # groups of 32, odd rows
    (48, 512, 1),
    (33, 64, 4),  # groups of 16: no packed kernel
    (31, 96, 2),  # groups of 48
    (5, 35, 5),
    (1, 1, 1),
    (96, 2080, 1),
)


def compare(name: str, layer: Layer, x: torch.Tensor, bias: torch.Tensor | None, **options) -> None:
    expected = layer.reference(name, x, bias, **options)
    unit = rounding(name, x, layer.scales.shape[1])
    assert_close(layer.run(name, x, bias, **options), expected, x, layer.weight(MIDDLE[name]), unit)


@pytest.mark.parametrize(("name", "dtype"), some_pairs(NAMES, DTYPES), ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_operators_match_float64(name: str, shape: tuple[int, int, int], dtype: torch.dtype, device: str) -> None:
    rows, columns, groups = shape
    for batch in (1, 2, 5, 17, KERNEL_ROWS + 3):
        for zeros in (False, True):
            layer = make_layer(name, rows, columns, groups, zeros, device)
            x = torch.randn(batch, columns, device=device).to(dtype)
            compare(name, layer, x, None if zeros else torch.randn(rows, device=device).to(dtype))


@settings(max_examples=40, deadline=None)
@given(
    name=st.sampled_from(NAMES),
    rows=st.integers(1, 150),
    groups=st.integers(1, 5),
    size=st.sampled_from((1, 3, 16, 32, 48, 64, 96, 128)),
    batch=st.integers(0, 80),
    dtype=st.sampled_from(DTYPES),
    zeros=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_operators_match_float64_at_any_size(
    device: str, name: str, rows: int, groups: int, size: int, batch: int, dtype: torch.dtype, zeros: bool, seed: int
) -> None:
    torch.manual_seed(seed)
    layer = make_layer(name, rows, groups * size, groups, zeros, device)
    compare(name, layer, torch.randn(batch, groups * size, device=device).to(dtype), None)


@pytest.mark.parametrize("shape", [(200, 96, 3), (200, 96, 2), (200, 96, 1)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_blocks_join(
    name: str, dtype: torch.dtype, shape: tuple[int, int, int], device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights and inputs larger than one block, the last one smaller."""
    for module, limit, value in (
        (block_linear, "_CPU_ELEMENTS", 96 * 70),
        (block_linear, "_CUDA_ELEMENTS", 96 * 70),
        (fixed_point, "_BLOCK_ROWS", 30),
        (fixed_point, "_BLOCK_ELEMENTS", 1),
    ):
        monkeypatch.setattr(module, limit, value)
    layer, bias = make_layer(name, *shape, True, device), torch.randn(200, device=device).to(dtype) * 20
    for batch in (1, 100):
        compare(name, layer, torch.randn(batch, 96, device=device).to(dtype), bias)
    if name == "w8a8":
        compare(name, layer, torch.randn(100, 96, device=device).to(dtype), bias, input_scale=0.02)


@pytest.mark.parametrize("magnitude", [1e-30, 1e-35, 1e-36, 1e-37, 1e-38, 1e-42])
@pytest.mark.parametrize("name", ["w8a16", "w8a8"])
def test_inputs_near_the_least_float32(name: str, magnitude: float, device: str) -> None:
    layer = make_layer(name, 16, 64, 1, False, device)
    x = torch.randn(50, 64, device=device) * magnitude
    error = (layer.run(name, x).double() - x.double() @ layer.weight(128).t()).abs()
    step = max(magnitude * 4 / 127, torch.finfo(torch.float32).tiny)
    assert (error <= step * layer.weight(128).abs().sum(dim=1)).all()


@pytest.mark.parametrize("name", ["w4a16", "w8a16"])
@pytest.mark.parametrize("groups", [1, 4])
def test_many_float32_rows_lose_nothing(name: str, groups: int, device: str) -> None:
    """Scales that bfloat16 does not hold are used as they are."""
    layer = make_layer(name, 70, 256, groups, True, device)
    x = torch.randn(KERNEL_ROWS + 1, 256, device=device)
    torch.testing.assert_close(layer.run(name, x), layer.reference(name, x).float(), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("input_scale", [None, 0.02])
def test_eight_bit_inputs_are_rounded_as_the_reference_rounds_them(
    input_scale: float | None, dtype: torch.dtype, device: str
) -> None:
    """Integer sums are exact, so only the type of the result rounds; outliers beyond a static scale are clamped."""
    layer = make_layer("w8a8", 40, 700, 1, False, device)
    x = torch.randn(20, 700, device=device).to(dtype)
    x[3] *= 50
    x[4] = 0
    y = layer.run("w8a8", x, input_scale=input_scale)
    expected = layer.reference("w8a8", x, input_scale=input_scale)
    torch.testing.assert_close(y.double(), expected, rtol=torch.finfo(dtype).eps + 1e-6, atol=1e-6)


@pytest.mark.parametrize(("activations", "input_scale"), [("dynamic", None), ("static", 0.004)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_float8_inputs(activations: str, input_scale: float | None, dtype: torch.dtype, device: str) -> None:
    layer = make_layer("fp8", 64, 144, 1, False, device)
    for batch in (1, 6, 33):
        x = torch.randn(batch, 144, device=device).to(dtype)
        x[0] *= 3
        compare("fp8", layer, x, torch.randn(64, device=device).to(dtype))
        compare("fp8", layer, x, None, activations=activations, input_scale=input_scale)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("batch", [2, 256])
def test_every_float8_is_read_exactly(batch: int, dtype: torch.dtype, device: str) -> None:
    finite = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    finite = finite[~finite.isnan()].to(device)
    layer = Layer(finite.to(torch.float8_e4m3fn).unsqueeze(1), torch.ones(len(finite), 1, device=device), None)
    x = torch.ones(batch, 1, device=device, dtype=dtype)
    assert torch.equal(layer.run("fp8", x).float(), finite.repeat(batch, 1))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("options", [{}, {"input_scale": 0.03}], ids=["dynamic", "static"])
@pytest.mark.parametrize("zeros", [False, True])
def test_a_row_does_not_depend_on_its_neighbours(zeros: bool, options: dict, dtype: torch.dtype, device: str) -> None:
    layer = make_layer("w8a8", 130, 4500, 1, zeros, device)
    x = (torch.randn(300, 4500, device=device) * torch.rand(300, 1, device=device) * 9).to(dtype)
    together = layer.run("w8a8", x, **options)
    for rows in (slice(0, 1), slice(7, 23), slice(110, 130), slice(299, 300)):
        assert torch.equal(layer.run("w8a8", x[rows], **options), together[rows])


def test_float32_rows_of_an_eight_bit_weight_do_not_depend_on_their_neighbours(device: str) -> None:
    if device != "cpu":
        pytest.skip("integer arithmetic of unrounded activations is the CPU's")
    layer = make_layer("w8a16", 130, 300, 1, True, device)
    x = torch.randn(40, 300)
    together = layer.run("w8a16", x)
    assert torch.equal(layer.run("w8a16", x[17:18]), together[17:18])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("w8a8", {}),
        ("w8a8", {"input_scale": 0.02}),
        ("fp8", {"activations": "dynamic"}),
        ("fp8", {"activations": "static", "input_scale": 0.02}),
    ],
    ids=["w8a8", "w8a8-static", "fp8-dynamic", "fp8-static"],
)
def test_a_row_that_is_not_finite_leaves_the_others_alone(
    name: str, options: dict, dtype: torch.dtype, device: str
) -> None:
    layer = make_layer(name, 16, 64, 1, False, device)
    x = torch.randn(3, 64, device=device).to(dtype)
    expected = layer.run(name, x, **options)
    assert expected.isfinite().all()
    # A static scale takes the largest code for what is infinite.
    for value in (torch.nan,) if "input_scale" in options else (torch.nan, torch.inf):
        x[1, 5] = value
        y = layer.run(name, x, **options)
        assert not y[1].isfinite().any()
        assert y[1].isnan().all() or value == torch.inf
        assert torch.equal(y[::2], expected[::2])


@pytest.mark.parametrize("name", NAMES)
def test_inputs_may_be_strided_and_stay_as_they_are(name: str, device: str) -> None:
    layer = make_layer(name, 64, 128, 2, True, device)
    wide = torch.randn(128, 24, device=device).to(torch.bfloat16)
    for x in (wide.t()[::3], torch.randn(70, 256, device=device)[:, ::2]):
        before = x.clone()
        y = layer.run(name, x)
        assert torch.equal(y, layer.run(name, x.contiguous()))
        assert y.is_contiguous()
        assert torch.equal(x, before)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_no_rows_give_no_rows(name: str, dtype: torch.dtype, device: str) -> None:
    layer = make_layer(name, 64, 128, 2, False, device)
    y = layer.run(name, torch.empty(0, 128, dtype=dtype, device=device), torch.ones(64, dtype=dtype, device=device))
    assert y.shape == (0, 64)
    assert y.dtype == dtype


@pytest.mark.parametrize("name", ["w4a16", "w8a16"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_processors_without_the_int4_kernel(
    name: str, dtype: torch.dtype, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(int4_matmul, "has_int4_kernel", lambda: False)
    compare(name, make_layer(name, 64, 256, 2, True, device), torch.randn(3, 256, device=device).to(dtype), None)


@pytest.mark.parametrize("kernel", ["int_mm", "float"])
def test_every_integer_product_is_exact(kernel: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also at the largest sums: all codes at their ends, more columns than float32 counts."""
    monkeypatch.setattr(int8_matmul, "_onednn_is_exact", lambda: False)
    for batch, rows, columns in ((1, 7, 13), (40, 33, 2100), (3, 16, 5000)):
        left, right = (
            (torch.rand(count, columns, device=device) < 0.95).to(torch.uint8) * 255 for count in (batch, rows)
        )
        packed = int8_matmul.pack_int8(right, torch.ones(rows, 1, device=device), None)
        if kernel == "int_mm":
            sums = int8_matmul.padded_int_mm(left, int8_matmul.pad_weight(right), rows)
        else:
            sums = int8_matmul.int8_matmul(left, packed)
        expected = (left.long().cpu() - 128) @ (right.long().cpu() - 128).t()
        assert torch.equal(sums.float().cpu(), expected.float())


def test_codes_stay_small(device: str) -> None:
    """Bytes of a packed weight, scales included."""
    codes = torch.randint(0, 16, (512, 2048), dtype=torch.uint8, device=device)
    scales = torch.rand(512, 16, device=device)
    w4 = pack_w4a16(codes, scales, None, torch.bfloat16)
    assert w4.weight.codes.nbytes == codes.numel() / 2
    units = isinstance(w4.weight, UnitWeight)
    odd = pack_w4a16(codes[:, :63], scales[:, :1], None, torch.bfloat16)
    assert odd.weight.codes.nbytes == 512 * (64 if units else 32), "units are whole steps of 128 inputs"
    for rows, columns in ((512, 1376), (500, 1536), (320, 960)):
        packed = pack_w4a16(codes[:rows, :columns], scales[:rows, :1], None, torch.bfloat16)
        filled = [-(-size // 128) * 128 for size in (rows, columns)]
        assert packed.weight.codes.nbytes <= filled[0] * filled[1] / 2, "filled up to 128 at most"
    assert pack_w8a16(codes, scales, None, torch.float32).weight.codes.nbytes == codes.numel()
    assert pack_w8a8(codes, scales[:, :1], None, torch.float32).weight.weight.element_size() == 1
    fp8 = pack_fp8(codes.float().to(torch.float8_e4m3fn), scales[:, :1], torch.bfloat16)
    assert fp8.weight.codes.nbytes == codes.numel() * (1 if device == "cuda" else 2)
