"""Linear layers of packed weights: the kernel's arithmetic in Python, schedules, and on a GPU."""

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from bladellm_kernels import packed_linear as operator
from bladellm_kernels.cuda_compiler import CudaCompilerError
from bladellm_kernels.cuda_kernel import KeptLaunches
from bladellm_kernels.hopper_parts import SHARED_BYTES, matrices_fit
from bladellm_kernels.packed_linear import PackedSchedule, launch_packed_linear, packed_linear, schedule_for
from bladellm_kernels.packed_weight import GATE_ROWS, NUMBER_BYTES, PATCHES, TILE_BYTES, PackedWeight, pack_weight

from tests.kernels.packed_support import MODEL, NUMBER, emulated
from tests.support.cases import examples

PROCESSOR_BYTES, CTA_BYTES = 228 << 10, 1024
"""Shared memory of a multiprocessor, and what the system takes of it for each CTA."""


def random_schedule(rows: int, inputs: int) -> PackedSchedule:
    """Any that can be launched for so many rows and inputs."""
    tokens = random.choice([count for count in (*operator.TOKENS, 24, 40, 56) if count >= rows])
    groups, cluster = random.randint(1, operator.MAX_GROUPS), random.randint(1, min(operator.MAX_CLUSTER, inputs // 64))
    stages = random.randint(2, 8), random.randint(2, 8)
    return PackedSchedule(tokens, groups, cluster, *stages, random.randrange(3), random.random() < 0.5)


def random_weight(rows: int, inputs: int, gated: bool, device: str = "cpu") -> tuple[torch.Tensor, PackedWeight]:
    """bfloat16 [rows, inputs], some numbers far from the others of their rows, and the same packed."""
    while True:
        weight = torch.randn(rows, inputs, device=device) * inputs**-0.5
        weight[random.randrange(rows)] = 0
        row, column = (torch.randint(size // 64, (8,), device=device) * 64 for size in (rows, inputs))
        far = 2.0 ** torch.randint(-40, -16, (8,), device=device)
        far[:2] = 2.0 ** torch.randint(3, 7, (2,), device=device)
        weight[row + torch.randint(64, (8,), device=device), column + torch.randint(64, (8,), device=device)] *= far
        # All of one warp's part of a tile.
        first, crowded = random.randrange(rows // 16) * 16, random.randint(1, PATCHES)
        weight[first + torch.randint(16, (crowded,)), torch.randperm(64)[:crowded]] *= 2.0**-30
        whole = weight.bfloat16()
        packed = pack_weight(whole, gated)
        if packed is not None:
            return whole, packed


def exact(x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor | None, gated: bool) -> torch.Tensor:
    """float64."""
    y = x.double() @ weight.double().T
    if gated:
        gate, up = y.chunk(2, 1)
        return gate / (1 + torch.exp(-gate)) * up
    return y if residual is None else y + residual.double()


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("turn", range(10))
def test_every_output_is_written_once_with_all_its_inputs(turn, gated):
    """Padded tiles, a last CTA with fewer tiles than groups, slices without any tokens, patches."""
    rows = random.choice((1, 2, 7, 8, 13, 33, 48, 64))
    weight, packed = random_weight(64 * random.randint(1, 5), 64 * random.randint(1, 6), gated)
    schedule = random_schedule(rows, packed.inputs)
    x = torch.randn(rows, packed.inputs, dtype=torch.float64)
    residual = torch.zeros(rows, packed.outputs) if gated else torch.randn(rows, packed.outputs, dtype=torch.float64)
    out, written = emulated(schedule, x.numpy(), packed, residual.numpy())
    assert (written == 1).all(), schedule
    np.testing.assert_allclose(out, exact(x, weight, residual, gated), rtol=1e-9, atol=1e-9, err_msg=str(schedule))


def test_the_kernel_and_the_format_agree():
    assert (NUMBER["NUMBER_BYTES"], NUMBER["PART_BYTES"] * 3) == (NUMBER_BYTES, NUMBER_BYTES)
    assert NUMBER["PATCH_BYTES"] == 4 * PATCHES == 32
    assert NUMBER_BYTES + 4 * NUMBER["PATCH_BYTES"] == TILE_BYTES
    assert (TILE_BYTES % 16, NUMBER["NO_PATCH"]) == (0, 0xFFFFFFFF), "copies are of whole 16 bytes"
    sums = Path(operator.__file__).with_name("cluster_sums.cu").read_text()
    assert f"UP_ROWS = {GATE_ROWS};" in sums


@pytest.mark.parametrize("rows", range(1, operator.MAX_ROWS + 1))
def test_schedules_fit_twice(rows):
    sizes = [(64 * random.randint(1, 600), 64 * random.randint(1, 300)) for _ in range(examples(100))]
    for weight_rows, inputs in (*MODEL.values(), (64, 64), (128256, 4096), *sizes):
        schedule = schedule_for(rows, weight_rows, inputs)
        operator._check(rows, inputs, schedule)
        assert schedule.tokens >= rows
        assert schedule.cluster <= min(operator.MAX_CLUSTER, inputs // 64), "each CTA has a step"
        assert operator.shared_bytes(schedule) <= SHARED_BYTES
        assert 2 * (operator.shared_bytes(schedule) + CTA_BYTES) <= PROCESSOR_BYTES
        assert operator.shared_bytes(schedule) % 16 == operator._barriers_at(schedule) % 16 == 0


def test_ctas_that_share_a_multiprocessor_have_registers_beside_each_other():
    """Of Llama-3.1-8B gate and up, and the head, have more CTAs than there are multiprocessors."""
    shapes = {**MODEL, "head": (128256, 4096)}
    behind = {name for name, shape in shapes.items() if not schedule_for(64, *shape).ahead}
    assert behind == {"gate-up", "head"}
    assert all(schedule_for(rows, *shape).ahead for rows in range(1, 33) for shape in shapes.values())


@pytest.mark.parametrize("rows", [0, operator.MAX_ROWS + 1])
def test_there_is_no_schedule_of_other_rows(rows):
    assert schedule_for(rows, 4096, 4096) is None


@pytest.mark.parametrize("changed", [
    {"tokens": 8}, {"tokens": 20}, {"tokens": 264}, {"groups": 0}, {"groups": 3}, {"cluster": 0}, {"cluster": 3},
    {"launch_at": 3}, {"launch_at": -1}, {"stages": 1}, {"weight_stages": 1}, {"stages": 99}, {"weight_stages": 99},
], ids=str)  # fmt: skip
def test_schedules_that_do_not_fit_are_refused(changed):
    x, (_, packed) = torch.zeros(9, 128).bfloat16(), random_weight(128, 128, False)
    schedule = replace(PackedSchedule(16, 2, 2, 4, 6), **changed)
    with pytest.raises(ValueError, match="must be"):
        launch_packed_linear(x, packed, x.clone(), None, schedule)


def test_matrices_of_other_sizes_are_refused():
    (_, packed), (_, gated) = random_weight(128, 64, False), random_weight(128, 64, True)
    x, out = torch.zeros(3, 64).bfloat16(), torch.zeros(3, 128).bfloat16()
    for wrong in (x[:, :32], x[0], x[None]):
        with pytest.raises(ValueError, match="x must be"):
            packed_linear(wrong, packed)
    with pytest.raises(ValueError, match="out must be"):
        packed_linear(x, packed, out[:2])
    with pytest.raises(ValueError, match="out must be"):
        packed_linear(x, gated, out)
    with pytest.raises(ValueError, match="residual must be"):
        packed_linear(x, packed, out, out[:, :64])
    with pytest.raises(ValueError, match="no residual"):
        packed_linear(x, gated, residual=out[:, :64])


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("rows", [0, 1, 64, 65])
def test_on_a_cpu_it_is_the_reference(rows, gated):
    weight, packed = random_weight(64 * random.randint(1, 4), 64 * random.randint(1, 4), gated)
    x = torch.randn(rows, packed.inputs).bfloat16()
    assert not matrices_fit(x, x, x)
    residual = None if gated else torch.randn(rows, packed.outputs).bfloat16()
    expected = operator.packed_linear_reference(x, packed, residual)
    torch.testing.assert_close(expected.double(), exact(x, weight, residual, gated), atol=1e-3, rtol=1e-3)
    assert torch.equal(packed_linear(x, packed, residual=residual), expected.bfloat16())
    out = torch.full((rows, packed.outputs), torch.nan).bfloat16()
    assert packed_linear(x, packed, out, residual) is out
    assert torch.equal(out, expected.bfloat16())
    if residual is not None:
        assert torch.equal(packed_linear(x, packed, residual, residual), out)


@pytest.mark.parametrize("error", [OSError("there is no NVRTC"), CudaCompilerError("packed_linear.cu(3): error: ?")])
def test_without_a_compiler_nothing_is_launched_and_one_warning_says_so(error, monkeypatch):
    def fail(*given, **more):
        raise error

    monkeypatch.setattr(operator, "compile_cuda", fail)
    monkeypatch.setattr(operator, "_launches", KeptLaunches())
    operator._kernel.cache_clear()
    x, (_, packed) = torch.zeros(8, 64).bfloat16(), random_weight(64, 64, False)
    given = [torch.full_like(x, 7) for _ in range(2)]
    with pytest.warns(UserWarning, match="left to other kernels") as told:
        found = [launch_packed_linear(x, packed, out, None, PackedSchedule(8, 1, 1, 2, 2)) for out in given]
    assert found == [False, False]
    assert all((out == 7).all() for out in given)
    assert len(told) == 1
    assert str(error) in str(told[0].message)
    operator._kernel.cache_clear()


def test_launches_are_kept_for_one_weight_only(monkeypatch):
    """Another one may lie where the tiles of one lay that is gone."""
    prepared = []
    monkeypatch.setattr(operator, "_launches", KeptLaunches())
    monkeypatch.setattr(operator, "_prepare", lambda *given: prepared.append(given[1]))
    x, (_, packed) = torch.zeros(1, 64).bfloat16(), random_weight(128, 64, False)
    out = torch.zeros(1, 128).bfloat16()
    weights = packed, replace(packed, factors=packed.factors.clone()), replace(packed, gated=True)
    for weight in (*weights, *weights):
        launch_packed_linear(x, weight, out[:, : weight.outputs], None, PackedSchedule(8, 1, 1, 2, 2))
    assert len(prepared) == len(weights)


def inside(rows: int, columns: int, scale: float = torch.nan) -> torch.Tensor:
    """Random numbers of a larger matrix of NaN."""
    whole = torch.full((rows + 3, columns + 8), torch.nan, device="cuda", dtype=torch.bfloat16)
    return whole[:rows, :columns].copy_(torch.randn(rows, columns, device="cuda") * scale)


def assert_right(
    out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor | None, gated: bool
) -> None:
    """But for one rounding to bfloat16, and those of sums in float32; nothing is written around it."""
    expected = exact(x, weight, residual, gated)
    summed = x.double().abs() @ weight.double().abs().T
    if gated:
        gate, up = (x.double() @ weight.double().T).abs().chunk(2, 1)
        summed = 1.1 * summed.chunk(2, 1)[0] * up + summed.chunk(2, 1)[1] * gate
    assert ((out.double() - expected).abs() <= 2.0**-8 * expected.abs() + 2e-5 * (summed + expected.abs())).all()
    assert out._base[len(out) :].isnan().all()
    assert out._base[:, out.shape[1] :].isnan().all()


@pytest.mark.gpu(hopper=True)
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("rows", [1, 7, 8, 9, 16, 24, 32, 40, 48, 63, 64])
def test_on_a_gpu(rows, gated):
    """Any schedules; rows of x behind those that count are NaN."""
    some = 64 * random.randint(1, 40), 64 * random.randint(1, 70)
    for weight_rows, inputs in (some, (64 * 131, 64), random.choice(list(MODEL.values()))):
        weight, packed = random_weight(weight_rows, inputs, gated, "cuda")
        x, out = inside(rows, inputs, 1), inside(rows, packed.outputs)
        residual = None if gated or random.random() < 0.5 else inside(rows, packed.outputs, 1)
        for launch_at in range(3):
            schedule = replace(random_schedule(rows, inputs), launch_at=launch_at)
            results = []
            for _ in range(2):
                assert launch_packed_linear(x, packed, out.fill_(torch.nan), residual, schedule)
                results.append(out.clone())
            assert_right(out, x, weight, residual, gated)
            assert torch.equal(*results), schedule
        assert packed_linear(x, packed, out.fill_(torch.nan), residual) is out
        assert_right(out, x, weight, residual, gated)


@pytest.mark.gpu(hopper=True)
@pytest.mark.parametrize("launch_at", [0, 1, 2, None])
@pytest.mark.parametrize("rows", [1, 16, 40, 64])
def test_a_chain_reads_what_the_kernel_in_front_wrote(rows, launch_at):
    """Layers start early, one behind another: bits are those of layers that wait for each other. None: as chosen."""
    (_, up), (_, down) = random_weight(2048, 512, True, "cuda"), random_weight(512, 1024, False, "cuda")
    schedules = [schedule_for(rows, weight.rows, weight.inputs) for weight in (up, down)]
    if launch_at is not None:
        schedules = [replace(random_schedule(rows, weight.inputs), launch_at=launch_at) for weight in (up, down)]
    given, x, middle = torch.randn(rows, 512, device="cuda").bfloat16(), inside(rows, 512), inside(rows, 1024)

    def chain(wait: Callable[[], object]) -> None:
        torch.mul(given, 0.5, out=x)
        for _ in range(6):
            assert launch_packed_linear(x, up, middle, None, schedules[0])
            wait()
            assert launch_packed_linear(middle, down, x, x, schedules[1])
            wait()

    chain(torch.cuda.synchronize)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        chain(list)
    for _ in range(20):
        given.normal_()
        chain(torch.cuda.synchronize)
        expected = x.clone()
        assert expected.isfinite().all()
        x.fill_(torch.nan)
        middle.fill_(torch.nan)
        graph.replay()
        assert torch.equal(x, expected)
