"""gptq_block against its reference, its definition, and its CUDA kernel interpreted and compiled on the CPU."""

from dataclasses import replace

import pytest
import torch
from bladellm_kernels.gptq_block import ColumnGrid, gptq_block, gptq_block_reference

from tests.kernels.conditions import DEVICES
from tests.kernels.interpreted import run_interpreted

SHAPES = [(1, 1), (1, 20), (20, 1), (37, 128), (5, 40), (130, 17), (64, 96)]
GRIDS = [(4, False), (4, True), (8, False), (8, True), (None, False)]


def problem(
    rows: int, columns: int, bits: int | None, asymmetric: bool
) -> tuple[torch.Tensor, torch.Tensor, ColumnGrid]:
    """A weight, a factor with strong coupling between columns, and a grid of three groups that saturates at times."""
    weight = torch.randn(rows, columns)
    inputs = torch.randn(columns, 2 * columns) @ torch.diag(torch.rand(2 * columns)) + torch.randn(2 * columns)
    hessian = (inputs @ inputs.T).double() / columns + 0.05 * torch.eye(columns).double()
    factor = torch.linalg.cholesky(torch.linalg.inv(hessian), upper=True).float().contiguous()
    steps = 448.0 if bits is None else 2.0 ** (bits - 1)
    scales = (1 + 2 * torch.rand(rows, 3)) / steps
    zeros = torch.randint(0, 2**bits, (rows, 3), dtype=torch.uint8) if asymmetric and bits else None
    return weight, factor, ColumnGrid(scales, zeros, torch.randint(0, 3, (columns,)), bits)


def on(device: str, grid: ColumnGrid) -> ColumnGrid:
    zeros = None if grid.zeros is None else grid.zeros.to(device)
    return replace(grid, scales=grid.scales.to(device), zeros=zeros, groups=grid.groups.to(device))


def nearest_level(steps: torch.Tensor, grid: ColumnGrid, zero: torch.Tensor | float) -> torch.Tensor:
    """By looking at every code there is. steps: float64 [N]."""
    if grid.bits is None:
        every = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
        every = every[every.isfinite()].expand(len(steps), -1)
    else:
        every = torch.arange(2**grid.bits).double() - torch.as_tensor(zero).double().reshape(-1, 1)
        every = every.expand(len(steps), -1)
    return (every - steps[:, None]).abs().amin(1)


def check_definition(
    weight: torch.Tensor, factor: torch.Tensor, grid: ColumnGrid, codes: torch.Tensor, errors: torch.Tensor
):
    """Every code is a nearest one to the weight that the codes before it leave, and the errors are theirs."""
    rest, factor = weight.double(), factor.double()
    for i, group in enumerate(grid.groups.tolist()):
        scale = grid.scales[:, group].double()
        middle = 0.0 if grid.bits is None else 2.0 ** (grid.bits - 1)
        zero = middle if grid.zeros is None else grid.zeros[:, group].double()
        level = codes[:, i].double() - zero
        steps = rest[:, i] / scale
        assert ((level - steps).abs() <= nearest_level(steps, grid, zero) + 1e-3 * (1 + steps.abs() / 16)).all()
        error = (rest[:, i] - level * scale) / factor[i, i]
        torch.testing.assert_close(errors[:, i].double(), error, atol=1e-3, rtol=1e-3)
        rest = rest - error[:, None] * torch.where(torch.arange(len(factor)) > i, factor[i], 0.0)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("bits", "asymmetric"), GRIDS)
def test_every_code_is_nearest_and_every_error_is_spread(device, shape, bits, asymmetric):
    weight, factor, grid = problem(*shape, bits, asymmetric)
    given = weight.to(device)
    codes, errors = gptq_block(given, factor.to(device), on(device, grid))
    assert torch.equal(given.cpu(), weight), "the weight is left as it is"
    assert codes.dtype == (torch.float8_e4m3fn if bits is None else torch.uint8)
    check_definition(weight, factor, grid, codes.cpu().float(), errors.cpu())


@pytest.mark.parametrize(("bits", "asymmetric"), GRIDS)
def test_the_reference_follows_the_definition(bits, asymmetric):
    weight, factor, grid = problem(11, 23, bits, asymmetric)
    codes, errors = gptq_block_reference(weight.double(), factor.double(), grid)
    check_definition(weight, factor, grid, codes.float(), errors)


@pytest.mark.parametrize("device", DEVICES)
def test_strided_inputs_and_what_is_below_the_diagonal(device):
    """A block is cut out of a wider weight and factor; the factor's lower triangle is nobody's business."""
    weight, factor, grid = problem(9, 48, 4, True)
    wide, square = torch.full((9, 100), torch.nan), torch.full((100, 100), torch.nan)
    wide[:, 20:68], square[20:68, 20:68] = weight, factor + torch.full((48, 48), 7.0).tril(-1)
    transposed = replace(grid, scales=grid.scales.t().contiguous().t(), zeros=grid.zeros.t().contiguous().t())
    for given in (grid, transposed, replace(transposed, scales=grid.scales)):
        codes, errors = gptq_block(wide.to(device)[:, 20:68], square.to(device)[20:68, 20:68], on(device, given))
        check_definition(weight, factor, grid, codes.cpu().float(), errors.cpu())


@pytest.mark.parametrize("device", DEVICES)
def test_halves_round_to_even(device):
    weight = torch.tensor([[-2.5, -1.5, -0.5, 0.5, 1.5, 2.5, 3.5, 99.0, -99.0]], device=device)
    grid = ColumnGrid(torch.ones(1, 1), None, torch.zeros(9, dtype=torch.int64), 4)
    codes, _ = gptq_block(weight, torch.eye(9, device=device), on(device, grid))
    assert codes.tolist() == [[6, 6, 8, 8, 10, 10, 12, 15, 0]]


@pytest.mark.parametrize("device", DEVICES)
def test_fp8_codes_are_those_of_the_type(device):
    """Without coupling the codes are a plain cast: normal, subnormal, halfway and saturating numbers."""
    every = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    every = every[every.isfinite()].sort().values
    values = torch.cat([every, (every[1:] + every[:-1]) / 2, torch.randn(100) / 100, torch.tensor([500.0, -1e4])])
    grid = ColumnGrid(torch.ones(1, 1), None, torch.zeros(len(values), dtype=torch.int64), None)
    size = len(values)
    codes, _ = gptq_block(values[None].to(device), torch.eye(size, device=device), on(device, grid))
    assert torch.equal(codes.cpu().float()[0], values.clamp(-448, 448).to(torch.float8_e4m3fn).float())


def test_wrong_arguments_are_refused():
    weight, factor, grid = problem(4, 6, 4, True)
    for bad in (
        (weight, factor[:5, :5], grid),
        (weight[:3], factor, grid),
        (weight.double(), factor, grid),
        (weight, factor, replace(grid, groups=grid.groups[:5])),
        (weight, factor, replace(grid, zeros=grid.zeros[:, :1])),
        (weight, factor, replace(grid, bits=None)),
        (weight, factor, replace(grid, bits=9)),
    ):
        with pytest.raises(ValueError, match=r"weight|zeros|bits"):
            gptq_block(*bad)


def interpreted() -> None:
    """The kernel, interpreted, gives the reference's very codes and errors."""
    from bladellm_kernels.gptq_block_triton import launch

    for rows, columns, grids in [(1, 1, GRIDS), (19, 21, GRIDS), (3, 128, GRIDS[1:2])]:
        for bits, asymmetric in grids:
            weight, factor, grid = problem(rows, columns, bits, asymmetric)
            expected, expected_errors = gptq_block_reference(weight, factor, grid)
            codes, errors = launch(weight, factor, grid.scales, grid.zeros, grid.groups, bits)
            assert codes.dtype == expected.dtype
            assert torch.equal(codes.float(), expected.float()), (rows, columns, bits)
            assert torch.equal(errors, expected_errors), (rows, columns, bits)
    every = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    values = torch.cat([every[every.isfinite()], torch.randn(130) / 100]).view(48, 8)
    ones, zeroth = torch.ones(48, 1), torch.zeros(8, dtype=torch.int64)
    codes, _ = launch(values, torch.eye(8), ones, None, zeroth, None)
    assert torch.equal(codes.float(), values.to(torch.float8_e4m3fn).float())


def test_the_kernel_gives_the_same_codes_interpreted():
    pytest.importorskip("triton")
    run_interpreted("tests.kernels.test_gptq_block", "interpreted")


@pytest.mark.parametrize("fp8", [False, True])
def test_the_kernel_compiles_for_hopper(fp8):
    triton = pytest.importorskip("triton")
    from bladellm_kernels.gptq_block_triton import TILE_ROWS, WARPS, gptq_block_kernel
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    constants = {"HAS_ZEROS": not fp8, "FP8": fp8, "ROWS": TILE_ROWS, "COLUMNS": 128}
    types = {"zeros": "*u8", "groups": "*i64", "codes": "*bf16" if fp8 else "*u8"}
    types |= dict.fromkeys(("weight", "factor", "scales", "errors"), "*fp32")
    types |= dict.fromkeys(("lowest", "highest", "middle"), "fp32") | dict.fromkeys(constants, "constexpr")
    signature = {name: types.get(name, "i32") for name in gptq_block_kernel.arg_names}
    options = {"num_warps": WARPS, "enable_fp_fusion": False}
    source = ASTSource(gptq_block_kernel, signature, constexprs=constants)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    text = compiled.asm["ptx"]
    assert "sm_90" in text
    assert "div.rn.f32" in text
    assert "div.full" not in text, "an approximate division gives other codes than the CPU"
    assert "fma.rn.f32" not in text, "a fused product gives other codes than the CPU"
