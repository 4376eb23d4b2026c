"""Weights in units: the layout read back by its definition, the kernels interpreted and compiled on the CPU."""

import dataclasses

import pytest
import torch
from bladellm_kernels.linear_reference import reference_linear
from bladellm_kernels.unit_schedules import SCHEDULES, ManyTokens
from bladellm_kernels.weight_units import pack_units, unit_group_size

from tests.kernels.hopper import products_left_under_way
from tests.kernels.interpreted import run_interpreted

MIDDLE = {4: 8.0, 8: 128.0}


def layer(rows, columns, groups, bits, zeros, device="cpu"):
    codes = torch.randint(0, 2**bits, (rows, columns), dtype=torch.uint8, device=device)
    scales = (torch.rand(rows, groups, device=device) + 0.5).half() / 2**bits
    points = torch.randint(0, 2**bits, (rows, groups), dtype=torch.uint8, device=device) if zeros else None
    return codes, scales, points


@pytest.mark.parametrize(("rows", "columns", "groups"), [(70, 256, 2), (130, 192, 3), (64, 160, 5), (5, 77, 1)])
@pytest.mark.parametrize("bits", [4, 8])
def test_units_hold_every_code_and_scale(rows, columns, groups, bits):
    codes, scales, zeros = layer(rows, columns, groups, bits, zeros=bits == 4)
    weight = pack_units(codes, scales.float(), zeros, bits)
    row = torch.arange(rows).unsqueeze(1)
    column = torch.arange(columns)
    step, rest = column // weight.step, column % weight.step
    units = weight.codes[row // 64, step, row % 64, rest % 32].int()
    assert torch.equal(units >> bits * (rest // 32) & 2**bits - 1, codes.int())
    size = columns // groups
    per_scale = unit_group_size(columns, groups, bits)
    assert size % per_scale == 0
    assert torch.equal(
        weight.scales[row // 64, column // per_scale, row % 64].float(), scales.float()[:, column // size]
    )
    assert weight.scales.dtype == torch.float16, "numbers that fit 16 bits are kept in 16"
    if zeros is not None:
        assert torch.equal(weight.zeros[row // 64, column // per_scale, row % 64], zeros[:, column // size])


@pytest.mark.parametrize(("rows", "columns"), [(256, 128), (640, 896), (1152, 512)])
def test_whole_tiles_take_no_more_than_their_codes_and_scales(rows, columns):
    """Shapes of real models are multiples of 128; counters are for each tile of 64 outputs."""
    for bits, zeros in ((4, True), (8, False)):
        weight = pack_units(*layer(rows, columns, columns // 128, bits, zeros), bits)
        groups = rows * columns // 128
        assert weight.codes.nbytes == rows * columns * bits // 8
        assert weight.scales.nbytes == 2 * groups
        assert weight.zeros is None or weight.zeros.nbytes == groups
        assert weight.arrived.nbytes <= 16 * rows // 64


@pytest.mark.parametrize("rows", [1, 100, 128, 129, 384, 640, 8320])
def test_every_tile_of_the_table_has_its_scales(rows):
    """Of one group a program reads those of its whole tile at once."""
    weight = pack_units(*layer(rows, 32, 1, 4, True), 4)
    chosen = [each for kinds in SCHEDULES.values() for each in kinds.values() if isinstance(each, ManyTokens)]
    for size in {schedule.rows for schedule in chosen}:
        assert weight.scales.numel() >= -(-rows // size) * size


def test_scales_that_need_32_bits_keep_them():
    codes, _, _ = layer(3, 64, 2, 4, zeros=False)
    assert pack_units(codes, torch.rand(3, 2) + 1e-3, None, 4).scales.dtype == torch.float32
    assert pack_units(codes, torch.full((3, 2), 2.0**-40), None, 4).scales.dtype == torch.bfloat16


def test_groups_that_cross_parts_do_not_fit():
    assert unit_group_size(96, 2, 4) is None
    assert unit_group_size(96, 1, 4) == 96
    with pytest.raises(ValueError, match="do not fit"):
        pack_units(*layer(4, 96, 2, 4, zeros=False)[:2], None, 4)


def every_kernel(device, bits, rows, columns, groups, zeros, dtype, tokens, with_bias) -> None:
    """All kinds of schedules against float64, into a poisoned part of a larger output, from a part of a larger x."""
    from bladellm_kernels.unit_linear import unit_linear
    from bladellm_kernels.unit_schedules import Dense

    codes, scales, points = layer(rows, columns, groups, bits, zeros, device)
    weight = pack_units(codes, scales, points, bits)
    x = torch.randn(tokens, columns + 3, device=device).to(dtype)[:, :columns]
    bias = torch.randn(rows, device=device).to(dtype) if with_bias else None
    expected = reference_linear(x, codes, scales, points, MIDDLE[bits], bias)
    many = [ManyTokens(64, 16, 4, 2, 8), ManyTokens(128, 8, 4, 3, 1), ManyTokens(128, 32, 4, 3, 2)]
    many += [ManyTokens(256, 32, 8, 2, 2)]
    # What the table says for a few tokens is in Gluon, which has no interpreter.
    default = [None] if device == "cuda" else []
    for schedule in [*many, Dense(64), *default]:
        whole = torch.full((tokens + 1, rows + 5), torch.nan, dtype=dtype, device=device)
        y = unit_linear(x, weight, bias, out=whole[:tokens, :rows], schedule=schedule)
        assert whole[:, rows:].isnan().all()
        assert whole[tokens:].isnan().all()
        rounding = 2e-3 if dtype == torch.float16 else 1.5e-2 if dtype == torch.bfloat16 else 1e-5
        worst = (y.double() - expected).abs().max() / expected.abs().max()
        assert worst < rounding, f"{schedule}: {worst:.2g}"
        assert not weight.arrived.any(), "counters are left as they were found"


def interpreted() -> None:
    from bladellm_kernels import unit_linear as module

    module.multiprocessors = lambda device: 3
    every_kernel("cpu", 4, 130, 256, 2, True, torch.float32, 5, True)
    every_kernel("cpu", 4, 64, 192, 3, True, torch.float16, 2, False)
    every_kernel("cpu", 4, 64, 160, 5, False, torch.float32, 17, False)
    every_kernel("cpu", 4, 33, 643, 1, True, torch.float32, 3, False)
    every_kernel("cpu", 8, 40, 256, 2, False, torch.float32, 9, True)


def test_the_kernels_interpreted():
    pytest.importorskip("triton")
    run_interpreted("tests.kernels.test_unit_linear", "interpreted")


@pytest.fixture
def whole_sums():
    """As the engine sets cuBLAS, which multiplies for `Dense` and may else round parts of K before it adds them."""
    flags = torch.backends.cuda.matmul
    names = ("allow_bf16_reduced_precision_reduction", "allow_fp16_reduced_precision_reduction")
    before = [getattr(flags, name) for name in names]
    for name in names:
        setattr(flags, name, False)
    yield
    for name, value in zip(names, before, strict=True):
        setattr(flags, name, value)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("tokens", [1, 7, 40, 130])
@pytest.mark.parametrize(("rows", "columns", "groups"), [(1024, 4096, 32), (130, 192, 3), (64, 160, 5), (333, 1155, 1)])
def test_the_kernels_on_a_gpu(rows, columns, groups, tokens, dtype, whole_sums):
    for bits, zeros in ((4, False), (4, True), (8, False)):
        every_kernel("cuda", bits, rows, columns, groups, zeros, dtype, tokens, with_bias=zeros)


@pytest.mark.gpu
def test_split_sums_are_the_same_every_time():
    from bladellm_kernels.unit_linear import unit_linear

    weight = pack_units(*layer(256, 8192, 64, 4, True, "cuda"), 4)
    x = torch.randn(24, 8192, device="cuda").bfloat16()
    schedule = ManyTokens(128, 32, 4, 3, 4)
    first = unit_linear(x, weight, schedule=schedule)
    assert all(torch.equal(unit_linear(x, weight, schedule=schedule), first) for _ in range(50))


TYPES = {"weight": ("*i16", "*fp16", "*u8", "i32", "i32", "i32"), "partial": "*fp32", "arrived": "*i32"}


def compiled_text(kernel, dtype, constants, warps) -> str:
    """PTX of a kernel as a launch with aligned, contiguous tensors compiles it."""
    import triton
    from bladellm_kernels.weight_units_triton import WeightArguments
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    types = {**TYPES, "weight": WeightArguments(*TYPES["weight"])} | dict.fromkeys(("x", "bias", "y"), f"*{dtype}")
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in kernel.arg_names}
    places = [
        place
        for index, name in enumerate(kernel.arg_names)
        if name not in constants and name not in ("tokens", "splits")
        for place in ([(index, part) for part in range(3)] if name == "weight" else [(index,)])
    ]
    attributes = {place: [["tt.divisibility", 16]] for place in places}
    source = ASTSource(kernel, signature, constexprs=constants, attrs=attributes)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps})
    assert not products_left_under_way(compiled.asm["ttgir"])
    return compiled.asm["ptx"]


@pytest.mark.parametrize(
    ("bits", "group_steps", "has_zeros", "dtype"),
    [(4, 1, False, "bf16"), (4, -2, True, "fp16"), (8, 0, False, "bf16")],
)
def test_the_kernels_compile_for_hopper(bits, group_steps, has_zeros, dtype):
    """Codes go from global memory to the tensor cores by 16-byte copies and shared matrices, and no other way."""
    pytest.importorskip("triton")
    from bladellm_kernels.many_tokens_triton import many_tokens_kernel
    from bladellm_kernels.unit_schedules import unit_schedule
    from bladellm_kernels.weight_units_triton import UnitShape

    shape = UnitShape(bits, group_steps, has_zeros, even=True, plain=False)
    for tokens in (64, 128):
        schedule = unit_schedule(tokens, 28672, 4096, rings=False)
        assert isinstance(schedule, ManyTokens)
        names = [field.name for field in dataclasses.fields(schedule) if field.name not in ("programs_per_sm", "warps")]
        constants = {name.upper(): getattr(schedule, name) for name in names}
        constants |= {"SHAPE": shape, "SPLIT": True, "HAS_BIAS": False, "EARLY": True, "x_step": 1}
        text = compiled_text(many_tokens_kernel, dtype, constants, schedule.warps)
        assert "wgmma.mma_async" in text
        assert "cp.async.cg.shared.global [" in text
        assert "ldmatrix" in text
        assert "griddepcontrol.wait" in text
        assert "prefetch.global.L2" in text
        assert "ld.global.b8" not in text or has_zeros
