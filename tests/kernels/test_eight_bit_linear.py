"""Linear layers of 8-bit codes on both sides: the kernels interpreted and compiled on the CPU, and on a GPU."""

import pytest
import torch
from bladellm_kernels.fp8_linear import fp8_linear_reference
from bladellm_kernels.int8_matmul import pad_weight
from bladellm_kernels.w8a8_linear import w8a8_linear_reference

from tests.kernels.hopper import products_left_under_way
from tests.kernels.interpreted import run_interpreted


def integers_match(device, rows, columns, tokens, dtype, zeros, input_scale) -> None:
    """Into a poisoned part of a larger output, from a part of a larger x with a row of zeros, against float64."""
    from bladellm_kernels.eight_bit_linear import eight_bit_linear

    codes = torch.randint(0, 256, (rows, columns), dtype=torch.uint8, device=device)
    scales = torch.rand(rows, 1, device=device) / 100
    points = torch.randint(0, 256, (rows, 1), dtype=torch.uint8, device=device) if zeros else None
    shifts = None if points is None else (scales * (128 - points.float())).view(-1)
    x = torch.randn(tokens, columns + 3, device=device).to(dtype)[:, :columns]
    x[0] = 0
    bias = torch.randn(rows, device=device).to(dtype)
    out = torch.full((tokens, rows + 3), torch.nan, dtype=dtype, device=device)
    y = eight_bit_linear(
        x, pad_weight(codes), scales.view(-1), shifts, bias, input_scale, out=out[:, :rows]
    )  # fmt: skip
    expected = w8a8_linear_reference(x, codes, scales, points, bias, input_scale)
    assert (y.double() - expected).abs().max() <= 2 * max(torch.finfo(dtype).eps, 2.0**-20) * expected.abs().max()
    assert out[:, rows:].isnan().all()


def nan_stays_in_its_row(device) -> None:
    from bladellm_kernels.eight_bit_linear import eight_bit_linear

    weight = pad_weight(torch.randint(0, 256, (33, 300), dtype=torch.uint8, device=device))
    scales, x = torch.rand(33, device=device), torch.randn(4, 300, device=device)
    for input_scale in (None, 0.02):
        expected = eight_bit_linear(x, weight, scales, None, None, input_scale)
        broken = x.clone()
        broken[2, 7] = torch.nan
        y = eight_bit_linear(broken, weight, scales, None, None, input_scale)
        assert y[2].isnan().all()
        assert torch.equal(y[[0, 1, 3]], expected[[0, 1, 3]])


def interpreted() -> None:
    from bladellm_kernels import eight_bit_linear as module

    module.multiprocessors = lambda device: 3
    integers_match("cpu", 70, 1100, 3, torch.float32, True, None)
    integers_match("cpu", 130, 2048, 20, torch.float16, False, None)
    integers_match("cpu", 33, 77, 5, torch.float32, True, 0.02)
    nan_stays_in_its_row("cpu")


def test_the_kernels_interpreted():
    pytest.importorskip("triton")
    run_interpreted("tests.kernels.test_eight_bit_linear", "interpreted")


@pytest.mark.parametrize(
    ("code", "sum_type", "product"), [("i8", "i32", "s32.s8.s8"), ("fp8e4nv", "fp32", "e4m3.e4m3")]
)
def test_the_product_compiles_for_hopper(code, sum_type, product):
    """Both sides go by 16-byte copies to shared memory and from there to the tensor cores."""
    triton = pytest.importorskip("triton")
    from bladellm_kernels.eight_bit_triton import code_product_kernel as kernel
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    constants = {"ROWS": 64, "TOKENS": 16, "BLOCK": 128, "SPLIT": True, "STAGES": 4}
    constants |= {"EVEN": True, "HAS_SHIFTS": False, "HAS_BIAS": False, "EARLY": True}
    types = dict.fromkeys(("codes", "weight"), f"*{code}") | dict.fromkeys(("bias", "y"), "*bf16")
    types |= dict.fromkeys(("steps", "sums", "scales", "shifts"), "*fp32") | {"partial": f"*{sum_type}"}
    types |= {"arrived": "*i32"}
    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in names}
    free = ("tokens", "splits", *constants)
    attributes = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if name not in free}
    source = ASTSource(kernel, signature, constexprs=constants, attrs=attributes)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})
    assert not products_left_under_way(compiled.asm["ttgir"])
    text = compiled.asm["ptx"]
    assert "wgmma.mma_async" in text
    assert product in text
    assert "cp.async.cg.shared.global [" in text


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("tokens", [1, 16, 17, 128])
@pytest.mark.parametrize(("rows", "columns"), [(1024, 4096), (77, 1100), (33, 77)])
def test_the_kernels_on_a_gpu(rows, columns, tokens, dtype):
    from bladellm_kernels.fp8_linear import fp8_linear, pack_fp8

    for zeros, input_scale in ((False, None), (True, None), (True, 0.02)):
        integers_match("cuda", rows, columns, tokens, dtype, zeros, input_scale)
    codes = (torch.randn(rows, columns, device="cuda") * 60).to(torch.float8_e4m3fn)
    scales = (torch.rand(rows, 2, device="cuda") / 100)[:, :1]
    x = torch.randn(tokens, columns, device="cuda").to(dtype)
    for name, input_scale in (("dynamic", None), ("static", 0.02)):
        y = fp8_linear(x, pack_fp8(codes, scales, dtype), None, name, input_scale)
        expected = fp8_linear_reference(x, codes, scales, None, name, input_scale)
        rounding = max(torch.finfo(dtype).eps, 2.0**-11)
        assert (y.double() - expected).abs().max() <= 2 * rounding * expected.abs().max()


@pytest.mark.gpu
def test_nan_stays_in_its_row_on_a_gpu():
    nan_stays_in_its_row("cuda")
