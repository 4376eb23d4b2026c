"""The CUDA kernels of the elementwise operators, interpreted and compiled on the CPU."""

import pytest
import torch
import torch.nn.functional as F
from bladellm_kernels.row_codes import LARGEST, row_codes

from tests.kernels.conditions import DTYPES, assert_close
from tests.kernels.hopper import compiled_launches, spilled, waits_before_it_writes
from tests.kernels.interpreted import run_interpreted
from tests.support.cases import some_pairs

WIDTHS = [1, 7, 64, 200]


def poisoned(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """NaN, or what is unlikely where the type has none, with columns beside it that nobody may write."""
    return torch.full((shape[0], shape[1] + 3), 101 if dtype == torch.int8 else torch.nan).to(dtype)


def norm_inputs(columns: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    x, residual = (torch.randn(5, columns + 2).to(dtype)[:, :columns] for _ in range(2))
    return x, residual, torch.randn(columns).to(dtype)


def interpreted_norms() -> None:
    from bladellm_kernels.rms_norm import add_rms_norm_reference, rms_norm_reference
    from bladellm_kernels.rms_norm_triton import launch_rms_norm

    for dtype in DTYPES:
        for columns in WIDTHS:
            x, residual, weight = norm_inputs(columns, dtype)
            out, total = (poisoned(5, columns, dtype=dtype) for _ in range(2))
            launch_rms_norm(x, None, weight, None, 1e-5, out[:, :columns])
            assert_close(out[:, :columns], rms_norm_reference(x, weight, 1e-5), dtype)
            launch_rms_norm(x, residual, weight, None, 1e-5, out[:, :columns], total[:, :columns])
            normed, expected_total = add_rms_norm_reference(x, residual, weight, 1e-5)
            assert_close(out[:, :columns], normed, dtype)
            assert_close(total[:, :columns], expected_total, dtype)
            index = torch.tensor([3, 0, 3])
            launch_rms_norm(x, residual, weight, index, 1e-5, out[:3, :columns])
            assert_close(out[:3, :columns], normed[index], dtype)
            assert out[:, columns:].isnan().all()
            assert total[:, columns:].isnan().all()
            check_rounded_norms(x, residual, weight)


def check_rounded_norms(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> None:
    """The codes of the norm that the kernel itself gives, and NaN in a row is not lost."""
    from bladellm_kernels.rms_norm_triton import launch_rms_norm

    residual = residual.clone()
    residual[2, -1] = torch.nan
    normed = torch.empty(x.shape, dtype=x.dtype)
    launch_rms_norm(x, residual, weight, None, 1e-5, normed)
    for code_type, largest in LARGEST.items():
        codes, scales = torch.empty(x.shape, dtype=code_type), torch.full((5, 1), torch.nan)
        launch_rms_norm(x, residual, weight, None, 1e-5, codes, None, scales, largest)
        check_same_codes(codes, scales, normed)
        assert scales[2].isnan()


def check_same_codes(codes: torch.Tensor, scales: torch.Tensor, x: torch.Tensor) -> None:
    """Scales to the bit; a code may be the neighbour of a number half-way between both, since interpreted products are
    rounded twice."""
    expected, expected_scales = row_codes(x, codes.dtype)
    torch.testing.assert_close(scales, expected_scales, atol=0, rtol=0, equal_nan=True)
    rows = ~scales.isnan().view(-1)
    actual, expected = codes[rows].float(), expected[rows].float()
    numbers = x[rows].float() / scales[rows]
    half_way = (numbers - (actual + expected) / 2).abs() <= 1e-5 * numbers.abs()
    assert ((actual == expected) | half_way).all()
    # The neighbour is 1 away in int8, and an eighth at most in e4m3, which has three bits after the point.
    step = 1.0 if codes.dtype == torch.int8 else torch.minimum(actual.abs(), expected.abs()).clamp(min=2.0**-6) / 8
    assert ((actual - expected).abs() <= step).all()


def interpreted_silu_mul() -> None:
    from bladellm_kernels.silu_mul import silu_mul_reference
    from bladellm_kernels.silu_mul_triton import launch_silu_mul, launch_silu_mul_quant

    for dtype in DTYPES:
        for columns in WIDTHS:
            gate_up = (torch.randn(3, 2 * columns + 5) * 4).to(dtype)[:, : 2 * columns]
            out = poisoned(3, columns, dtype=dtype)
            launch_silu_mul(gate_up, out[:, :columns], block=64)
            assert_close(out[:, :columns], silu_mul_reference(gate_up), dtype)
            assert out[:, columns:].isnan().all()
            for code_type, largest in LARGEST.items():
                codes, scales = torch.empty(3, columns, dtype=code_type), torch.empty(3, 1)
                launch_silu_mul_quant(gate_up, codes, scales, largest)
                check_same_codes(codes, scales, out[:, :columns])


def interpreted_rows() -> None:
    from bladellm_kernels.embedding_triton import launch_embedding
    from bladellm_kernels.rotary import rotary_tables
    from bladellm_kernels.rotary_triton import launch_rotary_tables
    from bladellm_kernels.widen_triton import launch_widen

    for columns in (*WIDTHS, 1030):
        weight, ids = torch.randn(20, columns + 1).bfloat16()[:, :columns], torch.randint(0, 20, (6,))
        for slots in (None, torch.tensor([5, 1, 1])):
            order = ids if slots is None else ids[slots]
            out = poisoned(len(order), columns, dtype=torch.bfloat16)
            launch_embedding(ids, weight, slots, out[:, :columns])
            assert torch.equal(out[:, :columns], F.embedding(order, weight))
            assert out[:, columns:].isnan().all()
            for first in (0, 1, 9):
                launch_embedding(ids, weight[first : first + 8], slots, out[:, :columns], first)
                expected = F.embedding(order, weight)
                expected[(order < first) | (order >= first + 8)] = 0
                assert torch.equal(out[:, :columns], expected)
        x, wide = torch.randn(3, columns).half(), torch.full((4, columns), torch.nan)
        launch_widen(x, wide[:3])
        assert torch.equal(wide[:3], x.float())
        assert wide[3].isnan().all()
    for frequencies in (torch.rand(9), torch.rand(4, 9)):
        positions, tables = torch.randint(0, 9999, (4,)), torch.full((2, 5, 1, 18), torch.nan)
        launch_rotary_tables(positions, frequencies, 1.3, *tables[:, :4])
        torch.testing.assert_close(tables[:, :4], torch.stack(rotary_tables(positions, frequencies, 1.3)))
        assert tables[:, 4].isnan().all()


def interpreted() -> None:
    interpreted_norms()
    interpreted_silu_mul()
    interpreted_rows()


def test_the_kernels_give_the_same_interpreted():
    pytest.importorskip("triton")
    run_interpreted(__name__, "interpreted")


@pytest.mark.parametrize(("code_type", "rows"), some_pairs([None, *LARGEST], [8, 1024]), ids=str)
def test_norms_and_silu_mul_compile_for_hopper(rows, code_type):
    """16 bytes at a time, no spills, and no store before the wait."""
    pytest.importorskip("triton")
    from bladellm_kernels.rms_norm_triton import launch_rms_norm
    from bladellm_kernels.silu_mul_triton import launch_silu_mul, launch_silu_mul_quant

    x, gate_up = (torch.empty(rows, columns, dtype=torch.bfloat16) for columns in (4096, 2 * 14336))
    out, product = (torch.empty(rows, columns, dtype=code_type or x.dtype) for columns in (4096, 14336))
    scales = None if code_type is None else torch.empty(rows, 1)
    with compiled_launches() as compiled:
        launch_rms_norm(x, x, x[0], None, 1e-6, out, x, scales, LARGEST.get(code_type, 0.0))
        if scales is None:
            launch_silu_mul(gate_up, product)
        else:
            launch_silu_mul_quant(gate_up, product, scales, LARGEST[code_type])
    assert len(compiled) == 2
    for name, kernel in compiled.items():
        check_compiled(name, kernel.asm["ptx"], loads_only=code_type is not None)


def test_norms_take_rows_listed_anywhere():
    """A step's list lies behind arrays of any length: where it begins must not ask for another compilation."""
    from bladellm_kernels.rms_norm_triton import launch_rms_norm

    x, weight, numbers = torch.empty(4, 64), torch.empty(64), torch.zeros(8, dtype=torch.int64)
    kernels = []
    for first in (0, 1):
        with compiled_launches() as compiled:
            launch_rms_norm(x, x, weight, numbers[first : first + 3], 1e-5, torch.empty(3, 64))
        kernels.append(compiled["rms_norm_kernel"])
    assert numbers[1:].data_ptr() % 16 == 8
    assert kernels[0].hash == kernels[1].hash


def test_the_others_compile_for_hopper():
    pytest.importorskip("triton")
    from bladellm_kernels.embedding_triton import launch_embedding
    from bladellm_kernels.rotary_triton import launch_rotary_tables
    from bladellm_kernels.widen_triton import launch_widen

    x, ids = torch.empty(16, 4096, dtype=torch.bfloat16), torch.arange(16)
    tables = torch.empty(2, 16, 1, 128)
    with compiled_launches() as compiled:
        launch_embedding(ids, x, ids, x)
        launch_widen(x, torch.empty(16, 4096))
        launch_rotary_tables(ids, torch.empty(64), 1.0, *tables)
    tables_kernel = compiled.pop("rotary_tables_kernel").asm["ptx"]
    assert waits_before_it_writes(tables_kernel)
    assert ".approx" not in tables_kernel, "angles are large: the precise sine is needed"
    with compiled_launches() as of_a_part:
        launch_embedding(ids, x, ids, x, 7)
    for name, kernel in (*compiled.items(), *of_a_part.items()):
        check_compiled(name, kernel.asm["ptx"])


def check_compiled(name: str, ptx: str, loads_only: bool = False) -> None:
    assert "ld.global.v4.b32" in ptx or "ld.global.L1" in ptx, name
    assert "ld.global.b16" not in ptx, name
    if not loads_only:
        assert "st.global.v4" in ptx, name
    assert "st.global.b16" not in ptx, name
    assert waits_before_it_writes(ptx), name
    assert spilled(ptx) == 0, name
